"""Digests of the files that decide a run's results, besides weights and prompts.

Input: the settings. Output: {key: digest of the contents}: user functions and environments with the
modules beside them that they import, the judge's file, the evaluation sets, the tokenizer with its
chat templates, extensions of other packages. Each checkpoint records them, and a resume names those
that have changed.

A key names the role of an input and not its place: a model folder with another chat template beside
the same weights is a change, the same files at another place are none.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from rlpost.config import extensions
from rlpost.config.checks.functions import OF_A_SET, SETTINGS, source_of
from rlpost.config.eval_sets import EvalSet, eval_sets, set_settings
from rlpost.config.extensions import Extension
from rlpost.config.flags import flag
from rlpost.config.tree import Config
from rlpost.errors import ConfigError, DataError
from rlpost.tasks.fingerprint import NUM_ROWS, image_files
from rlpost.tasks.prompt_settings import prompt_fields
from rlpost.tasks.prompts import PromptFields
from rlpost.tasks.rows import split_source
from rlpost.trainer.weights.hf_folder import processor_files, tokenizer_files

DIGITS = 16


def input_digests(config: Config) -> dict[str, str]:
    """Return the digest of each input by its role.

    Inputs that cannot be read are left out: that is no change. Their users report it.
    """
    digests: dict[str, str] = {}
    for key, function in _functions(config).items():
        with suppress(OSError):
            digests[key] = _digest(code_of(function))
    for key, list_files in _files(config).items():
        with suppress(OSError):
            digests[key] = _digest(list_files())
    return {key: digest for key, digest in digests.items() if digest}


def _functions(config: Config) -> dict[str, str]:
    functions = {
        flag(key): path
        for table, key, _ in SETTINGS
        if (path := getattr(getattr(config, table), key))
    }
    for table in config.tables:
        functions |= table.functions
    for one in _eval_sets(config):
        for key, _ in OF_A_SET:
            if path := getattr(one, key):
                functions[f"{key} of evaluation set {one.name}"] = path
    return functions


def _files(config: Config) -> dict[str, Callable[[], list[Path]]]:
    files: dict[str, Callable[[], list[Path]]] = {}
    for key, name in (
        ("--judge", config.rollout.judge),
        ("--eval-config", config.eval.eval_config),
    ):
        if name:
            files[key] = partial(list, [Path(name)])
    for one in _eval_sets(config):
        path = split_source(one.path)[0]
        fields = prompt_fields(set_settings(one, config.eval, config.rollout))
        files[f"evaluation set {one.name}"] = partial(_files_of_rows, path, fields)
    folder = Path(config.checkpoint.hf_checkpoint)
    files["the tokenizer in --hf-checkpoint"] = partial(tokenizer_files, folder)
    if config.takes_images:
        files["the processor of images in --hf-checkpoint"] = partial(processor_files, folder)
    for row in extensions.of_packages():
        files[f"extension {row.name}"] = partial(_code_of_extension, row)
    return files


def _code_of_extension(row: Extension) -> list[Path]:
    """Return the code with which an extension decides answers and rewards. Raises OSError."""
    names = [row.adapters, row.answers, row.examples]
    names += [reward.make for reward in row.rewards.values()]
    for text_reward in row.text_rewards.values():
        names += [text_reward.score, text_reward.in_box, *text_reward.parts.values()]
    return sorted({file for name in names if name is not None for file in code_of(name)})


def _files_of_rows(path: Path, fields: PromptFields) -> list[Path]:
    """Return a file of prompts and the images that it names, as far as they exist."""
    if fields.image_key is None:
        return [path]
    try:
        images = [image for image in image_files(path, fields, NUM_ROWS) if image.is_file()]
    except DataError:  # the evaluation reports it
        images = []
    return [path, *dict.fromkeys(images)]


def _eval_sets(config: Config) -> Sequence[EvalSet]:
    try:
        return eval_sets(config.eval)
    except ConfigError:  # the evaluation reports it
        return ()


def code_of(function: str) -> list[Path]:
    """Return the file of FILE.py:NAME, module.NAME or module:NAME, and what it imports beside it.

    Imports of other folders are not followed: code of the run is recorded by its commit, packages by
    their versions. Raises OSError.
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
    except (SyntaxError, ValueError):
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


def _digest(paths: Sequence[Path]) -> str:
    """The digest of files, empty without any. Raises OSError."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{path.name} {content}\n".encode())
    return digest.hexdigest()[:DIGITS] if paths else ""
