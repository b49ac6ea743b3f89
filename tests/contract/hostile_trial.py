"""A trial of hostile commands, which must leave the host as it was.

Runs seeded commands of an attacking agent, each in a fresh sandbox followed by a snapshot, and
compares the host before and after: processes of sandbox users, mounts, shared folders, kernel
settings, keys, shared memory, listening sockets, and canaries: a process, a folder, a service on
loopback and an abstract socket, which the commands attack.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from rlpost.extensions.agents.sandbox.local import host_user
from rlpost.extensions.agents.sandbox.pool import LocalPool
from rlpost.extensions.agents.sandbox.protocol import Limits, SandboxLost, SnapshotRefused, fresh
from tests.contract.hostile_commands import Targets, generate
from tests.processes import living

LIMITS = Limits(
    wall_seconds=1.5,
    cpu_seconds=1.0,
    memory_mib=96,
    processes=24,
    open_files=128,
    file_mib=16,
    disk_mib=24,
    files=400,
    output_kib=16,
    snapshot_mib=2,
    snapshot_files=200,
)
SETTINGS = ("core_pattern", "hostname", "panic", "shmmax", "perf_event_paranoid", "pid_max")


@dataclass
class Canaries:
    """What the commands attack, and what happened to it."""

    folder: Path
    process: subprocess.Popen[bytes]
    service: socket.socket
    abstract: socket.socket
    name: str

    def targets(self) -> Targets:
        """Return what the generator aims at."""
        pids = (self.process.pid, os.getpid(), os.getppid())
        return Targets(pids, self.service.getsockname()[1], self.name, str(self.folder))

    def state(self) -> dict[str, object]:
        """Return the facts that must not change."""
        return {
            "canary process": self.process.poll(),
            "canary folder": sorted((p.name, p.read_text()) for p in self.folder.iterdir()),
            "connections to the service": accepted(self.service),
            "connections to the abstract socket": accepted(self.abstract),
        }


def accepted(listener: socket.socket) -> int:
    """Return the number of waiting connections."""
    count = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            listener.accept()[0].close()
            count += 1
    return count


@contextlib.contextmanager
def canaries() -> Iterator[Canaries]:
    """Start the canaries; as root the process belongs to a user that sandboxes may have."""
    name = f"rlpost-canary-{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="rlpost-canary-") as text:
        folder = Path(text)
        folder.chmod(0o777)
        (folder / "file").write_text("unchanged")
        (folder / "file").chmod(0o666)
        user = {"user": host_user(7)} if os.geteuid() == 0 else {}
        with (
            subprocess.Popen(["sleep", "3600"], **user) as process,
            socket.create_server(("127.0.0.1", 0)) as service,
            socket.socket(socket.AF_UNIX) as abstract,
        ):
            abstract.bind(f"\0{name}")
            abstract.listen()
            for listener in (service, abstract):
                listener.setblocking(False)
            yield Canaries(folder, process, service, abstract, name)
            process.kill()


def host_state(ours: Canaries) -> dict[str, object]:
    """Return what may not differ before and after."""
    # of this process alone: other programs may run sandboxes too
    sandbox_users = {host_user(number) for number in range(10_000)}
    kernel = Path("/proc/sys/kernel")
    folders = [Path(name) for name in ("/tmp", "/var/tmp", "/dev/shm", "/run", "/etc", "/usr/bin")]
    return {
        **ours.state(),
        "children": sorted(
            (child.pid, child.name()) for child in psutil.Process().children(recursive=True)
        ),
        "processes of sandbox users": sorted(_processes(sandbox_users)),
        "mounts of sandboxes": [
            line
            for line in Path("/proc/self/mounts").read_text().splitlines()
            if sandbox_users & set(map(int, re.findall(r"\b[ug]id=(\d+)", line)))
        ],
        "files of sandbox users": sorted(
            str(path)
            for folder in folders
            for path in folder.iterdir()
            if _owner(path) in sandbox_users
        ),
        "programs": _status(Path("/usr/bin")),
        "settings": _status(Path("/etc")),
        "kernel": [(kernel / name).read_text() for name in SETTINGS if (kernel / name).exists()],
        "clock": round(time.time() - time.monotonic(), -1),
        "shared memory": Path("/proc/sysvipc/shm").read_text().count("\n"),
        "keys": [
            line
            for line in Path("/proc/key-users").read_text().splitlines()
            if int(line.split(":")[0]) in sandbox_users
        ],
        "listening": sorted(_listening(sandbox_users)),
    }


def _processes(users: set[int]) -> Iterator[tuple[int, str]]:
    for process in living():
        with contextlib.suppress(psutil.Error):  # it ended after it was listed
            if process.uids().real in users:
                yield process.pid, process.name()


def _owner(path: Path) -> int:
    try:
        return path.lstat().st_uid
    except OSError:
        return -1


def _status(folder: Path) -> list[tuple[str, int, int]]:
    # other programs of this machine make network namespaces
    paths = (path for path in folder.iterdir() if path.name != "netns")
    found = ((path.name, path.lstat()) for path in paths)
    return sorted((name, status.st_mtime_ns, status.st_size) for name, status in found)


def _listening(users: set[int]) -> Iterator[str]:
    for name in ("tcp", "tcp6", "udp"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            if int(line.split()[7]) in users:
                yield line.split()[1]


@dataclass
class Outcome:
    """What the commands did, and what changed on the host."""

    ended: collections.Counter[str] = field(default_factory=collections.Counter)
    lost: list[str] = field(default_factory=list)
    changed: dict[str, tuple[object, object]] = field(default_factory=dict)


async def attack(count: int, seed: int, places: int, ours: Canaries, outcome: Outcome) -> None:
    """Run all commands, each in a fresh sandbox."""
    commands = generate(count, seed, ours.targets())

    async def one(pool: LocalPool, family: str, text: str) -> None:
        try:
            async with fresh(pool) as sandbox:
                result = await sandbox.run(text)
                outcome.ended[result.ended.value] += 1
                with contextlib.suppress(SnapshotRefused):
                    await sandbox.snapshot()
        except SandboxLost as lost:
            outcome.lost.append(f"{family}: {text}: {lost}")

    async with LocalPool(LIMITS, size=places, warm=1) as pool:
        await asyncio.gather(*(one(pool, *command) for command in commands))


def trial(count: int, seed: int, places: int = 4) -> Outcome:
    """Attack and compare."""
    outcome = Outcome()
    with canaries() as ours:
        before = host_state(ours)
        asyncio.run(attack(count, seed, places, ours, outcome))
        after = host_state(ours)
    outcome.changed = {
        name: (before[name], after[name]) for name in before if before[name] != after[name]
    }
    return outcome


def difference(before: object, after: object) -> list[str]:
    """Return what is in one of two facts alone."""
    if not (isinstance(before, list) and isinstance(after, list)):
        return [f"- {before}", f"+ {after}"]
    return [f"- {item}" for item in before if item not in after] + [
        f"+ {item}" for item in after if item not in before
    ]
