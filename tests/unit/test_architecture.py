"""Enforce the rules of docs/architecture.md on the source: allowed imports, sizes, docstrings."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("common", "slurm", "bootstrap", "rlpost")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
STAND_INS = ROOT / "rlpost/extensions/on_cpu/sglang_on_cpu"
# stand-ins copy foreign interfaces
OURS = [path for path in FILES if STAND_INS not in path.parents]

HEAVY = {"torch", "ray", "numpy", "transformers", "megatron", "sglang"}
# package or module: the large packages that it may import, at any depth of the code; the longest
# matching prefix applies
MAY_IMPORT = {
    "common.torch_store": {"torch"},  # only in processes that use torch anyway
    "bootstrap.agent.ray_process": {"ray"},
    "bootstrap.preflight.bandwidth_probe": {"torch"},
    "rlpost.columns": {"numpy"},
    "rlpost.tasks": {"transformers"},
    "rlpost.tasks.reward": set(),
    "rlpost.tasks.cursor": {"numpy"},
    # numpy: the driver computes penalties of tokens from columns
    "rlpost.algorithm": {"torch", "numpy"},
    # numpy: bytes of engines and of the journal become columns
    "rlpost.engines": {"numpy"},
    # in the process of the server only
    "rlpost.engines.adapter_use": {"sglang"},
    "rlpost.engines.engine_processes": {"sglang"},
    "rlpost.engines.server": {"sglang", "torch"},
    "rlpost.engines.shards.failures": {"sglang", "torch"},
    "rlpost.engines.shards.loader": {"sglang", "torch"},
    "rlpost.engines.shards.parameters": {"torch"},
    "rlpost.engines.shards.recorder": {"torch"},
    "rlpost.engines.shards.tracking": {"torch"},
    "rlpost.rollout": {"numpy"},
    "rlpost.durable": {"numpy"},
    # numpy: pixels; transformers: the processor that makes them, when a trainer asks
    "rlpost.images": {"numpy", "transformers"},
    "rlpost.trainer": {"torch", "numpy", "transformers", "megatron"},
    "rlpost.extensions.in_process": {"torch", "transformers"},
    "rlpost.extensions.on_cpu": {"torch"},
    "rlpost.extensions.rehearsal.all_ranks": {"torch", "megatron"},
    "rlpost.driver": {"torch", "numpy", "transformers"},
    "rlpost.driver.workers": {"torch", "numpy", "ray"},
    # in a process of its own, and in the driver, which has it already
    "rlpost.cli.stack_check": {"transformers"},
    # columns of routes
    "rlpost.extensions.slime.generate": {"numpy"},
    "rlpost.extensions.fetching.assets.pypi": {"transformers"},
    "rlpost.extensions.fetching.tiny_model": {"torch", "transformers"},
    "rlpost.extensions.fetching.tiny_squares": {"torch", "transformers"},
}
# top-level package, or package of rlpost: what it may import of the others and of small libraries
BESIDE = {
    "common": set(),
    "slurm": {"common", "submitit", "psutil"},
    "bootstrap": {"common", "psutil", "netifaces"},
    "rlpost": {"common", "pydantic", "psutil"},
    "rlpost.cli": {"common", "slurm", "pydantic", "psutil", "submitit"},
    "rlpost.extensions.agents.sandbox.jobs": {"common", "slurm"},
    "rlpost.extensions.attach": {"common", "slurm"},
    "rlpost.extensions.fleet.fleet_jobs": {"common", "slurm"},
    "rlpost.extensions.fleet.fleet_verb": {"common", "slurm"},
    "rlpost.extensions.fleet.fleet_view": {"common", "slurm"},
    "rlpost.extensions.fleet.job_part": {"common", "slurm"},
    "rlpost.extensions.doctor": {"common", "slurm"},
    "rlpost.extensions.converting": {"common", "slurm"},
    "rlpost.extensions.sweep": {"common", "slurm"},
    "rlpost.extensions.watching": {"common", "slurm"},
}
WATCHED = {"common", "slurm", "bootstrap", "rlpost", "submitit", "psutil", "pydantic", "netifaces"}
NAMED = (*PACKAGES, "tools", "benchmarks")
VAGUE, FEW_LINES = {"found", "given", "made", "wanted", "there", "own"}, 15
MAX_FILE, MAX_FUNCTION = 500, 80
MAX_POSITIONAL, MAX_PARAMETERS = 6, 10  # keyword-only parameters count in the second only
# signatures that Megatron-core, SGLang and slime prescribe
PRESCRIBED = {
    ("rlpost.trainer.attention", "__init__"),
    ("rlpost.trainer.attention", "forward"),
    ("rlpost.extensions.slime.sample", "append_response_tokens"),
    ("rlpost.extensions.on_cpu.sglang_on_cpu.rlpost_decode_on_cpu", "forward"),
}


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


def longest(table, module):
    """The entry of the longest prefix of ``module``."""
    prefixes = [name for name in table if module == name or module.startswith(name + ".")]
    return table[max(prefixes, key=len)] if prefixes else set()


def functions(path):
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_packages_respect_the_import_tables():
    found = {module_name(path): banned for path in OURS if (banned := banned_imports(path))}
    assert not found


def banned_imports(path):
    module = module_name(path)
    tops = {name.partition(".")[0] for name in imports(path)}
    beside = longest(BESIDE, module) | {module.partition(".")[0]}
    return (tops & HEAVY - longest(MAY_IMPORT, module)) | (tops & WATCHED - beside)


def package(module):
    """The unit of the layers: a package of rlpost or bootstrap, or a top-level package."""
    parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] in ("rlpost", "bootstrap") else 1])


def arrows():
    """Package -> the packages that it imports."""
    modules, found = {module_name(path) for path in FILES}, {}
    for path in OURS:
        own = package(module_name(path))
        targets = {package(name) for name in imports(path) if name in modules}
        found[own] = found.get(own, set()) | targets - {own}
    return found


def test_no_packages_form_a_circle():
    TopologicalSorter(arrows()).prepare()  # raises CycleError, which names the circle


def test_the_root_of_rlpost_is_small():
    entries = [path for path in (ROOT / "rlpost").iterdir() if path.name != "__pycache__"]
    packages = {path.name for path in entries if any(path.glob("*.py"))}
    assert len(packages) <= 13 and len(entries) - len(packages) <= 8, sorted(entries)


def test_every_package_is_named_in_the_architecture_with_its_purpose():
    page = (ROOT / "docs/architecture.md").read_text()
    packages = {
        path.parent for path in OURS if path.parent.parent in (ROOT / "rlpost", ROOT / "bootstrap")
    }
    missing = {path.relative_to(ROOT).as_posix() for path in packages}
    assert not {name for name in missing if f"`{name}/`" not in page}


def test_common_imports_only_the_standard_library():
    leaf = [path for path in FILES if module_name(path).split(".")[0] == "common"]
    tops = {path.stem: {name.split(".")[0] for name in imports(path)} for path in leaf}
    tops["torch_store"].remove("torch")  # only processes that use torch anyway import this module
    tops["local_gpus"].remove("pynvml")  # inside a function, where it is installed
    assert set().union(*tops.values()) <= set(sys.stdlib_module_names) | {"common"}


# numpy is allowed: the columns of rlpost.types need it, and the wheel requires it
LIGHT = (
    "common",
    "slurm",
    "bootstrap",
    "rlpost/config",
    "rlpost/cli",
    "rlpost/models",
    "rlpost/images",
    "rlpost/extensions/agents/checks",
    "rlpost/extensions/agents/env_",
    "rlpost/extensions/agents/references",
    "rlpost/extensions/agents/sandbox_table",
    "rlpost/extensions/agents/sandbox/jobs",
    "rlpost/extensions/attach",
    "rlpost/extensions/doctor",
    "rlpost/extensions/completing",
    "rlpost/extensions/converting/convert",
    "rlpost/extensions/evaluating",
    "rlpost/extensions/fetching",
    "rlpost/extensions/fleet/fleet_checks",
    "rlpost/extensions/fleet/fleet_jobs",
    "rlpost/extensions/fleet/fleet_table",
    "rlpost/extensions/fleet/fleet_verb",
    "rlpost/extensions/fleet/fleet_view",
    "rlpost/extensions/fleet/job_part",
    "rlpost/extensions/judge/agreement",
    "rlpost/extensions/planning",
    "rlpost/extensions/rehearsal/command",
    "rlpost/extensions/rehearsal/nodes",
    "rlpost/extensions/slime/flags",
    "rlpost/extensions/slime/megatron_flags",
    "rlpost/extensions/slime/names",
    "rlpost/extensions/sweep",
    "rlpost/extensions/tracking",
    "rlpost/extensions/watching",
)
IMPORTS = """import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
    heavy = {heavy!r} & set(sys.modules)
    assert not heavy, (name, heavy)
"""


def test_light_packages_import_no_heavy_library():
    """Covers transitive imports: a fresh interpreter imports every module of these packages."""
    light = [path for path in FILES if path.relative_to(ROOT).as_posix().startswith(LIGHT)]
    light.remove(ROOT / "common/torch_store.py")
    code = IMPORTS.format(names=[module_name(path) for path in light], heavy=HEAVY - {"numpy"})
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_engines_start_without_the_tree_of_settings():
    """Building it takes a third of a second with pydantic. Their arguments are from the driver."""
    code = IMPORTS.format(names=["rlpost.engines.server"], heavy={"rlpost.config.tree"})
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_modules_have_a_docstring_and_a_bounded_size():
    sizes = {module_name(path): path.read_text().count("\n") for path in FILES}
    assert not {name: size for name, size in sizes.items() if size > MAX_FILE}
    silent = [module_name(path) for path in FILES if not ast.get_docstring(tree(path))]
    assert not silent, "modules without a docstring"


def test_functions_are_short_and_take_few_parameters():
    too_long, too_many = {}, {}
    for path in FILES:
        for node in functions(path):
            name = (module_name(path), node.name)
            lines = node.end_lineno - node.lineno + 1
            positional = {a.arg for a in node.args.posonlyargs + node.args.args} - {"self", "cls"}
            count = len(positional) + len(node.args.kwonlyargs)
            if "triton.jit" in map(ast.unparse, node.decorator_list):
                continue  # a kernel takes pointers and sizes, no objects
            if lines > MAX_FUNCTION:
                too_long[name] = lines
            if (
                len(positional) > MAX_POSITIONAL or count > MAX_PARAMETERS
            ) and name not in PRESCRIBED:
                too_many[name] = count
    assert not too_long
    assert not too_many


def test_public_functions_are_typed_and_documented():
    faults = {module_name(path): found for path in OURS if (found := undocumented(path))}
    assert not faults


def undocumented(path):
    body = [node for node in tree(path).body if not getattr(node, "name", "_").startswith("_")]
    missing = [
        f"{node.name}: docstring"
        for node in body
        if not ast.get_docstring(node)
        and "overload" not in map(ast.unparse, node.decorator_list)  # the implementation has it
    ]
    for node in body:
        if not isinstance(node, ast.ClassDef):
            arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            missing += [f"{node.name}: type of {a.arg}" for a in arguments if not a.annotation]
            missing += [f"{node.name}: return type"] * (node.returns is None)
    return missing


def test_scripts_of_tools_need_nothing_of_the_tests():
    users = {
        path.name
        for path in (ROOT / "tools").rglob("*.py")
        if any(name.split(".")[0] == "tests" for name in imports(path))
    }
    assert users == set(), "a program that needs the tests' parts is one of them"


def test_only_the_workers_module_and_the_ray_process_import_ray():
    users = [
        module_name(path)
        for path in FILES
        if any(name.split(".")[0] == "ray" for name in imports(path))
    ]
    assert users == ["bootstrap.agent.ray_process", "rlpost.driver.workers"]


def test_long_functions_name_their_locals_by_what_they_hold():
    """``found`` or ``made`` say what was done, which a reader of a long function looks up again."""
    vague = set()
    for path in (path for folder in NAMED for path in (ROOT / folder).rglob("*.py")):
        for node in functions(path):
            if node.end_lineno - node.lineno < FEW_LINES:
                continue
            names = {one.arg for one in ast.walk(node) if isinstance(one, ast.arg)}
            names |= {
                one.id
                for one in ast.walk(node)
                if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
            }
            vague |= {(module_name(path), node.name, name) for name in names & VAGUE}
    assert not vague
