"""The house rules of docs/architecture.md, held by reading the code: who imports whom, how large a room may be."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("slurm", "bootstrap", "rlpost")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
STAND_INS = ROOT / "rlpost/rollout/sglang_on_cpu"

HEAVY = {"torch", "ray", "numpy", "transformers", "megatron", "sglang", "sglang_router"}
# room: names that may not be imported there, at any depth of the code; the longest matching prefix counts
FORBIDDEN = {
    "slurm": HEAVY | {"rlpost", "bootstrap", "pydantic"},
    "bootstrap": HEAVY | {"rlpost", "slurm", "submitit", "pydantic"},
    "bootstrap.ray_process": (HEAVY - {"ray"}) | {"rlpost", "slurm", "submitit", "pydantic"},
    "bootstrap.bandwidth_probe": (HEAVY - {"torch"}) | {"rlpost", "slurm", "submitit", "pydantic"},
    "rlpost": HEAVY | {"slurm", "bootstrap", "submitit"},
    "rlpost.types": HEAVY | {"rlpost", "slurm", "bootstrap"},
    "rlpost.config": HEAVY
    | {"slurm", "bootstrap", "rlpost.orchestration", "rlpost.rollout", "rlpost.actor", "rlpost.data"},
    "rlpost.data": (HEAVY - {"transformers"}) | {"slurm", "bootstrap", "rlpost.rollout", "rlpost.actor"},
    "rlpost.reward": HEAVY | {"slurm", "bootstrap", "rlpost.rollout", "rlpost.actor"},
    "rlpost.metrics": HEAVY | {"slurm", "bootstrap", "rlpost.rollout", "rlpost.actor"},
    "rlpost.report": HEAVY
    | {"slurm", "bootstrap", "rlpost.rollout", "rlpost.actor", "rlpost.orchestration", "rlpost.cli"},
    "rlpost.algorithm": (HEAVY - {"torch"}) | {"slurm", "bootstrap", "rlpost.rollout", "rlpost.actor"},
    "rlpost.rollout": HEAVY | {"slurm", "bootstrap", "rlpost.actor", "rlpost.weights", "rlpost.orchestration"},
    "rlpost.rollout.server": (HEAVY - {"sglang", "sglang_router", "torch"}) | {"slurm", "bootstrap", "rlpost.actor"},
    "rlpost.actor": {"ray", "sglang", "slurm", "bootstrap", "rlpost.rollout", "rlpost.orchestration"},
    "rlpost.weights": {"ray", "sglang", "slurm", "bootstrap", "rlpost.rollout", "rlpost.orchestration"},
    "rlpost.checkpoint": {"ray", "sglang", "slurm", "bootstrap", "rlpost.rollout", "rlpost.orchestration"},
    "rlpost.orchestration": {"ray", "sglang", "slurm", "submitit", "rlpost.cli", "bootstrap"},
    "rlpost.orchestration.workers": {"sglang", "slurm", "submitit", "rlpost.cli", "bootstrap"},
    "rlpost.cli": HEAVY | {"bootstrap"},
}
# What agents and driver agree on, and where a run lives: both stdlib only, and the trainer may know them.
ALLOWED = {"bootstrap.handoff", "slurm.run_folder"}

MAX_FILE, MAX_FUNCTION, MAX_PARAMETERS = 400, 60, 6
# signatures that Megatron-core prescribes
PRESCRIBED = {("rlpost.actor.attention", "__init__"), ("rlpost.actor.attention", "forward")}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree(path):
    return ast.parse(path.read_text())


@cache
def nodes(path):
    return tuple(ast.walk(tree(path)))


def imports(path):
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def forbidden(module):
    rooms = [room for room in FORBIDDEN if module == room or module.startswith(room + ".")]
    return FORBIDDEN[max(rooms, key=len)]


def functions(path):
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@pytest.mark.parametrize("path", [p for p in FILES if STAND_INS not in p.parents], ids=module_name)
def test_a_room_imports_only_what_it_may(path):
    module = module_name(path)
    banned = forbidden(module)
    found = {
        name
        for name in imports(path)
        for ban in banned
        if (name == ban or name.startswith(ban + "."))
        and name not in ALLOWED
        and not any(name.startswith(good + ".") for good in ALLOWED)
        and not (name in {"bootstrap"} and module.startswith("rlpost"))
    }
    assert not found, f"{module} imports {sorted(found)}"


LIGHT = ("slurm", "bootstrap", "rlpost/config", "rlpost/cli", "rlpost/types.py", "rlpost/check.py")
IMPORTS = """import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
    heavy = {heavy!r} & set(sys.modules)
    assert not heavy, (name, heavy)
"""


def test_light_rooms_pull_in_nothing_heavy():
    """Also through what they import: looked at in a fresh interpreter, with every module of the rooms imported."""
    light = [path for path in FILES if path.relative_to(ROOT).as_posix().startswith(LIGHT)]
    code = IMPORTS.format(names=[module_name(path) for path in light], heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_a_file_is_a_room_with_a_door_plate_and_a_bounded_size(path):
    text = path.read_text()
    assert text.count("\n") <= MAX_FILE
    assert ast.get_docstring(tree(path)), "says nothing about itself"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_functions_are_short_and_take_few_parameters(path):
    for node in functions(path):
        assert node.end_lineno - node.lineno < MAX_FUNCTION, f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        count = len(
            [a for a in node.args.posonlyargs + node.args.args + node.args.kwonlyargs if a.arg not in ("self", "cls")]
        )
        if (module_name(path), node.name) in PRESCRIBED:
            continue
        assert count <= MAX_PARAMETERS, f"{node.name}: {count} parameters"


@pytest.mark.parametrize("path", [p for p in FILES if STAND_INS not in p.parents], ids=module_name)
def test_public_functions_are_typed_and_documented(path):
    body = tree(path).body
    classes = [node for node in body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    assert all(ast.get_docstring(node) for node in classes), [n.name for n in classes if not ast.get_docstring(n)]
    public = [node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    public = [node for node in public if not node.name.startswith("_")]
    for node in public:
        assert ast.get_docstring(node), f"{node.name} has no docstring"
        assert node.returns is not None, f"{node.name} does not say what it returns"
        arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
        assert all(a.annotation for a in arguments), f"{node.name} has an argument without a type"


def test_only_one_file_of_the_trainer_imports_ray_and_of_the_agents_only_the_process_that_becomes_ray():
    users = [module_name(path) for path in FILES if any(name.split(".")[0] == "ray" for name in imports(path))]
    assert users == ["bootstrap.ray_process", "rlpost.orchestration.workers"]
