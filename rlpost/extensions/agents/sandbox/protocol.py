"""The interface of sandboxes: limits, results, snapshots, errors and the two protocols.

A sandbox has its own file system, process table and network. All commands of one sandbox share
them, so a file that one command writes is there for the next. Two kinds of failure are kept apart:

    the agent's      a ``Result`` says how its command ended (exit code, time, memory);
                     ``SandboxFileError`` says which path it cannot have. Scored as usual.
    infrastructure   ``SandboxLost``: the node, the connection or the sandbox's own processes are
                     gone. ``retry`` runs the work again elsewhere; when all attempts fail, the
                     error reaches the caller, which leaves the answer out of its group. Never 0.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import enum
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol, Self, TypeVar

from rlpost.errors import ConfigError, GradingLost, RlpostError
from rlpost.extensions.agents.sandbox.inner.files import Request
from rlpost.extensions.agents.sandbox.snapshots import Snapshot as Snapshot
from rlpost.extensions.agents.sandbox.snapshots import SnapshotEntry as SnapshotEntry
from rlpost.extensions.agents.sandbox.snapshots import SnapshotRefused as SnapshotRefused
from rlpost.extensions.agents.sandbox.snapshots import decode, encode

MIB = 1 << 20
T = TypeVar("T")
WORK = "/work"  # the folder in which commands start and that a snapshot copies
FILE_SECONDS = 60.0  # limit of one file operation


@dataclass(frozen=True)
class Limits:
    """Limits of one sandbox. Sizes are in MiB, times in seconds.

    A command is a call of ``Sandbox.run`` with all processes that it starts.
    """

    wall_seconds: float = 60.0
    """Time of one command; ``run(timeout=...)`` may only shorten it."""
    cpu_seconds: float = 60.0
    """CPU time of one command, over all of its processes."""
    lifetime_seconds: float = 3600.0
    """Time from the first command until the sandbox is closed."""
    cores: int = 1
    """CPUs that the processes may use."""
    memory_mib: int = 1024
    """Memory of all processes together; also of each one."""
    processes: int = 128
    """Processes and threads at one time."""
    open_files: int = 512
    """Open files of one process."""
    file_mib: int = 256
    """Size of one file."""
    disk_mib: int = 512
    """Size of all files that were written; they occupy memory of the node."""
    files: int = 50_000
    """Number of files and folders that were written."""
    output_kib: int = 256
    """Kept of standard output and of standard error; the rest is read and dropped."""
    snapshot_mib: int = 64
    """Size of all files of a snapshot."""
    snapshot_files: int = 5_000
    """Files and folders of a snapshot."""
    network: bool = False
    """Use the node's network. Default: a loopback interface of the sandbox's own."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name != "network" and not value > 0:
                raise ConfigError(f"{entry.name} = {value} of a sandbox must be above 0")


class Ended(enum.StrEnum):
    """Why a command ended. Each reason is the agent's; see ``SandboxLost`` for the others."""

    EXITED = "exited"  # it returned an exit code
    SIGNALLED = "signalled"  # a signal ended it that no limit sent
    TIMEOUT = "timeout"  # wall time; all processes of the sandbox were killed, its files stay
    CPU_TIME = "cpu time"  # as for TIMEOUT
    MEMORY = "memory"  # as for TIMEOUT
    NOT_STARTED = "not started"  # the program does not exist or cannot be executed


@dataclass(frozen=True)
class ScanBounds:
    """Bounds of one archive of a folder."""

    bytes: int
    """Size of all files."""
    files: int
    """Files and folders."""
    content: int
    """Size of the contents in one answer of a sandbox; a larger file is sent in parts."""
    whole: str = ""
    """The settings that bound all folders of an archive together, for messages."""
    before: str = ""
    """What the folders before this one have, for messages."""


@dataclass(frozen=True)
class Result:
    """The end of one command."""

    ended: Ended
    exit_code: int
    """Exit code; 128 + signal when a signal ended the command, 127 when it did not start."""
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    seconds: float = 0.0
    """Wall time."""

    @property
    def ok(self) -> bool:
        return self.ended is Ended.EXITED and self.exit_code == 0

    @property
    def text(self) -> str:
        """Standard output as text; bytes that are not UTF-8 are replaced."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def problem(self) -> str:
        """Why an operation failed: its standard error, or else how it ended."""
        return self.stderr.decode("utf-8", "replace") or self.ended.value


class SandboxLost(GradingLost):
    """A sandbox ended for a reason outside the agent: node, connection, Slurm job, pool.

    ``RemotePool`` avoids the node for a while, so the next sandbox is on another one. ``Episodes`` in
    ``rlpost.extensions.agents.environments.episodes`` starts the episode again in it, --env-retries times, and
    ``retry`` a verifier; then the answer is left out of the batch.
    """


class ArchiveRefused(RlpostError):
    """The state of a sandbox cannot be saved now: too large, or processes in the background."""


class ArchiveStoreFull(ArchiveRefused, GradingLost):
    """The store is full, of saves of other episodes too, so it says nothing of this one."""


class SandboxFileError(RlpostError):
    """A path cannot be read or written inside the sandbox: missing, too large, no permission."""


class Sandbox(abc.ABC):
    """A place where commands of one agent run; ``async with`` closes it.

    One call at a time. All methods raise ``SandboxLost`` when the sandbox itself is gone.

    Attributes:
        name: for logs and records: backend, node, number.
        on_close: called once, when the sandbox has ended.
    """

    def __init__(self, limits: Limits, name: str) -> None:
        self.limits, self.name = limits, name
        self.on_close: Callable[[], None] | None = None

    @abc.abstractmethod
    async def perform(self, request: Request, stdin: bytes = b"") -> Result:
        """Send a request to the sandbox's first process (``inner.init``); return how it ended."""

    @abc.abstractmethod
    async def close(self) -> None:
        """End the sandbox; nothing of it is left. Never raises ``SandboxLost``."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def run(
        self,
        command: str | Sequence[str],
        *,
        stdin: bytes = b"",
        timeout: float | None = None,
        cwd: str = WORK,
        env: Mapping[str, str] | None = None,
    ) -> Result:
        """Run a command: a string with ``/bin/sh -c``, a sequence as argument vector.

        Returns when the command's first process has ended. Processes that it left in the background
        stay alive for the next command, but no longer reach its output. ``timeout`` is in
        seconds. ``env`` is added to PATH, HOME, LANG, USER and TERM; nothing of the caller's
        environment is visible.
        """
        limits = self.limits
        request: Request = {
            "op": "run",
            "argv": ["/bin/sh", "-c", command] if isinstance(command, str) else list(command),
            "cwd": cwd,
            "env": dict(env or {}),
            "wall_seconds": min(timeout or limits.wall_seconds, limits.wall_seconds),
            "cpu_seconds": limits.cpu_seconds,
        }
        return await self.perform(request, stdin)

    async def write(self, path: str, data: bytes, *, executable: bool = False) -> None:
        """Write a file with the agent's permissions and create its folders.

        Raises ``SandboxFileError``.
        """
        await self._on_path({"op": "write", "path": path, "executable": executable}, data)

    async def read(self, path: str, *, limit: int = MIB) -> bytes:
        """Read a regular file of at most ``limit`` bytes with the agent's permissions.

        Raises ``SandboxFileError``.
        """
        return (await self._on_path({"op": "read", "path": path, "limit": limit})).stdout

    async def end_processes(self) -> None:
        """Kill all processes of the agent and wait until none is left. Files stay."""
        await self._operate({"op": "end"})

    async def snapshot(self, folder: str = WORK) -> Snapshot:
        """End all processes, then copy a folder. Raises ``SnapshotRefused``."""
        result = await self._operate(
            {
                "op": "snapshot",
                "path": folder,
                "max_bytes": self.limits.snapshot_mib * MIB,
                "max_files": self.limits.snapshot_files,
            }
        )
        if not result.ok or result.stdout_truncated:
            raise SnapshotRefused(f"{folder}: {result.problem}")
        return decode(result.stdout)

    async def restore(self, snapshot: Snapshot, folder: str = WORK) -> None:
        """Write the entries of a snapshot below a folder. Raises ``SandboxFileError``."""
        await self._on_path({"op": "restore", "path": folder}, encode(snapshot.entries))

    async def scan(
        self,
        folder: str,
        known: Iterable[bytes],
        *,
        bounds: ScanBounds,
        partial: tuple[bytes, int] = (b"", 0),
    ) -> bytes:
        """Return a stream of all entries below a folder (``inner.archive``).

        Contents of files with a ``known`` signature are left out. ``partial``: signature of a file
        whose first bytes were received, and how many.

        Raises ``ArchiveRefused`` when the folder exceeds the bounds, or when processes of the agent
        run in the background.
        """
        request: Request = {
            "op": "save",
            "path": folder,
            "max_bytes": bounds.bytes,
            "max_files": bounds.files,
            "max_content": bounds.content,
            "partial": partial[0].hex(),
            "offset": partial[1],
            "bounds": f"{bounds.whole} over all folders{bounds.before}",
        }
        result = await self._operate(request, b"".join(known))
        if not result.ok or result.stdout_truncated:
            why = (
                "the names of its files are too long" if result.stdout_truncated else result.problem
            )
            raise ArchiveRefused(f"sandbox {self.name}: {folder}: {why}")
        return result.stdout

    async def unpack(self, folder: str, stream: bytes, *, clear: bool) -> None:
        """Write the entries of a stream (``inner.archive``) below a folder.

        ``clear`` empties the folder before. Raises ``SandboxFileError``.
        """
        await self._on_path({"op": "unpack", "path": folder, "clear": clear}, stream)

    async def _on_path(self, request: Request, stdin: bytes = b"") -> Result:
        """Perform an operation on a path. Raises ``SandboxFileError``."""
        result, path = await self._operate(request, stdin), request["path"]
        if not result.ok:
            problem = result.problem
            raise SandboxFileError(problem if path in problem else f"{path}: {problem}")
        return result

    async def _operate(self, request: Request, stdin: bytes = b"") -> Result:
        times: Request = {"wall_seconds": FILE_SECONDS, "cpu_seconds": FILE_SECONDS}
        return await self.perform(request | times, stdin)

    def _has_ended(self) -> None:
        """Call ``on_close``."""
        notify, self.on_close = self.on_close, None
        if notify is not None:
            notify()


class Pool(Protocol):
    """A source of fresh sandboxes: bounded, first come first served. ``async with`` closes it.

    ``limits``: of its sandboxes, unless a caller gives others.
    """

    limits: Limits

    async def __aenter__(self) -> Pool: ...

    async def __aexit__(self, *error: object) -> None: ...

    async def acquire(self, limits: Limits | None = None, image: str | None = None) -> Sandbox:
        """Wait for a fresh sandbox; closing it gives the place back.

        Args:
            limits: default: those of the pool.
            image: the root, a folder or a .sqsh file that the sandbox's node can read. Default: that
                of the pool.

        Raises:
            SandboxLost: the pool has no node.
            ConfigError: the image is missing or cannot be unpacked.
        """
        ...

    async def close(self) -> None:
        """End all sandboxes and their servers."""
        ...


@contextlib.asynccontextmanager
async def fresh(
    pool: Pool, limits: Limits | None = None, image: str | None = None
) -> AsyncIterator[Sandbox]:
    """``async with fresh(pool) as sandbox``: acquire a sandbox and close it."""
    sandbox = await (pool.acquire(limits) if image is None else pool.acquire(limits, image))
    try:
        yield sandbox
    finally:
        await asyncio.shield(sandbox.close())


async def retry(
    pool: Pool,
    work: Callable[[Sandbox], Awaitable[T]],
    *,
    limits: Limits | None = None,
    image: str | None = None,
    attempts: int = 3,
) -> T:
    """Run ``work`` in a fresh sandbox, again in another one when the sandbox is lost.

    ``work`` must start from the beginning. Raises ``SandboxLost`` after ``attempts``: the caller
    leaves the episode out, it does not score 0.
    """
    for attempt in range(1, attempts + 1):
        try:
            async with fresh(pool, limits, image) as sandbox:
                return await work(sandbox)
        except SandboxLost as lost:
            if attempt == attempts:
                raise SandboxLost(f"{lost} (attempt {attempt} of {attempts})") from lost
            await asyncio.sleep(0.1 * attempt)
    raise AssertionError("unreachable: attempts must be at least 1")


class Verifier(Protocol):
    """Scores a result in the driver's process; see ``rlpost.extensions.agents.sandbox.verify``.

    ``sandbox`` is fresh and holds a copy of the agent's files. Commands of the agent run there, so
    a verifier trusts only results that it computes from their output, and gives them no secret.
    """

    async def score(self, sandbox: Sandbox, snapshot: Snapshot) -> float: ...


@dataclass(frozen=True)
class Verdict:
    """The score of a result with its reason, for the record of the episode."""

    score: float
    reason: str = ""
    refused: tuple[str, ...] = ()
