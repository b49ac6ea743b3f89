"""Digests of the files that decide a run's results, besides weights and prompts.

Input: the settings. Output: {key: digest of the contents}: user functions and environments with the
modules beside them that they import, the judge's file, the evaluation sets, the tokenizer with its
chat templates. Each checkpoint records them, and a resume names those that have changed.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from rlpost.config.checks.functions import OF_A_SET, SETTINGS, source_of
from rlpost.config.env_names import parse_envs
from rlpost.config.eval_sets import eval_sets
from rlpost.config.flags import flag
from rlpost.config.tree import Config
from rlpost.errors import ConfigError
from rlpost.trainer.weights.hf_folder import tokenizer_files

DIGITS = 16


def input_digests(config: Config) -> dict[str, str]:
    """Return the digest of each input by flag and name. Unreadable files are left to their users."""
    functions = {
        f"{flag(key)} {path}": path
        for table, key, _ in SETTINGS
        if (path := getattr(getattr(config, table), key))
    }
    for env in parse_envs(config.env.env):
        if env.kind == "own":
            functions[f"--env {env.target}"] = env.target
    with suppress(ConfigError):
        for one in eval_sets(config.eval):
            for key, _ in OF_A_SET:
                if path := getattr(one, key):
                    functions[f"{one.name}.{key} {path}"] = path
    files: dict[str, list[Path]] = {key: code_of(path) for key, path in functions.items()}
    for key in ("rollout.judge", "eval.eval_config"):
        table, _, name = key.partition(".")
        if path := getattr(getattr(config, table), name):
            files[f"{flag(name)} {path}"] = [Path(path)]
    folder = Path(config.checkpoint.hf_checkpoint)
    with suppress(OSError):
        files[f"tokenizer of {folder}"] = tokenizer_files(folder)
    return {key: _digest(paths) for key, paths in files.items() if paths}


def code_of(function: str) -> list[Path]:
    """Return the file of FILE.py:NAME, module.NAME or module:NAME, and what it imports beside it.

    Imports of other folders are not followed: code of the run is recorded by its commit, packages by
    their versions.
    """
    file, colon, _ = function.rpartition(":")
    if not colon:
        file = function.rpartition(".")[0]
    source = Path(file) if file.endswith(".py") else source_of(file)
    files: list[Path] = []
    waiting = [] if source is None else [source]
    while waiting:
        path = waiting.pop()
        if path.is_file() and path not in files:
            files.append(path)
            waiting += _beside(path)
    return sorted(files)


def _beside(file: Path) -> list[Path]:
    """The files of modules in the folder of ``file`` that it imports."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level <= 1:
            names |= {node.module} if node.module else {alias.name for alias in node.names}
    paths = []
    for name in names:
        module = file.parent
        for part in name.split("."):  # the packages around a module run too
            module = module / part
            paths += [module.with_name(f"{part}.py"), module / "__init__.py"]
    return paths


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        try:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            content = str(error.strerror)
        digest.update(f"{path.name} {content}\n".encode())
    return digest.hexdigest()[:DIGITS]
