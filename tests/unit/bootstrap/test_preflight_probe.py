"""Invariant: the probe never raises, writes only a canary, and agrees with the kernel."""

import json
import shutil
import stat
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from bootstrap.doctor.node import main
from bootstrap.preflight.checks import check_host
from bootstrap.preflight.probe import (
    CANARY_DIR,
    read_gpu_direct,
    read_host,
    read_limited_ports,
    read_nvcc,
    read_sandboxes,
    read_torch_cuda,
)
from bootstrap.preflight.table import Hca, HostFacts, Requirements


def test_what_is_read_is_what_the_kernel_says(tmp_path: Path) -> None:
    facts = read_host(tmp_path, Path("/tmp"), "localhost", {"SLURM_GPUS_ON_NODE": "8"})
    (canary,) = (tmp_path / CANARY_DIR).iterdir()
    assert facts.canary == canary.name and stat.S_IMODE(canary.stat().st_mode) == 0o600
    assert facts.folder_error is None and facts.rename_ms is not None and facts.rename_ms > 0
    assert facts.num_gpus_by_slurm == 8
    assert facts.torch_cuda == (torch.version.cuda or "")
    assert facts.head_ips and set(facts.head_ips) <= {"127.0.0.1", "::1"}
    said = subprocess.run(
        ["df", "--output=fstype", "/tmp"], capture_output=True, text=True, check=True
    ).stdout
    assert facts.temp_fs == said.split()[-1]
    assert abs((facts.temp_free or 0) - shutil.disk_usage("/tmp").free) < 1 << 30


def test_the_cuda_of_torch_is_read_from_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise ImportError")
    version = tmp_path / "torch/version.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    for text, expected in (
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "13.0"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4'\n", ""),
        ("git_version = 'a'\n", None),
    ):
        version.write_text(text)
        assert read_torch_cuda() == expected


LIMITS = """\
import json, resource
from pathlib import Path
from bootstrap.preflight.probe import raise_limits, read_host
for kind, hard in ((resource.RLIMIT_CPU, 7200), (resource.RLIMIT_FSIZE, 1 << 40)):
    resource.setrlimit(kind, (600, hard))
core, stack = (resource.getrlimit(kind) for kind in (resource.RLIMIT_CORE, resource.RLIMIT_STACK))
raise_limits()
assert core == resource.getrlimit(resource.RLIMIT_CORE)
assert stack == resource.getrlimit(resource.RLIMIT_STACK)
print(json.dumps(dict(read_host(Path("none"), Path("/tmp"), "localhost", {}).limits)))
"""


def test_soft_limits_of_the_login_shell_are_raised_and_hard_ones_are_facts() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITS], capture_output=True, text=True)
    limits = json.loads(done.stdout or done.stderr)
    assert (limits["CPU"], limits["FSIZE"]) == (7200, 1 << 40)


@pytest.mark.parametrize(
    ("environ", "count"),
    [({}, None), ({"SLURM_GPUS_ON_NODE": "0"}, None), ({"SLURM_GPUS_PER_NODE": "h100:8"}, 8)],
)
def test_what_slurm_says_of_gpus(
    tmp_path: Path, environ: dict[str, str], count: int | None
) -> None:
    assert read_host(tmp_path, tmp_path, "localhost", environ).num_gpus_by_slurm == count


def test_a_folder_that_is_not_there_and_a_name_that_does_not_resolve_are_facts(
    tmp_path: Path,
) -> None:
    facts = read_host(tmp_path / "none", tmp_path / "none", "no.such.host.invalid", {})
    assert facts.canary is None and "No such file" in str(facts.folder_error)
    assert facts.temp_free is None
    assert facts.head_ips in ((), None)  # None where the resolver takes its time to say so


def test_a_path_that_the_run_needs_and_is_not_there_is_named(tmp_path: Path) -> None:
    # stands for a mount that is broken: it cannot even be asked for
    refused = tmp_path / ("x" * 300)
    needed = [tmp_path, tmp_path / "model", refused]
    missing = read_host(tmp_path, tmp_path, "localhost", {}, needed).missing_paths
    assert missing == (str(tmp_path / "model"), str(refused))


def test_the_doctor_says_so_with_its_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--folder", str(tmp_path)]) == 0
    assert "host" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert main(["--folder", str(tmp_path / "none")]) == 1
    assert "the run folder cannot be written" in capsys.readouterr().out


def test_the_doctor_removes_its_canary_and_no_run_of_that_name(tmp_path: Path) -> None:
    main(["--folder", str(tmp_path)])
    assert not (tmp_path / CANARY_DIR).exists()
    (tmp_path / CANARY_DIR / "checkpoints").mkdir(parents=True)
    main(["--folder", str(tmp_path)])
    assert [path.name for path in (tmp_path / CANARY_DIR).iterdir()] == ["checkpoints"]


def test_what_a_sandbox_needs_is_tried_in_another_process(tmp_path: Path) -> None:
    """Its result agrees with the first sandbox of a run."""
    from tests.contract.test_sandbox import WHY_NOT

    offer = read_sandboxes({"PATH": str(tmp_path)})
    assert bool(offer.namespaces) == bool(WHY_NOT), (offer, WHY_NOT)
    assert not offer.has_enroot and bool(offer.cgroup) != bool(offer.no_cgroup)
    (tmp_path / "enroot").touch(mode=0o700)
    assert read_sandboxes({"PATH": str(tmp_path)}).has_enroot


def test_a_host_without_namespaces_is_unfit_for_sandboxes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub = tmp_path / "python"
    stub.write_text("#!/bin/sh\necho 'user namespaces: Operation not permitted'; exit 1\n")
    stub.chmod(0o700)
    monkeypatch.setattr("bootstrap.preflight.probe.sys.executable", str(stub))
    assert main(["--folder", str(tmp_path), "--sandboxes"]) == 1
    assert "Operation not permitted" in capsys.readouterr().out
    assert main(["--folder", str(tmp_path)]) == 0, "only a run with sandboxes needs them"


OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build\n"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Sat Feb 17\n"


@pytest.mark.parametrize(
    ("driver", "modules", "release", "wanted"),
    [
        (None, ["nvidia_peermem"], "6.8.0-40-generic", None),
        (CLOSED, [], "6.8.0-40-generic", ()),
        (CLOSED, ["nvidia_peermem"], "5.4.0", ("nvidia_peermem",)),
        (OPEN, [], "5.4.0-150-generic", ()),
        (OPEN, [], "5.15.0-1071-nvidia", ("DMA-BUF",)),
        (OPEN, ["nv_peer_mem"], "6.8.0", ("nv_peer_mem", "DMA-BUF")),
    ],
)
def test_ways_of_rdma_to_gpu_memory(tmp_path, driver, modules, release, wanted):
    files = {"proc/sys/kernel/osrelease": release}
    files |= {} if driver is None else {"proc/driver/nvidia/version": driver}
    files |= {f"sys/module/{name}/version": "1" for name in modules}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert read_gpu_direct(tmp_path) == wanted


@pytest.mark.parametrize(
    ("keys", "limited"),
    [
        (["0xffff"], ()),
        (["0x7fff"], ()),
        (["0x7fff", "0x0000", "0x8abc"], ("mlx5_0:1 has a full one at index 2",)),
        (["0x8abc", "0x7fff"], ()),
    ],
)
def test_a_port_whose_first_partition_is_limited_is_named(tmp_path: Path, keys, limited) -> None:
    folder = tmp_path / "sys/class/infiniband/mlx5_0/ports/1/pkeys"
    folder.mkdir(parents=True)
    for index, key in enumerate(keys):
        (folder / str(index)).write_text(f"{key}\n")
    assert read_limited_ports(tmp_path) == limited
    facts = HostFacts(hcas=(Hca("mlx5_0", True),), limited_ports=limited)
    assert HostFacts.from_json(json.loads(json.dumps(asdict(facts)))).limited_ports == limited
    (check,) = [one for one in check_host(facts, Requirements(num_gpus=0)) if one.name == "hcas"]
    assert check.level == ("WARN" if limited else "OK")
    assert not limited or "index 2; set NCCL_IB_PKEY" in check.found


def test_the_compiler_is_that_of_cuda_home_then_of_the_path(tmp_path: Path) -> None:
    def make(folder: str, text: str) -> str:
        nvcc = tmp_path / folder / "bin/nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text(f"#!/bin/sh\necho '{text}'\n")
        nvcc.chmod(0o755)
        return str(tmp_path / folder)

    home = make("home", "Cuda compilation tools, release 13.0, V13.0.88")
    other = make("other", "Cuda compilation tools, release 12.4, V12.4.131")
    strange = make("strange", "no release")
    assert read_nvcc({"CUDA_HOME": home, "PATH": f"{other}/bin"}) == "13.0"
    assert read_nvcc({"CUDA_HOME": str(tmp_path), "PATH": f"{other}/bin"}) == "12.4"
    assert read_nvcc({"CUDA_PATH": strange}) is None
