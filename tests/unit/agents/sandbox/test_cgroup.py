"""Cgroups of sandboxes: delegation, division, and out-of-memory kills.

Control files are plain files here; tests/contract/test_sandbox_cgroup.py uses those of the kernel.
"""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from common.delegated_cgroup import LEAF, delegated_cgroup
from rlpost.extensions.agents.sandbox import cgroup
from rlpost.extensions.agents.sandbox.local import LocalSandbox
from rlpost.extensions.agents.sandbox.protocol import Ended, Limits, SandboxLost, SnapshotRefused

LIMITS = Limits(memory_mib=100, disk_mib=20, processes=30, cores=2)


def node(folder: Path, *, own: str = "/run", controllers: str = "cpu memory pids") -> Path:
    """Write the files by which a process finds its cgroup; return the folder used as /proc."""
    (folder / "proc").mkdir()
    (folder / "proc/mounts").write_text(f"tmpfs /tmp tmpfs rw\ncgroup2 {folder}/fs cgroup2 rw\n")
    (folder / "proc/cgroup").write_text(f"4:memory:/\n0::{own}\n")
    cgroup_folder = folder / f"fs{own}"
    cgroup_folder.mkdir(parents=True)
    for name in ("cgroup.procs", "cgroup.subtree_control"):
        (cgroup_folder / name).write_text("")
    (cgroup_folder / "cgroup.controllers").write_text(controllers)
    return folder / "proc"


def test_a_cgroup_that_an_unprivileged_user_may_write_is_delegated(tmp_path):
    found = delegated_cgroup(node(tmp_path), user=1000)
    assert found.folder == tmp_path / "fs/run"


def test_the_leaf_of_an_earlier_division_leads_to_the_divided_cgroup(tmp_path):
    proc = node(tmp_path)
    (proc / "cgroup").write_text(f"0::/run/{LEAF}\n")
    assert delegated_cgroup(proc, user=1000).folder == tmp_path / "fs/run"


def test_root_needs_the_mark_of_a_delegation(tmp_path, monkeypatch):
    proc = node(tmp_path)
    assert "is not delegated" in delegated_cgroup(proc, user=0).why
    monkeypatch.setattr(os, "getxattr", lambda path, name: b"1" if name == "user.delegate" else b"")
    assert delegated_cgroup(proc, user=0).folder == tmp_path / "fs/run"


def test_without_controllers_or_cgroup_v2_the_reason_is_named(tmp_path):
    hybrid = node(tmp_path, controllers="hugetlb")
    assert "no controller memory, pids" in delegated_cgroup(hybrid, user=1000).why
    (hybrid / "mounts").write_text("cgroup /sys/fs/cgroup/memory cgroup rw\n")
    assert delegated_cgroup(hybrid, user=1000).why == "no cgroup v2 is mounted"
    assert "cannot be read" in delegated_cgroup(tmp_path / "none").why


def test_a_cgroup_is_divided_after_its_processes_have_left_it(tmp_path, monkeypatch):
    """The kernel refuses controllers for the children of a cgroup that holds processes."""
    moved: list[str] = []
    procs, control = tmp_path / "cgroup.procs", tmp_path / "cgroup.subtree_control"
    procs.write_text("11\n12\n")
    control.write_text("")
    write = Path.write_text

    def kernel(path: Path, text: str) -> int:
        if path == tmp_path / LEAF / "cgroup.procs":
            moved.append(text)
            return write(procs, "\n".join({"11", "12"} - set(moved)))
        if path == control and "memory" in text:
            assert not procs.read_text(), "Device or resource busy"
        if path == control and text == "+cpu":
            raise OSError("no such controller here")
        return write(path, text)

    monkeypatch.setattr(Path, "write_text", kernel)
    cgroup.divide(tmp_path)
    assert sorted(moved) == ["11", "12"] and control.read_text() == "+memory +pids"
    moved.clear()
    write(control, "cpu memory pids")
    cgroup.divide(tmp_path)
    assert not moved, "it is divided already"


def test_limits_become_control_files_and_missing_optional_ones_are_left_out(tmp_path):
    made = cgroup.Cgroup.create(tmp_path / "one", cgroup.files_of(LIMITS))
    written = {path.name: path.read_text() for path in made.folder.iterdir()}
    own_mib = cgroup.OWN_MIB
    assert written == {"memory.max": str((120 + own_mib) << 20), "pids.max": "38"}
    assert cgroup.files_of(LIMITS)["cpu.max"] == "200000 100000"


def test_cgroups_of_ended_drivers_are_removed_and_others_kept(tmp_path):
    gone = tmp_path / f"{cgroup.PREFIX}{2**22 + 1}-0"  # above the largest pid of Linux
    alive = tmp_path / f"{cgroup.PREFIX}{os.getpid()}-0"
    for folder in (gone, alive, tmp_path / "other"):
        folder.mkdir()
    cgroup.remove_leftovers(tmp_path)
    assert not gone.exists() and alive.exists() and (tmp_path / "other").exists()


async def ended_sandbox(folder: Path, kills_before: int, kills_after: int) -> LocalSandbox:
    """Return a sandbox whose first process exits soon, with the kernel's kill counts given."""
    sandbox = LocalSandbox(LIMITS, 1)
    outer, inner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    outer.setblocking(False)
    sandbox._control, sandbox._memory_kills = outer, kills_before
    sandbox._cgroup = cgroup.Cgroup(folder)
    (folder / "memory.events").write_text(f"low 0\noom 3\noom_kill {kills_after}\n")
    asyncio.get_running_loop().call_later(0.05, inner.close)
    return sandbox


async def test_a_sandbox_killed_for_its_own_memory_is_not_lost_and_has_no_snapshot(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(cgroup, "REMOVE_S", 0.0)
    sandbox = await ended_sandbox(tmp_path, kills_before=1, kills_after=2)
    assert (await sandbox.run("eat")).ended is Ended.MEMORY
    assert (await sandbox.run("true")).exit_code == 137
    with pytest.raises(SnapshotRefused, match="used up its memory"):
        await sandbox.snapshot()  # which a verifier scores 0


async def test_a_sandbox_that_ends_without_a_memory_kill_is_lost(tmp_path, monkeypatch):
    """It is lost even if the kernel has killed one of its commands earlier."""
    monkeypatch.setattr(cgroup, "REMOVE_S", 0.0)
    sandbox = await ended_sandbox(tmp_path, kills_before=2, kills_after=2)
    with pytest.raises(SandboxLost):
        await sandbox.run("sleep 60")
    with pytest.raises(SandboxLost):
        await sandbox.run("true")
