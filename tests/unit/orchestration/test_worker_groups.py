"""Each method that a group calls by name exists in the class that runs in its workers, and takes
what it is given.

Read from the source: importing the actor would load torch and Megatron-core.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest

from rlpost.orchestration.worker_groups import ActorGroup, EngineWorkers, WeightCopies

ROOT = Path(__file__).parents[3]
RUNS = {
    ActorGroup: ("rlpost/actor/actor.py", "Actor"),
    EngineWorkers: ("rlpost/rollout/engine.py", "Engine"),
    WeightCopies: ("rlpost/weights/delta.py", "WeightCopy"),
}
# of the workers themselves
NOT_CALLS = {"names", "reorder", "spans", "send", "fetch"}
NOT_CALLS |= {"replace", "dead", "processes", "kill", "until_ended", "standby"}
NOT_CALLS |= {"end_workers"}
NUM_RANKS = 2


class Recorder:
    """In place of the workers: writes down each name with its positional arguments and keywords."""

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
OF_A_CRITIC = (
    *("gpu_positions", "setup", "data_parallel_ranks", "import_weights", "load"),
    *("compute_values", "train_critic", "num_critic_steps", "hold", "release"),
    *("save", "save_is_done", "export_critic", "restore_memory", "offload_memory"),
    *("memory_use", "positions", "write_flight_records"),
)
"""What is called of ranks of a critic that has its own."""
CRITIC = ("rlpost/actor/critic_rank.py", "CriticRank")
CASES += [pytest.param(ActorGroup, name, CRITIC, id=f"critic.{name}") for name in OF_A_CRITIC]


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
    """What ``dotted`` names in a class: a function, a property's, or an attribute that its methods
    assign.
    """
    tree = ast.parse((ROOT / file).read_text())
    found = _class(tree, class_name)
    classes = [(tree, found), *_bases(tree, found)]
    first, _, rest = dotted.partition(".")
    if not rest:
        named = [
            node
            for _, one in classes
            for node in one.body
            if isinstance(node, ast.FunctionDef) and node.name == first
        ]
        return named[0] if named else _assigned(classes, first)[1]
    tree, value = _assigned(classes, first)
    assert isinstance(value, ast.Call) and isinstance(value.func, ast.Name), (
        f"{class_name}.{first} is made of a class"
    )
    module = next(
        node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        and any(alias.name == value.func.id for alias in node.names)
    )
    return _target(f"{module.replace('.', '/')}.py", value.func.id, rest)


def _bases(tree: ast.Module, of: ast.ClassDef) -> list[tuple[ast.Module, ast.ClassDef]]:
    """The classes of rlpost that a class is directly made from, with their modules."""
    names = {base.id for base in of.bases if isinstance(base, ast.Name)}
    found = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rlpost."):
            for name in names.intersection(alias.name for alias in node.names):
                path = ROOT / f"{node.module.replace('.', '/')}.py"
                module = ast.parse(path.read_text())
                found.append((module, _class(module, name)))
    return found


def _class(tree: ast.Module, name: str) -> ast.ClassDef:
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def _assigned(
    classes: list[tuple[ast.Module, ast.ClassDef]], attribute: str
) -> tuple[ast.Module, ast.AST]:
    """The value that a method of one of the classes assigns to ``self.attribute``, and where."""
    for tree, node in ((tree, node) for tree, found in classes for node in ast.walk(found)):
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
                return tree, node.value
    raise AssertionError(f"{classes[0][1].name} has no {attribute}")


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
    """Go-to-definition ends at such a call, and no type checker sees a renamed method."""
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
    """``x.call_each(...)``, ``x.call_aside(...)``, ``workers.call(...)``."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    method, owner = node.func.attr, ast.unparse(node.func.value)
    return method in ("call_each", "call_each_stored", "call_aside") or (
        method == "call" and ("worker" in owner or "actors" in owner)
    )
