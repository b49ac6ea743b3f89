"""What an image lacks, by facts as they were read in images of different kinds."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement as Packaging

from bootstrap.check_result import GIB, UNLIMITED
from bootstrap.image.checks import ImageFacts, check_image
from bootstrap.image.doctor import CODE, compiled_packages, main, wanted_packages
from bootstrap.image.image_facts import nccl_version, read_image
from bootstrap.image.pins import canonical, parse, python_required, read_pins, requirements

PINS = read_pins(CODE)
PYTHON = python_required(PINS)
WANTED = wanted_packages(CODE)
COMPILED = compiled_packages(CODE)


def exact(one: Any) -> str:
    """A version that a requirement allows."""
    return one.bounds[0][1] if one.bounds else "1.0"


GOOD = ImageFacts(
    python="3.12.3",
    executable="/usr/bin/python3",
    packages={one.name: exact(one) for one in [*WANTED, *COMPILED]}
    | {"sglang-kernel": "0.4.7", "transformer-engine-torch": exact(COMPILED[0])},
    te_range="transformer-engine[core_cu13,pytorch]<2.12.0,>=2.9.0a0",
    needs={"sglang": ("sglang-kernel==0.4.7", "torch==2.13.0")},
    commands={"bash": "/bin/bash", "gcc": "/usr/bin/gcc", "ninja": "/usr/bin/ninja"},
    libraries={"libibverbs.so.1": True, "librdmacm.so.1": True, "libcuda.so.1": True},
    providers=("mlx5",),
    rdma_drivers=("mlx5_core",),
    has_gpu_devices=True,
    nccl={"/site/nvidia/nccl/lib/libnccl.so.2": "2.28.3"},
    memlock=UNLIMITED,
    nofile=1_048_576,
    shm_bytes=500 * GIB,
    home="/root",
    environment={"NVIDIA_VISIBLE_DEVICES": "all"},
)


def without(name: str) -> dict[str, str]:
    return {key: value for key, value in GOOD.packages.items() if key != name}


def test_an_image_with_everything_lacks_nothing():
    findings = check_image(GOOD, PYTHON, WANTED, compiled=COMPILED)
    assert {finding.level for finding in findings} == {"OK"} and len(findings) == 13


CASES = [
    ({"python": "3.10.12"}, "python", "FATAL_CONFIG", "3.10.12 .*Python >=3.11 needed"),
    (
        {"packages": without("ray")},
        "packages",
        "FATAL_CONFIG",
        r"without ray\[default\]==2.60.0: build jobs/container",
    ),
    (
        {"packages": GOOD.packages | {"torch": "2.9.1+cu129"}},
        "packages",
        "FATAL_CONFIG",
        r"torch 2.9.1\+cu129 \(torch==2.13.0",
    ),
    (
        {"packages": without("sglang-kernel")},
        "their needs",
        "FATAL_CONFIG",
        "sglang wants sglang-kernel==0.4.7$",
    ),
    ({"commands": {"bash": None}}, "commands", "FATAL_CONFIG", "no bash"),
    ({"commands": GOOD.commands | {"gcc": None}}, "commands", "WARN", "without gcc: .*Triton"),
    (
        {"libraries": GOOD.libraries | {"libcuda.so.1": False}, "environment": {}},
        "GPU driver",
        "FATAL_CONFIG",
        "NVIDIA_VISIBLE_DEVICES=unset.*98-nvidia",
    ),
    ({"providers": ()}, "RDMA", "FATAL_CONFIG", "no provider for mlx5"),
    ({"rdma_drivers": ("bnxt_en",)}, "RDMA", "FATAL_CONFIG", "no provider for bnxt_re"),
    ({"providers": (), "rdma_drivers": ()}, "RDMA", "WARN", "no provider for mlx5"),
    (
        {"nccl": {"/a": "2.28.3", "/b": "2.21.5"}},
        "NCCL",
        "WARN",
        "which one is loaded depends on LD_LIBRARY_PATH",
    ),
    ({"nccl": {"/a": "2.20.5"}}, "NCCL", "WARN", "NCCL_IB_GID_INDEX"),
    ({"nccl": {}}, "NCCL", "FATAL_CONFIG", "no libnccl"),
    ({"memlock": 65536}, "limits", "FATAL_CONFIG", "memlock 65536"),
    ({"nofile": 1024}, "limits", "WARN", "1024 open files"),
    ({"shm_bytes": 64 << 20}, "/dev/shm", "FATAL_CONFIG", "0.06 GiB: docker run --shm-size"),
    ({"shm_bytes": None}, "/dev/shm", "FATAL_CONFIG", "missing"),
    ({"unwritable": ("/root",)}, "folders", "FATAL_CONFIG", "/root.*HOME in"),
    (
        {"environment": GOOD.environment | {"PIP_CONSTRAINT": "/etc/pip"}},
        "variables",
        "WARN",
        "PIP_CONSTRAINT=/etc/pip",
    ),
    (
        {
            "environment": GOOD.environment
            | {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_ON_NODE": "8"}
        },
        "variables",
        "WARN",
        "CUDA_VISIBLE_DEVICES=0,1: hides GPUs",
    ),
    (
        {"environment": GOOD.environment | {"CUDA_VISIBLE_DEVICES": "0"}},
        "variables",
        "WARN",
        "hides GPUs",
    ),
    ({"entrypoints": ("/opt/nvidia/nvidia_entrypoint.sh",)}, "entrypoint", "OK", "not run"),
]


@pytest.mark.parametrize(
    "given", [{"SLURM_GPUS_ON_NODE": "2"}, {"SLURM_STEP_GPUS": "4,5"}, {"SLURM_JOB_GPUS": "4,5"}]
)
def test_the_gpus_that_slurm_shows_are_not_called_hidden(given):
    """Slurm sets CUDA_VISIBLE_DEVICES for every job that requests GPUs."""
    environment = {**GOOD.environment, "CUDA_VISIBLE_DEVICES": "0,1", **given}
    findings = check_image(replace(GOOD, environment=environment), PYTHON, WANTED)
    assert [finding.level for finding in findings if finding.name == "variables"] == ["OK"]


def test_findings_go_into_a_file_of_their_own_when_asked(tmp_path, capsys):
    """Setup commands and enroot also write to the job's standard output."""
    main(["--cpu", "--json", "--output", str(tmp_path / "findings")])
    assert capsys.readouterr().out == ""
    assert {row["name"] for row in json.loads((tmp_path / "findings").read_text())} >= {
        "python",
        "packages",
    }


@pytest.mark.parametrize(("changed", "what", "level", "said"), CASES)
def test_what_is_wrong_is_named_with_its_remedy_and_nothing_else_is(changed, what, level, said):
    findings = check_image(replace(GOOD, **changed), PYTHON, WANTED)
    (found,) = [finding for finding in findings if finding.name == what]
    assert found.level == level
    assert re.search(said, found.found), found.found
    assert {finding.name for finding in findings if finding.level != "OK"} <= {what, "their needs"}


TE = {"transformer-engine", "transformer-engine-torch"}
BARE = {name: number for name, number in GOOD.packages.items() if name not in TE}


@pytest.mark.parametrize("reasons", [(), ("--optimizer-cpu-offload", "--moe-grouped-gemm")])
@pytest.mark.parametrize(
    ("packages", "said"),
    [
        (BARE, r"not installed; .*which compiles transformer-engine\[pytorch\]==2.11.0"),
        (BARE | dict.fromkeys(TE, "2.12.0"), r"2.12.0, Megatron-core accepts <2.12.0,>=2.9.0a0"),
        (BARE | dict.fromkeys(TE, "2.8.0"), r"2.8.0, Megatron-core accepts"),
        (BARE | {"transformer-engine": "2.11.0"}, "2.11.0 with transformer-engine-torch missing"),
        (
            BARE | dict.fromkeys(TE, "2.11.0") | {"transformer-engine-torch": "2.10.0"},
            "transformer-engine-torch 2.10.0",
        ),
    ],
)
def test_transformer_engine_is_lacking_for_settings_that_need_it_and_else_a_warning(
    packages, said, reasons
):
    findings = check_image(
        replace(GOOD, packages=packages), PYTHON, WANTED, compiled=COMPILED, te_reasons=reasons
    )
    (found,) = [finding for finding in findings if finding.name == "TransformerEngine"]
    assert found.level == ("FATAL_CONFIG" if reasons else "WARN")
    assert re.search(said, found.found), found.found
    assert all(reason in found.found for reason in reasons)
    assert {finding.level for finding in findings if finding is not found} == {"OK"}


@pytest.mark.parametrize("number", ["2.9.0", "2.10.0", "2.11.0+cu13"])
def test_any_transformer_engine_that_megatron_accepts_will_do(number):
    """slime's image may have another version than setup.cfg pins."""
    facts = replace(GOOD, packages=BARE | dict.fromkeys(TE, number))
    findings = check_image(facts, PYTHON, WANTED, compiled=COMPILED, te_reasons=("x",))
    assert {finding.level for finding in findings} == {"OK"}


def test_the_pinned_transformer_engine_is_one_that_the_installed_megatron_accepts():
    """An upgrade of only one of them fails here; the range comes from megatron-core's metadata."""
    theirs = Packaging(read_image({}).te_range)
    (pin,) = COMPILED
    assert theirs.name == pin.name == "transformer-engine"
    assert [sign for sign, _ in pin.bounds] == ["=="] and theirs.specifier.contains(
        pin.bounds[0][1]
    )


def test_settings_that_need_it_are_given_to_the_doctor_in_the_image(capsys):
    code = main(["--te-for=--optimizer-cpu-offload,--moe-grouped-gemm"])
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "TransformerEngine" in line]
    assert (
        code == 1
        and row.startswith("FATAL_CONFIG")
        and "needed for --optimizer-cpu-offload, --moe-grouped-gemm" in row
    )
    assert main(["--compiled"]) == 0
    assert capsys.readouterr().out == f"{COMPILED[0].text}\n"


def test_on_a_node_without_gpus_nothing_of_gpus_is_wanted():
    bare = replace(
        GOOD,
        has_gpu_devices=False,
        libraries={},
        providers=(),
        rdma_drivers=(),
        nccl={},
        needs={"sglang": ("x",)},
    )
    assert {finding.level for finding in check_image(bare, PYTHON, WANTED, cpu=True)} == {"OK"}


@pytest.mark.parametrize("extra", ["gpu", "cpu", "wandb", "dev"])
def test_requirements_are_read_as_pip_reads_them(extra):
    """Names and allowed versions are compared with the library that pip uses."""
    for one in requirements(PINS, [extra]):
        theirs = Packaging(one.text)
        assert canonical(theirs.name) == one.name
        for candidate in (
            "0.1",
            "2.13.0",
            "2.13.0+cu130",
            "2.60.0",
            "7",
            "15",
            "100.1.2",
            *[exact(one)],
        ):
            assert one.allows(candidate) == theirs.specifier.contains(candidate), (one, candidate)


@pytest.mark.parametrize(
    "line", ["a>=1.2,<2", "a~=1.4.2", "a!=3", "a==2.*", "a>1,<=2.0", "a<0.15,>=0.14.1"]
)
@pytest.mark.parametrize(
    "candidate", ["0.14.2", "1.2", "1.4.2", "1.4.9", "1.5", "2.0", "2", "2.3", "3", "3.0.0"]
)
def test_bounds_hold_as_for_pip(line, candidate):
    found = parse(line)
    assert found is not None and found.allows(candidate) == Packaging(line).specifier.contains(
        candidate
    )


def test_this_environment_is_read_as_it_is():
    """The environment of the tests meets the pins of the CPU stack, from which `make install`
    creates it.
    """
    facts = read_image(os.environ)
    assert facts.packages["torch"] == version("torch") and "torch==2.13.0" in facts.needs["sglang"]
    rows = {
        finding.name: finding
        for finding in check_image(facts, PYTHON, wanted_packages(CODE, cpu=True), cpu=True)
    }
    assert rows["packages"].level == rows["python"].level == "OK", rows


def test_of_two_installations_the_one_that_is_imported_counts(tmp_path, monkeypatch):
    for place, number, needs in (("site", "2.0", "old"), ("user", "3.0", "new")):
        folder = tmp_path / place / f"ray-{number}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: ray\nVersion: {number}\nRequires-Dist: {needs}\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path / place))
    facts = read_image({})
    assert facts.packages["ray"] == "3.0" and list(facts.needs["ray"]) == ["new"]


def test_devices_and_providers_are_read_from_the_system_s_files(tmp_path):
    for path in ("etc/libibverbs.d/mlx5.driver", "dev/nvidiactl", "etc/rc", "drivers/mlx5_core/x"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    device = tmp_path / "sys/class/infiniband/mlx5_0/device"
    device.mkdir(parents=True)
    (device / "driver").symlink_to(tmp_path / "drivers/mlx5_core")
    facts = read_image({"HOME": "/nonexistent"}, tmp_path)
    assert (
        facts.providers == ("mlx5",)
        and facts.rdma_drivers == ("mlx5_core",)
        and facts.has_gpu_devices
    )
    assert facts.entrypoints == ("/etc/rc",) and facts.shm_bytes is None
    assert facts.unwritable == ("/nonexistent",)


def test_ncclgetversion_s_numbers_are_those_of_nccl_h():
    assert [nccl_version(number) for number in (2804, 21005, 22304, 22803)] == [
        "2.8.4",
        "2.10.5",
        "2.23.4",
        "2.28.3",
    ]


def test_a_python_without_any_package_can_tell_what_it_lacks(tmp_path):
    """Without any package on the path only the standard library is imported, and each pin is
    reported.
    """
    base = (
        Path(sysconfig.get_config_var("prefix"))
        / "bin"
        / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    )
    for folder in ("bootstrap", "tools"):
        shutil.copytree(
            CODE / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "bench")
        )
    shutil.copy(CODE / "setup.cfg", tmp_path)
    code = f"import sys; sys.path = [{str(tmp_path)!r}, *[p for p in sys.path if 'site-packages' not in p]];"
    code += "import bootstrap.image.doctor as d; sys.exit(d.main(['--json']))"
    done = subprocess.run([base, "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert rows["packages"]["level"] == "FATAL_CONFIG"
    assert all(one.text in rows["packages"]["found"] for one in WANTED)
