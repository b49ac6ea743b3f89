"""Every method that a group calls by name exists in its worker class with matching arguments.

The worker classes are parsed, because importing the actor would load torch and Megatron-core.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest

from rlpost.driver.worker_groups import ActorGroup, EngineWorkers

ROOT = Path(__file__).parents[3]
RUNS = {
    ActorGroup: ("rlpost/trainer/actor.py", "Actor"),
    EngineWorkers: ("rlpost/engines/engine.py", "Engine"),
}
# methods of the groups that call no method by name
NOT_CALLS = {"names", "reorder", "spans", "send", "fetch_columns"}
NOT_CALLS |= {"replace", "dead", "processes", "kill", "until_ended", "standby"}
NUM_RANKS = 2


class Recorder:
    """Fake workers that record each call as (name, number of arguments, keywords)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, frozenset[str]]] = []

    def __len__(self) -> int:
        return NUM_RANKS

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        self.calls.append((method, len(arguments), frozenset()))
        return [[], []]

    async def call_each(self, method: str, arguments: Any, **keywords: Any) -> list[Any]:
        assert len(arguments) == NUM_RANKS
        self.calls += [(method, len(own), frozenset(keywords)) for own in arguments]
        return [[], []]

    async def call_each_stored(self, method: str, arguments: Any) -> list[Any]:
        return await self.call_each(method, arguments)

    async def answers_aside(self, method: str, *arguments: Any, within_s: float) -> list[Any]:
        return await self.call(method, *arguments)

    async def abandon(self, method: str, indices: Any, *, within_s: float) -> None:
        await self.call(method)

    call_aside = call


def methods(group: type) -> list[str]:
    return [name for name in vars(group) if not name.startswith("_") and name not in NOT_CALLS]


CASES = [
    pytest.param(group, name, RUNS[group], id=f"{group.__name__}.{name}")
    for group in RUNS
    for name in methods(group)
]


@pytest.mark.parametrize(("group", "name", "runs"), CASES)
def test_a_method_called_by_name_exists_and_takes_these_arguments(
    group: type, name: str, runs: tuple[str, str]
) -> None:
    recorder = Recorder()
    method = getattr(group(recorder), name)
    given = {
        parameter.name: _example(parameter)
        for parameter in inspect.signature(method).parameters.values()
    }
    many = [value for key, value in given.items() if key == "parts"]
    keywords = {key: value for key, value in given.items() if key != "parts"}
    asyncio.run(method(*(many[0] if many else ()), **keywords))
    assert recorder.calls
    for called, num_arguments, names in recorder.calls:
        target = _target(*runs, called)
        if isinstance(target, ast.FunctionDef):
            _check_arguments(target, num_arguments, names)


def _example(parameter: inspect.Parameter) -> Any:
    if parameter.name == "places":
        size = 4 if "BroadcastPlace" in parameter.annotation else 2
        return [("x",) * size] * NUM_RANKS
    lists = {"batches": ["b"] * NUM_RANKS, "parts": ("weights",), "ranks": (0,)}
    lists |= {"old_logprobs": [None] * NUM_RANKS, "advantages": [None] * NUM_RANKS}
    lists |= {"values": ["v"] * NUM_RANKS, "returns": [None] * NUM_RANKS}
    return lists.get(parameter.name, "x")


def _target(file: str, class_name: str, dotted: str) -> ast.AST:
    """Find a dotted name in a class or its bases.

    The result is the AST of a method, of a property, or of the value that a method assigns to an
    attribute.
    """
    first, _, rest = dotted.partition(".")
    classes = _with_bases(file, class_name)
    if not rest:
        for _, found in classes:
            for node in found.body:
                if isinstance(node, ast.FunctionDef) and node.name == first:
                    return node
    for tree, found in classes:
        value = _assigned(found, first)
        if value is None:
            continue
        if not rest:
            return value
        assert isinstance(value, ast.Call) and isinstance(value.func, ast.Name), (
            f"{class_name}.{first} is made of a class"
        )
        return _target(_file_of(tree, value.func.id) or file, value.func.id, rest)
    raise AssertionError(f"{class_name} has no {first}")


def _with_bases(file: str, class_name: str) -> list[tuple[ast.Module, ast.ClassDef]]:
    """Return a class and its base classes within rlpost, each with its module."""
    tree = ast.parse((ROOT / file).read_text())
    found = _class(tree, class_name)
    inherited = [(tree, found)]
    for base in found.bases:
        if not isinstance(base, ast.Name):
            continue
        in_this_file = any(
            isinstance(node, ast.ClassDef) and node.name == base.id for node in tree.body
        )
        file_of_base = file if in_this_file else _file_of(tree, base.id)
        if file_of_base is not None:
            inherited += _with_bases(file_of_base, base.id)
    return inherited


def _file_of(tree: ast.Module, name: str) -> str | None:
    """Return the rlpost file from which a module imports a name, or None."""
    for node in tree.body:
        if (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").startswith("rlpost.")
            and any(alias.name == name for alias in node.names)
        ):
            return f"{(node.module or '').replace('.', '/')}.py"
    return None


def _class(tree: ast.Module, name: str) -> ast.ClassDef:
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def _assigned(found: ast.ClassDef, attribute: str) -> ast.AST | None:
    """Return the value that a method assigns to ``self.attribute``, or None."""
    for node in ast.walk(found):
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
        for target in targets:
            if (
                isinstance(target, ast.Attribute)
                and target.attr == attribute
                and node.value is not None
            ):
                return node.value
    return None


def _check_arguments(function: ast.FunctionDef, num_arguments: int, names: frozenset[str]) -> None:
    arguments = function.args
    most = len(arguments.args) - 1  # without self
    least = most - len(arguments.defaults)
    assert arguments.vararg or least <= num_arguments <= most, (
        f"{function.name} takes {least} to {most} arguments"
    )
    assert names <= {one.arg for one in (*arguments.args, *arguments.kwonlyargs)}, (
        f"{function.name}: {names}"
    )
    needed = {
        one.arg
        for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    }
    assert needed <= names, f"{function.name} needs {needed - names}"


def test_no_other_module_calls_a_worker_by_name() -> None:
    """Editors cannot follow such calls, and type checkers do not notice a renamed method."""
    found = []
    for path in (ROOT / "rlpost").rglob("*.py"):
        if path.name in ("worker_groups.py", "workers.py"):
            continue
        found += [
            f"{path.name}:{node.lineno}"
            for node in ast.walk(ast.parse(path.read_text()))
            if _is_by_name(node)
        ]
    assert not found


def _is_by_name(node: ast.AST) -> bool:
    """Whether a node is a call like ``x.call_each(...)`` or ``workers.call(...)``."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    method, owner = node.func.attr, ast.unparse(node.func.value)
    return method in ("call_each", "call_each_stored", "call_aside") or (
        method == "call" and ("worker" in owner or "actors" in owner)
    )
