"""A sandbox on this node: the launcher's process and the control socket of its first process."""

from __future__ import annotations

import array
import asyncio
import contextlib
import itertools
import json
import os
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rlpost.extensions.agents.sandbox.cgroup import Cgroup, Parent
from rlpost.extensions.agents.sandbox.inner.files import FileAnswer, Request
from rlpost.extensions.agents.sandbox.protocol import (
    MIB,
    Ended,
    Limits,
    Result,
    Sandbox,
    SandboxLost,
)

START_SECONDS = 30.0
ANSWER_SECONDS = 20.0  # beyond the time of a command, for killing its processes on a busy node
REQUEST_BYTES = 180_000  # maximum size of a packet, below net.core.wmem_default
# Host users for sandboxes that root starts: 1,879,048,192 to 2,147,483,647, which systemd leaves
# unassigned (https://systemd.io/UIDS-GIDS).
FIRST_USER, USERS = 0x7000_0000, 1 << 28
USERS_BETWEEN_PROCESSES = 165_902_237  # USERS divided by the golden ratio, and odd
KILLED = 137  # exit code: 128 + SIGKILL
ROOT = str(Path(__file__).parents[4])
START = (
    f"import sys; sys.path.insert(0, {ROOT!r}); "
    "from rlpost.extensions.agents.sandbox.inner.launcher import main; sys.exit(main(sys.argv[1:]))"
)
_numbers = itertools.count()


@dataclass(frozen=True)
class Root:
    """The file system that a sandbox sees."""

    image: str | None = None
    """Folder with the root of an image. Default: /usr and a few files of this node."""
    read_only: tuple[str, ...] = ()
    """Further folders of the node, visible at the same paths."""


class LocalSandbox(Sandbox):
    """Runs commands in namespaces of this node. Create it with ``start``."""

    def __init__(self, limits: Limits, number: int) -> None:
        super().__init__(limits, f"{socket.gethostname()}/{number}")
        self._number = number
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._busy = asyncio.Lock()
        self._deadline: float | None = None
        self._cgroup: Cgroup | None = None
        self._memory_kills = 0
        self._is_exhausted = False

    @property
    def alive(self) -> bool:
        """Return whether the launcher still runs."""
        return self._process is not None and self._process.returncode is None

    @classmethod
    async def start(
        cls, limits: Limits, root: Root | None = None, cgroups: Parent | None = None
    ) -> LocalSandbox:
        """Start a sandbox, in a separate cgroup with ``cgroups``.

        Raises ``SandboxLost`` when this node cannot run one.
        """
        sandbox = cls(limits, next(_numbers))
        try:
            if cgroups is not None:
                sandbox._cgroup = cgroups.sandbox(limits)
            await asyncio.wait_for(sandbox._launch(root or Root()), START_SECONDS)
        except BaseException as error:
            await sandbox.close()
            if isinstance(error, OSError | TimeoutError):
                raise SandboxLost(f"sandbox {sandbox.name} did not start: {error}") from error
            raise
        return sandbox

    async def _launch(self, root: Root) -> None:
        # SEQPACKET keeps the bounds of messages, and passes descriptors with each of them.
        outer, inner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        outer.setblocking(False)
        self._control = outer
        with inner:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                # Isolated and without site packages: nothing of the run's environment is imported.
                *("-I", "-S", "-B", "-c", START, str(inner.fileno())),
                pass_fds=[inner.fileno()],
                env={},
                cwd="/",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        if self._cgroup is not None:
            # Before the launcher receives its specification, and therefore before it forks.
            self._cgroup.add(self._process.pid)
        user, group = host_identity(root, self._number)
        spec = {
            "limits": asdict(self.limits),
            "image": root.image,
            "read_only": list(root.read_only),
            "user": user,
            "group": group,
            "slot": self._number,
        }
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(outer, json.dumps(spec).encode())
        answer = await self._answer()
        if "failed" in answer:
            why = f"{answer['failed']}{_owner_hint(root)}"
            raise SandboxLost(f"sandbox {self.name} did not start: {why}")

    async def _answer(self) -> FileAnswer:
        assert self._control is not None
        try:
            data = await asyncio.get_running_loop().sock_recv(self._control, REQUEST_BYTES)
        except OSError:
            data = b""
        if not data:
            self._is_exhausted = self._was_killed_for_memory()
            raise SandboxLost(f"sandbox {self.name} ended")
        answer: FileAnswer = json.loads(data)
        return answer

    def _was_killed_for_memory(self) -> bool:
        """Return whether the kernel has killed processes of the agent since the last answer."""
        kills = self._cgroup.memory_kills() if self._cgroup is not None else 0
        grew, self._memory_kills = kills > self._memory_kills, kills
        return grew

    async def perform(self, request: Request, stdin: bytes = b"") -> Result:
        """Perform a request within the lifetime of the sandbox; see ``Sandbox.perform``."""
        async with self._busy:
            request = request | {"wall_seconds": self._remaining(request["wall_seconds"])}
            try:
                return await self._exchange(request, self._max_output(request), stdin)
            except asyncio.CancelledError:
                # The command still runs, and its answer would be read as that of the next request.
                await asyncio.shield(self.close())
                raise

    def _max_output(self, request: Request) -> int:
        """Return how many bytes of standard output are kept."""
        match request["op"]:
            case "run":
                return self.limits.output_kib * 1024
            case "read":
                return request["limit"]
            case "snapshot":  # with a header for each entry
                return request["max_bytes"] + request["max_files"] * 4096
            case "save":
                return request["max_content"] + min(request["max_files"] * 4096, SAVE_HEADER_BYTES)
        return MIB

    def _remaining(self, wall: float) -> float:
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self.limits.lifetime_seconds
        return max(0.001, min(wall, self._deadline - now))

    async def _exchange(self, request: Request, output: int, stdin: bytes) -> Result:
        if self._is_exhausted:
            return _exhausted()
        if self._control is None:
            raise SandboxLost(f"sandbox {self.name} is closed")
        packet = json.dumps(request).encode()
        if len(packet) > REQUEST_BYTES:
            return Result(Ended.NOT_STARTED, 127, stderr=b"argument list too long")
        start = time.monotonic()
        pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(3)]
        feed = Feed(pipes[0][1], stdin)
        captures = [Capture(pipes[1][0], output), Capture(pipes[2][0], min(output, MIB) or MIB)]
        theirs = [pipes[0][0], pipes[1][1], pipes[2][1]]
        try:
            self._send(packet, theirs)
            answer = await asyncio.wait_for(
                self._answer(), request["wall_seconds"] + ANSWER_SECONDS
            )
        except (OSError, TimeoutError) as error:
            await self.close()
            raise SandboxLost(f"sandbox {self.name} does not answer: {error}") from error
        except SandboxLost:
            if not self._is_exhausted:
                raise
            await self.close()  # the agent's commands used up its memory; the node is not lost
            return _exhausted()
        finally:
            for handle in theirs:
                if handle >= 0:
                    os.close(handle)
            feed.finish()
            stdout, stderr = (capture.finish() for capture in captures)
        if "error" in answer:
            raise SandboxLost(f"sandbox {self.name}: {answer['error']}")
        if self._was_killed_for_memory() and answer["ended"] == Ended.SIGNALLED.value:
            answer["ended"] = Ended.MEMORY.value
        return _result(answer, stdout, stderr, captures, time.monotonic() - start)

    def _send(self, packet: bytes, handles: list[int]) -> None:
        assert self._control is not None
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", handles))
        self._control.sendmsg([packet], [rights])
        # The sandbox has copies of these. While ours are open, no reader sees the end of a pipe.
        for index, handle in enumerate(handles):
            os.close(handle)
            handles[index] = -1

    async def close(self) -> None:
        """End the sandbox and remove its cgroup; see ``Sandbox.close``."""
        if self._control is not None:
            self._control.close()
            self._control = None
        process, self._process = self._process, None
        if process is not None:
            await _wait_for_end(process)
        cgroup, self._cgroup = self._cgroup, None
        if cgroup is not None:
            await cgroup.remove()
        self._has_ended()


async def _wait_for_end(process: asyncio.subprocess.Process) -> None:
    try:
        await asyncio.wait_for(process.wait(), 5.0)
    except TimeoutError:
        # The launcher's end kills the sandbox's first process, and the kernel then all others.
        with contextlib.suppress(ProcessLookupError):  # it has ended since
            process.kill()
        await process.wait()


def host_user(number: int, pid: int | None = None) -> int:
    """Return the host user for a sandbox that root starts.

    Each sandbox of a process has its own user. Those of different processes of a host would share
    limits, keys and the kernel's counts per user, so their numbers are far apart: Fibonacci hashing
    (Knuth, The Art of Computer Programming, 6.4) spreads the process ids over all users.

    Args:
        number: of the sandbox in its process.
        pid: of the process that starts it; default: this one.
    """
    first = (os.getpid() if pid is None else pid) * USERS_BETWEEN_PROCESSES
    return FIRST_USER + (first + number) % (USERS - 1)  # IMAGE_USER is the last


def _owner_hint(root: Root) -> str:
    """Return the likely cause where root starts a sandbox on an image that belongs to root."""
    if root.image is None or os.geteuid() != 0 or os.stat(root.image).st_uid != 0:
        return ""
    return f"; {root.image} belongs to root, as whom no sandbox runs: chown -hR 12345:12345 {root.image}"


def host_identity(root: Root, number: int) -> tuple[int, int]:
    """Return the host user and group for a sandbox that root starts.

    With an image they are its owner, as only the owner may change files below an overlay's root; but
    never the host's root.
    """
    if root.image is not None:
        status = os.stat(root.image)
        if status.st_uid != 0:
            return status.st_uid, status.st_gid or status.st_uid
    user = host_user(number)
    return user, user


def _exhausted() -> Result:
    """Return the result of every request after the kernel ended a sandbox for its memory."""
    return Result(
        Ended.MEMORY, KILLED, stderr=b"the sandbox has used up its memory, and its files are gone"
    )


def _result(
    answer: FileAnswer, stdout: bytes, stderr: bytes, captures: list[Capture], seconds: float
) -> Result:
    code = os.waitstatus_to_exitcode(answer["status"])
    ended = Ended(answer["ended"])
    if "error_text" in answer:
        stderr += answer["error_text"].encode()
    return Result(
        ended,
        128 - code if code < 0 else code,
        stdout,
        stderr,
        captures[0].truncated,
        captures[1].truncated,
        seconds,
    )


CHUNK = 1 << 16
SAVE_HEADER_BYTES = 512 * MIB  # several times a listing (``archives``); a wire's message holds it
DROP_PAUSE = 0.004  # s between two dropped chunks: at most 16 MB/s


class Capture:
    """The read end of a pipe, drained in the background. ``handle`` is closed by ``finish``.

    Keeps the first bytes. Past the limit it reads slowly, so that an endless writer blocks on its
    own pipe instead of occupying the driver.
    """

    def __init__(self, handle: int, limit: int) -> None:
        self._handle, self._limit = handle, limit
        self._loop = asyncio.get_running_loop()
        self._data = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self.truncated = False
        os.set_blocking(handle, False)
        self._loop.add_reader(handle, self._readable)

    def _readable(self) -> None:
        if not self._read_chunk():
            self._loop.remove_reader(self._handle)
        elif self.truncated:
            self._loop.remove_reader(self._handle)
            self._timer = self._loop.call_later(DROP_PAUSE, self._resume)

    def _resume(self) -> None:
        self._timer = None
        self._loop.add_reader(self._handle, self._readable)

    def _read_chunk(self) -> bool:
        """Read a chunk from the pipe; return False at its end."""
        try:
            data = os.read(self._handle, CHUNK)
        except BlockingIOError:
            return True
        if not data:
            return False
        kept = data[: self._limit - len(self._data)]
        self._data += kept
        self.truncated = self.truncated or len(kept) < len(data)
        return True

    def finish(self) -> bytes:
        """Read the rest of the pipe, close it and return the kept bytes."""
        if self._handle < 0:
            return bytes(self._data)
        self._loop.remove_reader(self._handle)
        if self._timer is not None:
            self._timer.cancel()
        size = len(self._data)
        # A pipe holds at most 1 MiB. The loop is bounded: a background process may still write.
        for _ in range((1 << 20) // CHUNK + 1):
            if self.truncated or not self._read_chunk() or len(self._data) == size:
                break
            size = len(self._data)
        os.close(self._handle)
        self._handle = -1
        return bytes(self._data)


class Feed:
    """The write end of a pipe, filled in the background and closed at the end of the data."""

    def __init__(self, handle: int, data: bytes) -> None:
        self._handle, self._data = handle, memoryview(data)
        self._loop = asyncio.get_running_loop()
        if not data:
            self.finish()
            return
        os.set_blocking(handle, False)
        self._loop.add_writer(handle, self._writable)

    def _writable(self) -> None:
        try:
            written = os.write(self._handle, self._data[:CHUNK])
        except BlockingIOError:
            return
        except OSError:  # the command closed its end
            self.finish()
            return
        self._data = self._data[written:]
        if not self._data:
            self.finish()

    def finish(self) -> None:
        """Close the pipe; data that is not written yet is dropped."""
        if self._handle >= 0:
            self._loop.remove_writer(self._handle)
            os.close(self._handle)
            self._handle = -1
