"""Supervised child processes and stop requests of an agent.

Input: commands, signals, the STOP file. Output: futures that ``head`` and ``node`` wait for.
Everything runs on one asyncio event loop without blocking it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from bootstrap.links.deadline import JobClock, seconds_for_the_driver
from common.attempt import STOP_FILE
from common.files import is_there
from common.stop_file import StopMessage, read_deadline, write_stop

logger = logging.getLogger(__name__)

_KEEPER = "bootstrap.agent.keeper"
_END_MARGIN_S = 10.0  # time for KILL after the grace period
_STOP_POLL_S = 0.5
_HEAD_FIRST_S = 3.0


class Kept:
    """A command under a keeper.

    ``exited`` is its exit code, ``gone`` resolves when its process tree is gone.
    """

    def __init__(self, name: str, channel: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self.name = name
        self.exited: asyncio.Future[int] = loop.create_future()
        self.gone: asyncio.Future[None] = loop.create_future()
        self._pid: int | None = None
        self._channel = channel
        self._reader = loop.create_task(self._read())

    @classmethod
    async def start(
        cls,
        name: str,
        command: Sequence[str],
        *,
        environ: Mapping[str, str],
        stdio: tuple[int, int],
        scratch: Sequence[str] = (),
    ) -> Kept:
        """Run ``command``; ``stdio``: its input, and its output with standard error."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        argv = [sys.executable, "-m", _KEEPER, f"--channel={theirs.fileno()}"]
        argv += [f"--scratch={folder}" for folder in scratch]
        with theirs:
            launcher = await asyncio.create_subprocess_exec(
                *argv,
                "--",
                *command,
                env=dict(environ),
                stdin=stdio[0],
                stdout=stdio[1],
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C reaches only the agent's process group
            )
        await launcher.wait()  # the keeper has detached itself
        return cls(name, ours)

    async def end(self, grace_s: float) -> None:
        """Send TERM, and KILL after ``grace_s`` seconds; returns when the process tree is gone."""
        if not self.gone.done():
            with suppress(OSError):
                await asyncio.get_running_loop().sock_sendall(
                    self._channel, f"end {grace_s}\n".encode()
                )
            await asyncio.wait([self.gone], timeout=grace_s + _END_MARGIN_S)
        if not self.gone.done():
            logger.error("%s (session %s) survives KILL", self.name, self._pid)

    def release(self) -> None:
        """Disconnect from the keeper, which ends the rest and removes its scratch folders."""
        self._reader.cancel()
        self._channel.close()

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        received = b""
        while not self.gone.done():
            try:
                data = await loop.sock_recv(self._channel, 4096)
            except OSError:
                data = b""
            if not data:
                self._handle_keeper_death()
                return
            *lines, received = (received + data).split(b"\n")
            for line in lines:
                self._on_event(json.loads(line))

    def _on_event(self, event: dict[str, object]) -> None:
        if event["event"] == "started":
            self._pid = int(str(event["pid"]))
        elif event["event"] == "exited":
            self.exited.set_result(int(str(event["code"])))
        elif event["event"] == "gone":
            self.gone.set_result(None)

    def _handle_keeper_death(self) -> None:
        logger.error("the keeper of %s was killed; killing session %s", self.name, self._pid)
        if self._pid is not None:
            kill_session(self._pid)
        if not self.exited.done():
            self.exited.set_result(-signal.SIGKILL)
        self.gone.set_result(None)


def kill_session(session_id: int) -> None:
    """KILL every process of a session and all their descendants."""
    for pid in psutil.pids():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getsid(pid) == session_id:
                process = psutil.Process(pid)
                for descendant in process.children(recursive=True):
                    with suppress(psutil.Error):
                        descendant.kill()
                process.kill()


class StopSignals:
    """Stop requests: the STOP file, and the signals that make the agent write it.

    The first writer of the file sets the reason and the deadline. The driver polls the file; this
    class kills nothing.
    """

    def __init__(self, attempt_dir: Path, host: str, clock: JobClock, *, is_head: bool) -> None:
        """``is_head``: query Slurm for the job's end, and request a stop without a signal."""
        self._path = attempt_dir / STOP_FILE
        self._host = host
        self._clock = clock
        self._is_head = is_head
        self.requested = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._poll = loop.create_task(self._watch())
        self._writing: list[asyncio.Task[None]] = []
        if is_head:
            self._writing.append(loop.create_task(self._watch_clock()))

    def listen_to(self, *signals: signal.Signals) -> None:
        """Install handlers that turn these signals into stop requests."""
        for number in signals:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)

    async def write(self, reason: str, *, within_s: float) -> None:
        """Ask the driver to stop for an internal reason; ``requested`` stays unset."""
        self._poll.cancel()
        now = self._clock.now()
        await self._write(StopMessage(reason, now, deadline=now + within_s))

    async def seconds_for_the_driver(self, grace_s: float) -> float:
        """Seconds that the driver has to stop, by the STOP file's deadline if it has one."""
        deadline = await asyncio.to_thread(read_deadline, self._path)
        left_s = None if deadline is None else deadline - self._clock.now()
        return seconds_for_the_driver(left_s, grace_s=grace_s, lead_s=self._clock.lead_s)

    def _on_signal(self, number: signal.Signals) -> None:
        logger.warning("%s: asking the driver to stop", number.name)
        reason = f"{number.name} at the agent on {self._host}"
        self._writing.append(asyncio.get_running_loop().create_task(self._request(reason)))

    async def _request(self, reason: str) -> None:
        now = self._clock.now()
        deadline = await self._clock.end_after_signal(ask=self._is_head)
        if not self._is_head:
            # the head gets the signal too, and knows the deadline
            await asyncio.sleep(_HEAD_FIRST_S)
        await self._write(StopMessage(reason, now, deadline))
        self.requested.set()  # even if the file cannot be written: the job ends anyway

    async def _write(self, message: StopMessage) -> None:
        # In a thread, because a stalled shared file system must not stop the agent's heartbeats.
        try:
            await asyncio.to_thread(write_stop, self._path, message)
        except OSError as error:
            logger.error(
                "the driver cannot be asked to stop: %s cannot be written: %s",
                self._path,
                error.strerror,
            )

    async def _watch_clock(self) -> None:
        await self._clock.until_due()
        logger.warning(
            "the job ends in %.0f s and no signal arrived: asking the driver to stop",
            self._clock.lead_s,
        )
        await self._request(f"the job ends in {self._clock.lead_s:.0f} s and no signal arrived")

    async def _watch(self) -> None:
        # Another node may write the file, and shared file systems send no notifications: poll.
        while not await asyncio.to_thread(is_there, self._path):
            await asyncio.sleep(_STOP_POLL_S)
        self.requested.set()
