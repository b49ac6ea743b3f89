"""Functions of the user's own that settings name: those of a file are there. The file is read and never run.

In: settings. Out: one line for each setting whose file is missing or broken, or does not have the function. A name in
place of a file (``module.function``) is left to the nodes: only there what it stands in needs to be installed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rlpost.config.eval_sets import eval_sets
from rlpost.config.tree import Config
from rlpost.errors import ConfigError, suggestion

SETTINGS = (
    ("grpo", "custom_loss_function_path"),
    ("grpo", "custom_advantage_function_path"),
    ("rollout", "custom_rm_path"),
    ("rollout", "custom_generate_function_path"),
    ("rollout", "dynamic_sampling_filter_path"),
    ("rollout", "buffer_filter_path"),
)
OF_A_SET = ("custom_rm_path", "custom_generate_function_path")
"""Those that an evaluation set may have of its own."""


def function_problems(config: Config) -> list[str]:
    """One line for each function that is not there."""
    named = [(f"{group}.{key}", getattr(getattr(config, group), key)) for group, key in SETTINGS]
    with suppress(ConfigError):  # a file of sets that cannot be used is told with the settings of the evaluation
        named += [
            (f"{config.eval.eval_config}: {one.name}.{key}", getattr(one, key))
            for one in eval_sets(config.eval)
            for key in OF_A_SET
        ]
    return [f"{key} = {path}: {problem}" for key, path in named if path and (problem := _problem(path))]


def _problem(path: str) -> str | None:
    file, colon, name = path.rpartition(":")
    if not colon:
        return None
    try:
        tree = ast.parse(Path(file).read_bytes())
    except OSError as error:
        return "no such file" if isinstance(error, FileNotFoundError) else (error.strerror or str(error))
    except (SyntaxError, ValueError) as error:
        return f"not valid Python: {error}"
    found = sorted(set(_names(tree)))
    if name in found or "*" in found:
        return None
    return f"{file} has no function {name}{suggestion(name, found)}; it has {', '.join(found) or 'none'}"


def _names(tree: ast.AST) -> Iterator[str]:
    """What a file gives a name to, within its ``if`` and ``try`` too; with ``*`` it may be anything."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]
        elif not isinstance(node, ast.Lambda | ast.comprehension):
            yield from _names(node)
