"""Check that the user functions that settings name exist and have the right signature.

Input: settings.
Output: one line for each setting whose file is missing or invalid, lacks the function, or has one
with the wrong signature.
Files are parsed and never executed. ``module.function`` is searched on sys.path; a module that is
not found is left to the nodes, where more may be installed.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rlpost.algorithm.signatures import Kind, not_async, problem, signature_of, takes_engines
from rlpost.config.eval_sets import eval_sets
from rlpost.config.extensions import moved, why_not_importable
from rlpost.config.flags import flag
from rlpost.config.tree import Config
from rlpost.config.wording import listed
from rlpost.errors import NO_FUNCTION_FILE, ConfigError, choice, suggestion

SETTINGS: tuple[tuple[str, str, Kind], ...] = (
    ("grpo", "custom_loss_function_path", "loss"),
    ("grpo", "custom_advantage_function_path", "advantage"),
    ("grpo", "custom_reward_post_process_path", "reward post-process"),
    ("rollout", "custom_rm_path", "reward"),
    ("rollout", "custom_generate_function_path", "generate"),
    ("rollout", "dynamic_sampling_filter_path", "filter"),
    ("rollout", "buffer_filter_path", "buffer filter"),
)
"""Table, key, and kind of the function."""
OF_A_SET: tuple[tuple[str, Kind], ...] = (
    ("custom_rm_path", "reward"),
    ("custom_generate_function_path", "generate"),
)
"""Functions that an evaluation set may override."""
SLIME = "slime"
_SYNCHRONOUS = "slime.rollout.sglang_rollout.generate_rollout"
_FULLY_ASYNC = ("--rollout-mode", "fully_async")
WHOLE_ROLLOUTS: dict[str, tuple[str, str] | None] = {
    _SYNCHRONOUS: None,
    "slime.rollout.sft_rollout.generate_rollout": ("--loss-type", "sft_loss"),
    "slime.rollout.fully_async_rollout.generate_rollout_fully_async": _FULLY_ASYNC,
    "fully_async_rollout.generate_rollout_fully_async": _FULLY_ASYNC,
}
"""slime's rollout functions, and the equivalent setting."""


_PROJECT = Path(__file__).parents[3]
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def function_problems(config: Config) -> list[str]:
    """One line for each function that is missing or has the wrong signature."""
    settings = [
        (flag(key), getattr(getattr(config, table), key), kind) for table, key, kind in SETTINGS
    ]
    with suppress(ConfigError):  # ``eval_problems`` reports an invalid file
        settings += [
            (f"--eval-config {config.eval.eval_config}: {one.name}.{key}", getattr(one, key), kind)
            for one in eval_sets(config.eval)
            for key, kind in OF_A_SET
        ]
    lines = []
    for setting, path, kind in settings:
        if not path:
            continue
        try:
            problems = _problems(path, _kind(kind, config), config)
        except OSError as error:
            problems = [_unreadable(error)]
        except (SyntaxError, ValueError) as error:
            problems = [f"not valid Python: {error}; python -m py_compile shows the place"]
        lines += [f"{setting} {path}: {each}" for each in problems]
    return lines


def _unreadable(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return NO_FUNCTION_FILE
    return f"{error.strerror or error}; give a file that can be read"


def whole_rollout_problems(config: Config) -> list[str]:
    """One line for each function that would replace the whole rollout or evaluation.

    Only this project's rollout accounts for every prompt and journals groups across a preemption.
    """
    flag_values = {
        "--loss-type": config.grpo.loss_type,
        "--rollout-mode": config.rollout.rollout_mode,
    }
    problems = []
    for name, path in (
        ("--rollout-function-path", config.rollout.rollout_function_path),
        ("--eval-function-path", config.eval.eval_function_path),
    ):
        if path is not None and path not in WHOLE_ROLLOUTS:
            problems.append(
                f"{name} {path}: replacing the whole rollout is not supported{suggestion(path, WHOLE_ROLLOUTS)}; use "
                "--custom-generate-function-path for a response, --custom-rm-path for its reward, "
                "--dynamic-sampling-filter-path for the selection of groups; --eval-config sets them per evaluation set"
            )
        needed = WHOLE_ROLLOUTS.get(path or "")
        if (
            needed is not None
            and name == "--rollout-function-path"
            and flag_values[needed[0]] != needed[1]
        ):
            problems.append(
                f"{name} {path} corresponds to {' '.join(needed)}, but {needed[0]} {flag_values[needed[0]]}; use "
                f"{' '.join(needed)}"
            )
    return problems


def _kind(kind: Kind, config: Config) -> Kind:
    return "group reward" if kind == "reward" and config.rollout.group_rm else kind


def _problems(path: str, kind: Kind, config: Config) -> list[str]:
    file, colon, name = path.rpartition(":")
    # FILE.py reads as a module FILE with a function py
    if not colon and Path(path).is_file():
        function_names = (
            listed(sorted(set(_names(ast.parse(Path(path).read_bytes()))))) or "FUNCTION"
        )
        return [f"names a file without a function; write {path}:{function_names}"]
    if colon:
        tree = ast.parse(Path(file).read_bytes())
        names = sorted(set(_names(tree)))
        if name not in names and "*" not in names:
            return [f"the file has no function {name}{choice(name, names)}"]
        return _problems_of(tree, name, kind, config)
    module, _, name = path.rpartition(".")
    source = source_of(module)
    if source is not None:
        return _problems_of(ast.parse(source.read_bytes()), name, kind, config)
    if (
        module.partition(".")[0] == SLIME
        and _may_lack_slime(config)
        and (why := why_not_importable(module, name))
    ):
        return [why]
    if module.partition(".")[0] == "rlpost":
        return [line] if (line := _moved(module, name)) else []
    return []


def declared(path: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """Return the function that a setting names, from its source; None if that is not known."""
    file, colon, name = path.rpartition(":")
    source: Path | None = Path(file)
    if not colon:
        module, _, name = path.rpartition(".")
        source = source_of(module)
    try:
        return None if source is None else _function(ast.parse(source.read_bytes()), name)
    except (OSError, SyntaxError, ValueError):
        return None  # ``function_problems`` reports it


def _problems_of(tree: ast.Module, name: str, kind: Kind, config: Config) -> list[str]:
    """Problems of a function in a file, and the file's imports of missing slime names."""
    missing = _missing_imports(tree) if _may_lack_slime(config) else []
    function = _function(tree, name)
    why = None if function is None else problem(kind, name, signature_of(function))
    if function is not None and why is None and takes_engines(kind, signature_of(function)):
        why = not_async(name) if isinstance(function, ast.FunctionDef) else None
    return [*moved_imports(tree), *missing, *([why] if why else [])]


def _function(tree: ast.Module, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The function, if its signature is known: defined once in this file, without decorators."""
    bound = [node for node in tree.body if name in set(_names(ast.Module([node], [])))]
    if len(bound) != 1 or not isinstance(bound[0], ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    return None if bound[0].decorator_list else bound[0]


def _missing_imports(tree: ast.Module) -> list[str]:
    """slime names that a file imports unconditionally and that rlpost does not provide."""
    reasons: dict[str, str] = {}
    for line, module, name in _imports(tree, outside=(ast.Try, *_FUNCTIONS)):
        if module.partition(".")[0] != SLIME:
            continue
        why = why_not_importable(module, None if name == "*" else name)
        if why is not None and why not in reasons.values():
            reasons[f"line {line}, {module}.{name}"] = why
    return [f"{where.partition(',')[0]}: {why}" for where, why in reasons.items()]


def moved_imports(tree: ast.Module) -> list[str]:
    """Return a line for each module or name of rlpost that a file imports and that does not exist."""
    lines = []
    for line, module, name in _imports(tree, outside=(ast.Try,)):
        if module.partition(".")[0] == "rlpost" and (why := _moved(module, name)):
            lines.append(f"line {line}: {why}")
    return list(dict.fromkeys(lines))


def _moved(module: str, name: str | None) -> str | None:
    """Return why a name of a module of rlpost cannot be imported; None if it can."""
    places = moved()
    whole = f"{module}.{name}" if f"{module}.{name}" in places else module
    if (source := _file_of(whole)) is not None:
        if name in (None, "*") or _file_of(f"{module}.{name}") is not None:
            return None
        names = {*_names(ast.parse(source.read_bytes()))}
        if names & {name, "*", "__getattr__"}:
            return None
        return f"rlpost has no name {module}.{name}; docs/api.md lists the names"
    of_package = [old for old in places if f"{whole}.".startswith(f"{old}.")]
    remedy = "docs/api.md lists the names"
    if of_package:
        old = max(of_package, key=len)
        remedy = f"use {places[old]}{whole[len(old) :]}"
    return f"rlpost has no module {whole}; {remedy}"


def _file_of(module: str) -> Path | None:
    """The file of a module or a package of rlpost; None if there is none."""
    path = _PROJECT.joinpath(*module.split("."))
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.is_file()), None)


def _imports(
    node: ast.AST, outside: tuple[type[ast.AST], ...]
) -> Iterator[tuple[int, str, str | None]]:
    """Yield line, module and name of each absolute import that is not below a node of ``outside``.

    Imports always run with the file outside functions and ``try``, where they may fail.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((child.lineno, alias.name, None) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            if child.module and not child.level:
                yield from ((child.lineno, child.module, alias.name) for alias in child.names)
        elif not isinstance(child, outside):
            yield from _imports(child, outside)


def _may_lack_slime(config: Config) -> bool:
    """Whether slime is not installed here and no image may contain it."""
    return config.cluster.container == "none" and source_of(f"{SLIME}.utils.types") is None


def source_of(module: str) -> Path | None:
    """The file of a module, found without importing its parent packages."""
    parts = Path(*module.split("."))
    for folder in [Path.cwd(), *map(Path, filter(None, sys.path))]:
        for file in (folder / parts.with_suffix(".py"), folder / parts / "__init__.py"):
            if file.is_file():
                return file
    return None


def _names(tree: ast.AST) -> Iterator[str]:
    """Names that a file binds, also inside ``if`` and ``try``; ``*`` stands for any name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]
        elif not isinstance(node, ast.Lambda | ast.comprehension):
            yield from _names(node)
