"""The lab is a cluster of nodes with separate networks, and leaves nothing behind."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import slurm_roots
from tests.cluster.lab import ROOT, Lab, LabError
from tests.cluster.lab_config import LabOptions
from tests.cluster.lab_host import NETNS_ETC, NETNS_RUN, build_network, why_no_cached_folder


def test_nodes_reach_each_other_on_eth0_only(lab: Lab) -> None:
    """The decoys have addresses but are not connected."""
    listen = (
        "import socket; s = socket.create_server(('', 7000)); print('ready', flush=True); "
        "c = s.accept()[0]; print(c.getpeername()[0])"
    )
    connect = "import socket, sys; socket.create_connection((sys.argv[1], 7000), timeout=1)"
    with lab.popen("n02", ["python3", "-c", listen], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and server.stdout.readline() == "ready\n"
        for decoy in ("192.168.100.12", "172.17.0.1"):
            assert lab.run("n01", ["python3", "-c", connect, decoy], check=False).returncode != 0
        lab.run("n01", ["python3", "-c", connect, "n02"])
        assert server.stdout.readline().strip() == lab.ip("n01")


def test_every_node_sees_the_shared_folder_and_the_project(lab: Lab) -> None:
    (lab.shared / "canary").write_text("seen")
    command = ["sh", "-c", f"cat canary && test -e {shlex.quote(__file__)}"]
    assert lab.run("ctl", ["srun", "-N4", *command]).stdout == "seen" * 4


def test_a_node_is_powered_off_and_on_again(lab: Lab) -> None:
    """Power off kills every process of the node; after power on the node runs jobs."""
    lab.wait_idle(["n04"])
    sleeper = lab.popen("n04", ["sleep", "300"])
    lab.kill_node("n04")
    assert sleeper.wait(timeout=20) != 0
    with pytest.raises(LabError, match="n04"):
        lab.run("n04", ["true"])
    lab.start_node("n04")
    lab.wait_idle(["n04"])
    assert lab.run("ctl", ["srun", "-w", "n04", "hostname"]).stdout == "n04\n"


def test_a_lab_leaves_nothing_behind(slurm_available: None) -> None:
    """No process, namespace, mount or file; a second lab runs beside the first."""
    name = f"second{os.getpid()}"
    second = Lab(1, name=name)
    with second:
        with pytest.raises(LabError, match="up already"):
            Lab(1, name=name).up()
        pids = [int(path.read_text().split()[0]) for path in (second.base / "pids").iterdir()]
        assert len(pids) == 3
        assert second.run("ctl", ["srun", "hostname"]).stdout == "n01\n"
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert not [
        *NETNS_RUN.glob(f"rlab-{name}-*"),
        *NETNS_ETC.glob(f"rlab-{name}-*"),
        *ROOT.glob(name),
    ]
    assert f"rlab-{name}-" not in Path("/proc/self/mountinfo").read_text()


def test_a_cached_shared_folder_hides_new_files_as_nfs_does(slurm_available: None) -> None:
    """A file that a node has looked up in vain stays missing for it; another node, and other new
    files, are not affected.
    """
    if (reason := why_no_cached_folder()) is not None:
        pytest.skip(reason)
    with Lab(2, name=f"cached{os.getpid()}", options=LabOptions(shared_cache_s=60)) as cached:

        def sees(node: str, name: str) -> bool:
            return cached.run(node, ["test", "-e", name], check=False).returncode == 0

        assert not sees("n01", "stop")
        cached.run("n02", ["touch", "stop", "other"])
        assert (sees("n01", "stop"), sees("n02", "stop"), sees("n01", "other")) == (
            False,
            True,
            True,
        )
        assert (cached.shared / "stop").exists()


def test_a_lab_whose_owner_was_killed_is_removed_by_the_next(slurm_available: None) -> None:
    """No trace of it is left when another lab is up."""
    name = f"crashed{os.getpid()}"
    crash = f"import os; from tests.cluster.lab import Lab; Lab(1, name={name!r}).up(); os.kill(os.getpid(), 9)"
    with Lab(1, name=f"before{os.getpid()}") as before:
        dead = subprocess.run([sys.executable, "-c", crash], cwd=Path(__file__).parents[2])
        assert dead.returncode == -9
        assert (ROOT / name).exists()
        with Lab(1, name=f"next{os.getpid()}"):
            assert not (ROOT / name).exists()
            assert not list(NETNS_RUN.glob(f"rlab-{name}-*"))
        assert before.run("ctl", ["srun", "hostname"]).stdout == "n01\n"


def test_a_lab_comes_up_although_the_network_of_a_dead_one_is_left(slurm_available: None) -> None:
    """The folder of the dead lab was removed, its namespaces and their files in /etc were not."""
    name = f"half{os.getpid()}"
    build_network(f"rlab-{name}-", 1)
    with Lab(1, name=name) as lab:
        assert lab.run("ctl", ["srun", "hostname"]).stdout == "n01\n"
    assert not list(NETNS_ETC.glob(f"rlab-{name}-*"))


def test_a_slurm_that_cannot_be_made_is_an_error_with_its_reason_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its fixture skips with this text. The mirror is a port on which nothing listens."""
    if missing := [name for name in slurm_roots.PROGRAMS if shutil.which(name) is None]:
        pytest.skip(f"needs {missing}")
    monkeypatch.setenv("RLPOST_LAB_CACHE", str(tmp_path))
    monkeypatch.setattr(slurm_roots, "_mirror", lambda: "http://127.0.0.1:9/debian")
    slurm_roots._root_or_reason.cache_clear()
    try:
        with pytest.raises(LabError, match=r"(?s)^no Slurm of Debian trixie: .*127\.0\.0\.1"):
            slurm_roots.find_or_make("trixie")
    finally:
        slurm_roots._root_or_reason.cache_clear()
    assert not list(tmp_path.iterdir())


@pytest.mark.every_slurm
def test_every_node_is_a_separate_machine(lab: Lab) -> None:
    """A task on each node sees another host name, address, decoys, /tmp, processes and GPUs."""
    script = (
        'touch /tmp/$(hostname); echo $(hostname) $(ip -4 -o addr show dev eth0 | grep -o "10.77.0.[0-9]*/") '
        "$(ls /sys/class/net | tr '\\n' ,) $(cd /tmp && ls -d n0* | tr '\\n' ,) $CUDA_VISIBLE_DEVICES"
    )
    answer = lab.run(
        "ctl", ["srun", "-N2", "--ntasks-per-node=1", "--gres=gpu:4", "-l", "sh", "-c", script]
    )
    lines = {tuple(line.partition(": ")[2].split()) for line in answer.stdout.splitlines()}
    assert lines == {
        (name, f"{lab.ip(name)}/", "docker0,eth0,ib0,ib0p,lo,", f"{name},", "0,1,2,3")
        for name in ("n01", "n02")
    }
