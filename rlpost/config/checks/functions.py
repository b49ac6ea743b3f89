"""Functions of the user's own that settings name: those of a file are there. The file is read and never run.

In: settings. Out: one line for each setting whose file is missing or broken, does not have the function, or has one
that cannot be called with what it is given. A name in place of a file (``module.function``) is left to the nodes: only
there what it stands in needs to be installed.
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
ARGUMENTS = {
    "custom_loss_function_path": ("tokens", "settings"),
    "custom_advantage_function_path": ("groups", "penalties"),
    "custom_rm_path": ("prompt", "sample"),
    "custom_generate_function_path": ("draft", "prompt", "sampling"),
    "dynamic_sampling_filter_path": ("group",),
    "buffer_filter_path": ("waiting", "num_groups"),
}
"""What each is called with, by position."""
FOREIGN = "args"
"""The first argument of all functions that are written for slime, whose other arguments are other things than ours."""
TAKEN_FROM_SLIME = ("dynamic_sampling_filter_path",)
"""Settings whose functions may have slime's form (``rlpost.rollout.filters``)."""
OF_A_SET = ("custom_rm_path", "custom_generate_function_path")
"""Those that an evaluation set may have of its own."""


def function_problems(config: Config) -> list[str]:
    """One line for each function that is not there."""
    named = [(f"{group}.{key}", key, getattr(getattr(config, group), key)) for group, key in SETTINGS]
    with suppress(ConfigError):  # a file of sets that cannot be used is told with the settings of the evaluation
        named += [
            (f"{config.eval.eval_config}: {one.name}.{key}", key, getattr(one, key))
            for one in eval_sets(config.eval)
            for key in OF_A_SET
        ]
    return [f"{name} = {path}: {problem}" for name, key, path in named if path and (problem := _problem(path, key))]


def _problem(path: str, key: str) -> str | None:
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
    if name in found:
        return _signature_problem(tree, name, key)
    if "*" in found:
        return None
    return f"{file} has no function {name}{suggestion(name, found)}; it has {', '.join(found) or 'none'}"


def _signature_problem(tree: ast.AST, name: str, key: str) -> str | None:
    """Why a function of that name cannot be called as the setting's is; None for what only its file's run can tell."""
    defined = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    function = next((node for node in reversed(defined) if node.name == name), None)
    if function is None or function.decorator_list:
        return None
    given, wanted = function.args, ARGUMENTS[key]
    positional = [argument.arg for argument in (*given.posonlyargs, *given.args)]
    signature = f"{name}({', '.join(wanted)})"
    if positional[:1] == [FOREIGN]:
        if key in TAKEN_FROM_SLIME:
            return None
        return f"{name}({', '.join(positional)}) is written for slime; here it is called as {signature}"
    least = len(positional) - len(given.defaults)
    required = [
        argument.arg for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if not default
    ]
    most = len(wanted) if given.vararg is not None else len(positional)
    if least <= len(wanted) <= most and not required:
        return None
    shown = ", ".join([*positional, *(["*", *required] if required else [])])
    return f"{name}({shown}) is called as {signature}"


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
