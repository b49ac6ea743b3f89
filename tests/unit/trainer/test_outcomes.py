"""No rank reads alone before a collective: its failure would leave the others waiting there.

A function *reads alone* if it opens or looks for a file, or calls a function that does, other than in
an argument of ``outcomes.on_every_rank`` and the like. It *waits* if it calls a collective, or a
function that does. No function of the trainer may do the first and then the second, and none may
give a guard what waits: a rank that fails inside would leave the order of collectives. Followed are
functions and classes of the trainer by their names, and methods of ``self``; other methods are not,
but in a guard no method may have the name of one that waits.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
READS = {
    "open", "safe_open", "read_text", "read_bytes", "is_file", "is_dir", "exists", "iterdir", "glob", "stat",
    "find_checkpoint", "load_common_state_dict", "from_pretrained", "copy_files", "FileSystemReader",
    "read_weights", "read_into",
}  # fmt: skip
COLLECTIVES = {
    "all_gather_object", "all_gather", "all_reduce", "barrier", "broadcast", "broadcast_object_list",
    "new_group", "reduce", "all_to_all",
}  # fmt: skip
"""Of ``torch.distributed``, which all modules import as ``dist``."""
GATHER = "gather"
"""``Exporter.gather``, which functions call on an argument."""
GUARDS = {
    "on_every_rank",
    "same_on_every_rank",
    "_read",
    "_on_first_rank",
    "attempt",
}
"""What is in an argument of these may fail on one rank: all raise, or it is kept for the next gather."""
BEFORE_GROUPS = {"Converter.__init__": "no process groups yet: the rendezvous has a deadline"}
CAUGHT = {"_kept": "its failure is a part of the result"}


@dataclass
class Function:
    """A function or method, and what it calls outside and inside of guards: line, and target."""

    name: str
    calls: list[tuple[int, str]] = field(default_factory=list)
    guarded: list[tuple[int, str]] = field(default_factory=list)


def last_of(node: ast.expr) -> str:
    """Return the last part of a called name."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


@dataclass
class Module:
    """The functions of a module, and where its names come from."""

    path: str
    tree: ast.Module
    imported: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rlpost."):
                for each in node.names:
                    self.imported[each.asname or each.name] = f"{node.module}.{each.name}"

    def functions(self) -> Iterator[Function]:
        """Yield functions and methods; what is defined inside of one belongs to it."""
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef):
                yield self.described(node, node.name, owner="")
            elif isinstance(node, ast.ClassDef):
                for each in node.body:
                    if isinstance(each, ast.FunctionDef):
                        yield self.described(each, f"{node.name}.{each.name}", owner=node.name)

    def described(self, node: ast.FunctionDef, name: str, *, owner: str) -> Function:
        made = Function(f"{self.path}.{name}")
        passed = {
            last_of(argument)
            for call in ast.walk(node)
            if isinstance(call, ast.Call) and last_of(call.func) in GUARDS
            for argument in call.args
        }
        self.visit(node.body, made, passed, owner)
        if last_part(name) not in GUARDS:  # these pass on what they are given
            made.guarded = self.guarded(node, owner)
        return made

    def guarded(self, node: ast.FunctionDef, owner: str) -> list[tuple[int, str]]:
        """Return what the arguments of guards in a function call, or are: line, and target.

        A name is resolved to the inner function, lambda or partial; a parameter stays a name.
        """
        local: dict[str, list[ast.AST]] = {}
        for each in ast.walk(node):
            if isinstance(each, ast.FunctionDef) and each is not node:
                local.setdefault(each.name, []).extend(each.body)
            elif isinstance(each, ast.Assign) and is_function(each.value):
                for name in each.targets:
                    local.setdefault(last_of(name), []).append(each.value)
        found, seen = list[tuple[int, str]](), set[str]()
        left: list[ast.AST] = [
            argument
            for call in ast.walk(node)
            if isinstance(call, ast.Call) and last_of(call.func) in GUARDS
            for argument in call.args
        ]
        while left:
            for each in ast.walk(left.pop()):
                if isinstance(each, ast.Name) and each.id in local and each.id not in seen:
                    seen.add(each.id)
                    left += local[each.id]
                elif isinstance(each, ast.Name | ast.Attribute):
                    found.append((each.lineno, self.target(each, owner)))
        return found

    def visit(
        self, nodes: list[ast.stmt] | list[ast.AST], made: Function, passed: set[str], owner: str
    ) -> None:
        """Collect calls; ``passed`` are names of inner functions that are arguments of guards."""
        for node in nodes:
            if isinstance(node, ast.FunctionDef) and node.name in passed:
                continue
            if isinstance(node, ast.Call):
                made.calls.append((node.lineno, self.target(node.func, owner)))
                if last_of(node.func) in GUARDS:
                    continue
            self.visit(list(ast.iter_child_nodes(node)), made, passed, owner)

    def target(self, called: ast.expr, owner: str) -> str:
        """Return the full name of a function of rlpost, ``dist.NAME``, or the last part of a name."""
        last = last_of(called)
        if isinstance(called, ast.Name):
            return self.imported.get(last, f"{self.path}.{last}" if self.defines(last) else last)
        if not isinstance(called, ast.Attribute) or not isinstance(called.value, ast.Name):
            return last
        if called.value.id == "self":
            return f"{self.path}.{owner}.{last}"
        if called.value.id == "dist":
            return f"dist.{last}"
        module = self.imported.get(called.value.id)
        return last if module is None else f"{module}.{last}"

    def defines(self, name: str) -> bool:
        kinds = (ast.FunctionDef, ast.ClassDef)
        return any(isinstance(node, kinds) and node.name == name for node in self.tree.body)


def grown(functions: Mapping[str, Function], calls: set[str]) -> set[str]:
    """Return the calls with those of all functions that make one of them."""
    known, more = set(calls), set(calls)
    while more:
        more = {
            name
            for one in functions.values()
            if any(call in known for _, call in one.calls)
            for name in (one.name, one.name.removesuffix(".__init__"))
        } - known
        known |= more
    return known


def problems(sources: Mapping[str, str]) -> list[str]:
    """Return the functions of ``{name of a module: its text}`` that read alone and then wait."""
    functions = {
        one.name: one
        for path, text in sources.items()
        for one in Module(path, ast.parse(text)).functions()
    }
    alone = {name: one for name, one in functions.items() if last_part(name) not in CAUGHT}
    outcomes = {f"rlpost.trainer.outcomes.{name}" for name in ("gather_objects", *GUARDS)}
    found = []
    reads = grown(alone, READS | {f"rlpost.durable.torch_dist_folder.{name}" for name in READS})
    waits = grown(functions, {f"dist.{name}" for name in COLLECTIVES} | outcomes | {GATHER})
    methods = {last_part(name) for name in waits if is_method(name)}
    for one in functions.values():
        found += [
            f"{one.name}: waits in a guard, for {call} in line {line}"
            for line, call in one.guarded
            if call in waits or call in methods
        ]
    for name, one in alone.items():
        first = min((line for line, call in one.calls if call in reads), default=None)
        last = max((line for line, call in one.calls if call in waits), default=0)
        if first is not None and first < last and not name.endswith(tuple(BEFORE_GROUPS)):
            found.append(f"{name}: reads alone in line {first}, and waits in line {last}")
    return found


def is_function(value: ast.expr) -> bool:
    is_partial = isinstance(value, ast.Call) and last_of(value.func) == "partial"
    return is_partial or isinstance(value, ast.Lambda)


def is_method(name: str) -> bool:
    return name.rpartition(".")[0].rpartition(".")[2][:1].isupper()


def last_part(name: str) -> str:
    return name.rpartition(".")[2]


OF_RANKS = (
    "rlpost/trainer/**/*.py",
    "rlpost/extensions/converting/conversion.py",
    "rlpost/extensions/converting/fp8_folder.py",
)
"""Modules whose functions run on several ranks."""


def sources() -> dict[str, str]:
    return {
        path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path.read_text()
        for pattern in OF_RANKS
        for path in ROOT.glob(pattern)
    }


def whole_name(module: str) -> str:
    """Return the name of a module with its package, which is the trainer by default."""
    return module if module.startswith("rlpost.") else f"rlpost.trainer.{module}"


def test_no_rank_reads_alone_before_a_collective() -> None:
    assert problems(sources()) == []


def test_each_module_that_guards_ranks_is_read() -> None:
    """A module that moves out of the trainer must not leave this check."""
    users = {
        path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        for path in ROOT.glob("rlpost/**/*.py")
        if "rlpost.trainer.outcomes" in path.read_text()
    }
    assert users <= sources().keys() and len(users) > 5


UNGUARDED = {
    "a read in the function": (
        "rlpost.extensions.converting.conversion", "on_every_rank(\n            lambda: import_weights(self.inventory, "
        "HuggingFaceFolder(folder)), WeightError\n        )",
        "HuggingFaceFolder(folder)\n        dist.barrier()",
    ),
    "presence": (
        "kept_weights", "same_on_every_rank(lambda: find_checkpoint(saved), CheckpointError) is None",
        "find_checkpoint(saved) is None",
    ),
    "a function that reads": (
        "megatron_checkpoint", "_read(lambda: stored_keys(folder), folder)", "stored_keys(folder)"
    ),
    "a class that reads": (
        "initial_weights", "on_every_rank(lambda: import_weights(inventory, HuggingFaceFolder(folder)), WeightError)",
        "import_weights(inventory, HuggingFaceFolder(folder))",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNGUARDED)
def test_a_read_without_its_guard_is_found(case: str) -> None:
    module, guarded, bare = UNGUARDED[case]
    name, given = whole_name(module), sources()
    assert guarded in given[name]
    found = problems({**given, name: given[name].replace(guarded, bare)})
    assert any(problem.startswith(name) for problem in found), found


COLLECTIVE = {
    "a partial": (
        "weight_files", "on_every_rank(write, partial(", "on_every_rank(partial(export_folder, folder), partial("
    ),
    "an inner function": (
        "weight_files", "shutil.rmtree(temporary, ignore_errors=True)", "peft_tensors(inventory, adapters)"
    ),
    "a method": (
        "rank", "self._critic().export(folder)",
        "on_every_rank(partial(self._critic().export, folder), CheckpointError)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", COLLECTIVE)
def test_a_collective_in_a_guard_is_found(case: str) -> None:
    module, local, collective = COLLECTIVE[case]
    name, given = whole_name(module), sources()
    assert local in given[name]
    found = problems({**given, name: given[name].replace(local, collective)})
    assert any(problem.startswith(name) and "in a guard" in problem for problem in found), found
