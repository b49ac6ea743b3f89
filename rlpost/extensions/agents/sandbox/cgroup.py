"""One cgroup v2 for each sandbox, below the delegated cgroup of this process.

Input: ``common.delegated_cgroup``. Output: a ``Parent``, which makes a ``Cgroup`` for a sandbox;
None where nothing is delegated; then only the limits of ``inner.init`` apply.

The kernel allows processes only in the leaves of a divided cgroup, so ``open_parent`` moves this
process into ``rlpost-main`` beside the sandboxes (Linux, "Control Group v2", "No Internal
Process Constraint").
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common.delegated_cgroup import CONTROLLERS, LEAF, delegated_cgroup
from rlpost.extensions.agents.sandbox.protocol import MIB, Limits

PREFIX = "rlpost-sandbox-"
OWN_MIB = 64  # launcher and first process
OWN_PROCESSES = 8
CPU_PERIOD_US = 100_000
MOVES = 20  # rounds of moving processes: one may fork during a round
REMOVE_S = 2.0
POLL_S = 0.01
_numbers = itertools.count()


def files_of(limits: Limits) -> dict[str, str]:
    """Return the control files of a sandbox and their values.

    ``memory.max`` counts files as well, because they are on a tmpfs, and kernel memory of the
    sandbox (sockets, pipes, page tables), which no other limit counts.
    """
    memory = (limits.memory_mib + limits.disk_mib + OWN_MIB) * MIB
    return {
        "memory.max": str(memory),
        "memory.swap.max": "0",
        "pids.max": str(limits.processes + OWN_PROCESSES),
        "cpu.max": f"{limits.cores * CPU_PERIOD_US} {CPU_PERIOD_US}",
    }


OPTIONAL = ("memory.swap.max", "cpu.max")  # missing without swap accounting or a cpu controller


class Cgroup:
    """The cgroup of one sandbox."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def create(cls, folder: Path, files: Mapping[str, str]) -> Cgroup:
        """Make the cgroup with its limits. Raises OSError."""
        folder.mkdir()
        for name, value in files.items():
            path = folder / name
            if name not in OPTIONAL or path.exists():
                path.write_text(value)
        return cls(folder)

    def add(self, pid: int) -> None:
        """Move a process into the cgroup; its later children belong to it too. Raises OSError."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    def memory_kills(self) -> int:
        """Return how many of its processes the kernel has killed at the memory limit."""
        try:
            lines = (self.folder / "memory.events").read_text().splitlines()
        except OSError:
            return 0
        counts = dict(line.split() for line in lines)
        return int(counts.get("oom_kill", 0))

    async def remove(self) -> None:
        """Kill the remaining processes and remove the cgroup; leave it if they take too long."""
        with contextlib.suppress(OSError):
            (self.folder / "cgroup.kill").write_text("1")  # Linux 5.14
        for _ in range(round(REMOVE_S / POLL_S)):
            try:
                self.folder.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:  # its processes are still ending
                await asyncio.sleep(POLL_S)


@dataclass(frozen=True)
class Parent:
    """A divided cgroup, in which sandboxes get theirs."""

    folder: Path

    def sandbox(self, limits: Limits) -> Cgroup:
        """Make the cgroup of a sandbox. Raises OSError."""
        name = f"{PREFIX}{os.getpid()}-{next(_numbers)}"
        return Cgroup.create(self.folder / name, files_of(limits))


def open_parent() -> tuple[Parent | None, str]:
    """Divide the delegated cgroup of this process; return it, and how sandboxes are limited."""
    found = delegated_cgroup()
    if found.folder is None:
        return None, f"resource limits and measurement ({found.why})"
    try:
        divide(found.folder)
    except OSError as error:
        return None, f"resource limits and measurement (cgroup {found.folder}: {error})"
    remove_leftovers(found.folder)
    return Parent(found.folder), f"cgroup v2 {found.folder}"


def divide(folder: Path) -> None:
    """Let cgroups below ``folder`` have limits. Raises OSError."""
    control = folder / "cgroup.subtree_control"
    wanted = [name for name in CONTROLLERS if name not in control.read_text().split()]
    if wanted:
        _move_processes(folder)
        control.write_text(" ".join(f"+{name}" for name in wanted))
    with contextlib.suppress(OSError):
        control.write_text("+cpu")


def _move_processes(folder: Path) -> None:
    leaf = folder / LEAF
    leaf.mkdir(exist_ok=True)
    for _ in range(MOVES):
        pids = (folder / "cgroup.procs").read_text().split()
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                (leaf / "cgroup.procs").write_text(pid)


def remove_leftovers(folder: Path) -> None:
    """Remove empty cgroups of sandboxes whose driver or server is gone."""
    for path in folder.glob(f"{PREFIX}*"):
        pid = path.name.removeprefix(PREFIX).partition("-")[0]
        if not Path(f"/proc/{pid}").exists():
            with contextlib.suppress(OSError):
                path.rmdir()
