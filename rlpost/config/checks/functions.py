"""Functions of the user's own that settings name: those of a file are there and can be called as they will be.

In: settings. Out: one line for each setting whose file is missing or broken, does not have the function, or has one
with another signature than is needed. Files are read and never run. A name in place of a file (``module.function``) is
looked for where Python would; what is not found there is left to the nodes, where more may be installed.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rlpost.compat.slime.names import lacking
from rlpost.compat.slime.signatures import Kind, problem, signature_of
from rlpost.config.eval_sets import eval_sets
from rlpost.config.flags import flag
from rlpost.config.tree import Config
from rlpost.config.wording import listed
from rlpost.errors import ConfigError, suggestion

SETTINGS: tuple[tuple[str, str, Kind], ...] = (
    ("grpo", "custom_loss_function_path", "loss"),
    ("grpo", "custom_advantage_function_path", "advantage"),
    ("rollout", "custom_rm_path", "reward"),
    ("rollout", "custom_generate_function_path", "generate"),
    ("rollout", "dynamic_sampling_filter_path", "filter"),
    ("rollout", "buffer_filter_path", "buffer filter"),
)
"""Table, key, and what the function is for."""
OF_A_SET: tuple[tuple[str, Kind], ...] = (("custom_rm_path", "reward"), ("custom_generate_function_path", "generate"))
"""Those that an evaluation set may have of its own."""
SLIME = "slime"
_SYNCHRONOUS = "slime.rollout.sglang_rollout.generate_rollout"
_FULLY_ASYNC = ("--rollout-mode", "fully_async")
WHOLE_ROLLOUTS: dict[str, tuple[str, str] | None] = {
    _SYNCHRONOUS: None,
    "slime.rollout.sft_rollout.generate_rollout": ("--loss-type", "sft_loss"),
    "slime.rollout.fully_async_rollout.generate_rollout_fully_async": _FULLY_ASYNC,
    "fully_async_rollout.generate_rollout_fully_async": _FULLY_ASYNC,
}
"""slime's own rollout functions, and the setting that is the same here."""


@dataclass(frozen=True, slots=True)
class _Named:
    """A function that a setting names."""

    setting: str
    path: str
    kind: Kind


def function_problems(config: Config) -> list[str]:
    """One line for each function that is not there or cannot be called."""
    given = [(flag(key), getattr(getattr(config, table), key), kind) for table, key, kind in SETTINGS]
    with suppress(ConfigError):  # a file of sets that cannot be used is told with the settings of the evaluation
        given += [
            (f"--eval-config {config.eval.eval_config}: {one.name}.{key}", getattr(one, key), kind)
            for one in eval_sets(config.eval)
            for key, kind in OF_A_SET
        ]
    found = [_Named(setting, path, _kind(kind, config)) for setting, path, kind in given if path]
    lines = []
    for named in found:
        try:
            problems = _problems(named, config)
        except OSError as error:
            problems = [_unreadable(error)]
        except (SyntaxError, ValueError) as error:
            problems = [f"not valid Python: {error}; python -m py_compile shows the place"]
        lines += [f"{named.setting} {named.path}: {each}" for each in problems]
    return lines


def _unreadable(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file; give FILE.py:FUNCTION, as seen from here, or module.function"
    return f"{error.strerror or error}; give a file that can be read"


def whole_rollout_problems(config: Config) -> list[str]:
    """One line for each function that would replace the whole rollout or evaluation.

    Only the rollout of this project accounts for every prompt, and keeps what a preemption cuts off.
    """
    given = {"--loss-type": config.grpo.loss_type, "--rollout-mode": config.rollout.rollout_mode}
    found = []
    for name, path in (
        ("--rollout-function-path", config.rollout.rollout_function_path),
        ("--eval-function-path", config.eval.eval_function_path),
    ):
        if path is not None and path not in WHOLE_ROLLOUTS:
            found.append(
                f"{name} {path}: a whole rollout is not replaced here{suggestion(path, WHOLE_ROLLOUTS)}; use "
                "--custom-generate-function-path for how an answer is written, --custom-rm-path for its reward, "
                "--dynamic-sampling-filter-path for which groups are trained; an --eval-config has them for each set"
            )
        needed = WHOLE_ROLLOUTS.get(path or "")
        if needed is not None and name == "--rollout-function-path" and given[needed[0]] != needed[1]:
            found.append(
                f"{name} {path} is {' '.join(needed)} here, but {needed[0]} {given[needed[0]]}; use {' '.join(needed)}"
            )
    return found


def _kind(kind: Kind, config: Config) -> Kind:
    return "group reward" if kind == "reward" and config.rollout.group_rm else kind


def _problems(named: _Named, config: Config) -> list[str]:
    file, colon, name = named.path.rpartition(":")
    if not colon and Path(named.path).is_file():  # FILE.py reads as a module FILE with a function py
        there = listed(sorted(set(_names(ast.parse(Path(named.path).read_bytes()))))) or "FUNCTION"
        return [f"is a file and names no function in it; write {named.path}:{there}"]
    if colon:
        tree = ast.parse(Path(file).read_bytes())
        names = sorted(set(_names(tree)))
        if name not in names and "*" not in names:
            return [f"the file has no function {name}{suggestion(name, names)}; it has {', '.join(names) or 'none'}"]
        return _problems_of(tree, name, named.kind, config)
    module, _, name = named.path.rpartition(".")
    source = _source(module)
    if source is not None:
        return _problems_of(ast.parse(source.read_bytes()), name, named.kind, config)
    if module.partition(".")[0] == SLIME and _may_lack_slime(config) and (why := lacking(module, name)):
        return [why]
    return []


def _problems_of(tree: ast.Module, name: str, kind: Kind, config: Config) -> list[str]:
    """What is wrong with a function of a file, and what the file imports of slime that is not here."""
    missing = _missing_imports(tree) if _may_lack_slime(config) else []
    function = _function(tree, name)
    why = None if function is None else problem(kind, name, signature_of(function))
    return [*missing, *([why] if why else [])]


def _function(tree: ast.Module, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The function when its signature can be read: made once, in the file's own code, without decorators."""
    bound = [node for node in tree.body if name in set(_names(ast.Module([node], [])))]
    if len(bound) != 1 or not isinstance(bound[0], ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    return None if bound[0].decorator_list else bound[0]


def _missing_imports(tree: ast.Module) -> list[str]:
    """Names of slime that a file imports and rlpost does not have; not those that it may do without."""
    found: dict[str, str] = {}
    for node in _always(tree):
        if isinstance(node, ast.Import):
            wanted: list[tuple[str, str | None]] = [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            wanted = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        for module, name in wanted:
            why = lacking(module, None if name == "*" else name) if module.partition(".")[0] == SLIME else None
            if why is not None and why not in found.values():
                found[f"line {node.lineno}, {module}.{name}"] = why
    return [f"{where.partition(',')[0]}: {why}" for where, why in found.items()]


def _always(node: ast.AST) -> Iterator[ast.AST]:
    """What runs when a file is imported: outside of functions, and of ``try``, where an import may fail."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Try | ast.Lambda):
            yield from _always(child)


def _may_lack_slime(config: Config) -> bool:
    """Whether slime is not installed where the run will be: here, unless there is an image, which may have it."""
    return config.cluster.container == "none" and _source(f"{SLIME}.utils.types") is None


def _source(module: str) -> Path | None:
    """The file of a module, without importing what stands before its last dot."""
    parts = Path(*module.split("."))
    for folder in [Path.cwd(), *map(Path, filter(None, sys.path))]:
        for file in (folder / parts.with_suffix(".py"), folder / parts / "__init__.py"):
            if file.is_file():
                return file
    return None


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
