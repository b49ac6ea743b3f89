"""The driver of an attempt: its process, a standby that has imported everything, and restarts.

Input: the command of the driver, the cluster once it is up. Output: a future of the exit code of
the last driver. The head does not notice a restart.

Each driver (*incarnation*) runs under a separate keeper, so that the end of a driver ends only its
own children: graders. Ray, actors and engines run below Ray's keeper. A new driver
receives the cluster only when the process tree of the old one is gone, because both use the same
ports.

The standby is the next incarnation, started in advance: it imports everything and waits for its
``Cluster`` line. It starts STANDBY_AFTER_S after the driver has the cluster, when the run's startup
no longer needs the CPU. Its niceness is not raised, because an unprivileged process cannot lower it
again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from bootstrap.agent.options import Options
from bootstrap.agent.verdict import describe_exit
from bootstrap.links.monitor import Kept
from common.attempt import DRIVER_LOG, STOP_FILE
from common.cluster import Cluster
from common.exit_codes import EXIT_CRASHED
from common.files import is_there, tail_or_empty
from common.run_folder import RunFolder

logger = logging.getLogger(__name__)

STANDBY_AFTER_S = 60.0
STORAGE_S = 5.0


class _Process:
    """One driver process, which waits for its ``Cluster`` line or runs."""

    def __init__(self, kept: Kept, line_end: int) -> None:
        self.kept = kept
        self._line_end: int | None = line_end
        self._writing: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, name: str, options: Options, environ: Mapping[str, str]) -> _Process:
        reading_end, writing_end = os.pipe()
        log = _open_log(options.attempt_dir)
        try:
            stdio = (reading_end, log)
            kept = await Kept.start(name, options.driver, environ=environ, stdio=stdio)
        finally:
            os.close(reading_end)
            os.close(log)
        return cls(kept, writing_end)

    def hand_over(self, cluster: Cluster) -> None:
        """Write the line in a thread: the write blocks until the driver reads."""
        assert self._line_end is not None, "a driver gets one line"
        descriptor, self._line_end = self._line_end, None
        write = asyncio.to_thread(_write_line, descriptor, cluster.to_json())
        self._writing = asyncio.create_task(write)

    def close_input(self) -> None:
        if self._line_end is not None:
            os.close(self._line_end)
            self._line_end = None

    async def end(self, grace_s: float) -> None:
        await self.kept.end(grace_s)
        self.close_input()
        self.kept.release()


class DriverProcess:
    """The driver of an attempt, which is started again after a crash."""

    def __init__(
        self,
        options: Options,
        environ: Mapping[str, str],
        first: _Process,
        *,
        is_ending: Callable[[], bool],
    ) -> None:
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """The exit code of the last driver, negative for a signal."""
        self._options, self._environ = options, environ
        self._is_ending = is_ending
        self._current = first
        self._standby: _Process | None = None
        self._cluster: Cluster | None = None
        self._deaths: tuple[DriverDeath, ...] = ()
        self._preparing: asyncio.Task[None] | None = None
        self._following = asyncio.create_task(self._follow())

    @classmethod
    async def start(
        cls, options: Options, environ: Mapping[str, str], *, is_ending: Callable[[], bool]
    ) -> DriverProcess:
        """Start the driver, which waits for its cluster.

        ``is_ending``: whether a stop was requested, or a node or Ray is lost.
        """
        first = await _Process.start("the driver", options, environ)
        return cls(options, environ, first, is_ending=is_ending)

    def hand_over(self, cluster: Cluster) -> None:
        """Let the driver work on the cluster."""
        self._cluster = cluster
        self._current.hand_over(cluster)
        self._prepare_standby()

    def set_cluster(self, cluster: Cluster) -> None:
        """Set the cluster of the next driver, after a spare has replaced a lost node."""
        self._cluster = cluster

    def close_input(self) -> None:
        """Report to the driver that there is no cluster."""
        self._current.close_input()

    async def end(self, grace_s: float) -> None:
        """Send TERM, and KILL after ``grace_s`` seconds; returns when all processes are gone."""
        await _cancel_all(self._following, self._preparing)
        if self._standby is not None:  # it has no work to end; TERM would leave lines in the log
            await self._standby.end(0.0)
            self._standby = None
        await self._current.end(grace_s)

    async def _follow(self) -> None:
        """Start the driver again after each crash, until there is a reason to end."""
        while True:
            await asyncio.wait([self._current.kept.exited])
            code, died_at = self._current.kept.exited.result(), time.time()
            try:
                reason = await self._reason_to_end(code)
                if reason is None:
                    reason = await self._replace(code, died_at)
            except OSError as error:
                reason = f"it could not be started again: {error}"
            if reason is not None:
                logger.info("the driver ended (%s): %s", describe_exit(code), reason)
                self.exited.set_result(code)
                return

    async def _reason_to_end(self, code: int) -> str | None:
        # Files are read after a crash only: while storage hangs, a deliberate end is reported.
        step = await self._last_step() if is_crash(code) else -1
        death = DriverDeath(code, time.monotonic(), step)
        reason = reason_to_end(
            death,
            self._deaths,
            max_restarts=self._options.driver_restarts,
            is_ending=self._cluster is None or self._is_ending(),
        )
        if reason is None:
            self._deaths += (death,)
        return reason

    async def _last_step(self) -> int:
        metrics = RunFolder(self._options.attempt_dir.parents[1]).metrics
        try:
            return await asyncio.wait_for(asyncio.to_thread(last_step, metrics), STORAGE_S)
        except TimeoutError:
            return -1

    async def _must_end(self) -> bool:
        if self._is_ending():
            return True
        looking = asyncio.to_thread(is_there, self._options.attempt_dir / STOP_FILE)
        try:
            return await asyncio.wait_for(looking, STORAGE_S)
        except TimeoutError:
            return True

    async def _replace(self, code: int, died_at: float) -> str | None:
        """Start the next driver; return why there is none."""
        assert self._cluster is not None
        number, how = len(self._deaths), describe_exit(code)
        logger.warning("the driver died (%s); starting it again, incarnation %d", how, number)
        old = self._current
        await old.end(0.0)  # its graders have nothing to save
        if not old.kept.gone.done():
            return "processes of the driver survive KILL"
        if await self._must_end():  # also if the stop file is newer than the last poll
            return "the attempt is ending"
        await _cancel_all(self._preparing)
        standby, self._standby = self._standby, None
        if standby is None or standby.kept.exited.done():
            name = f"the driver ({number})"
            standby = await _Process.start(name, self._options, self._environ)
        _write_to_log(
            self._options.attempt_dir,
            f"--- driver {number} of this attempt replaces one that died: {how} ---",
        )
        self._current = standby
        standby.hand_over(replace(self._cluster, incarnation=number, died_at=died_at, died_of=how))
        self._prepare_standby()
        return None

    def _prepare_standby(self) -> None:
        if len(self._deaths) < self._options.driver_restarts:
            self._preparing = asyncio.create_task(self._start_standby())

    async def _start_standby(self) -> None:
        await asyncio.sleep(STANDBY_AFTER_S)
        if self._standby is not None:  # its start outlasted the driver that it was for
            return
        try:
            # Shielded, because a process whose start is cancelled would have no owner.
            starting = asyncio.create_task(
                _Process.start("the standby driver", self._options, self._environ)
            )
            starting.add_done_callback(self._on_standby_started)
            await asyncio.shield(starting)
        except OSError as error:  # a restart then has to import first
            logger.warning("no standby driver could be started: %s", error)

    def _on_standby_started(self, starting: asyncio.Task[_Process]) -> None:
        if not starting.cancelled() and starting.exception() is None:
            self._standby = starting.result()


async def _cancel_all(*tasks: asyncio.Task[None] | None) -> None:
    running = [task for task in tasks if task is not None and not task.done()]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)


def _open_log(attempt_dir: Path) -> int:
    return os.open(attempt_dir / DRIVER_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def _write_to_log(attempt_dir: Path, line: str) -> None:
    with suppress(OSError):  # a full disk is detected elsewhere (``disks``)
        log = _open_log(attempt_dir)
        try:
            os.write(log, f"{line}\n".encode())
        finally:
            os.close(log)


def _write_line(descriptor: int, text: str) -> None:
    """Write a line and close; the exit of a driver is reported elsewhere."""
    with suppress(BrokenPipeError), os.fdopen(descriptor, "w") as stream:
        stream.write(text + "\n")


WINDOW_S = 600.0
LAST_LINES_BYTES = 65_536
CRASHES = (
    signal.SIGKILL,  # the kernel, out of memory
    signal.SIGSEGV,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
)


@dataclass(frozen=True, slots=True)
class DriverDeath:
    """One death of a driver.

    ``code`` is its exit code, negative for a signal. ``at`` is in seconds of a monotonic clock.
    ``step`` is the newest trained step, -1 before the first.
    """

    code: int
    at: float
    step: int


def reason_to_end(
    death: DriverDeath, earlier: tuple[DriverDeath, ...], *, max_restarts: int, is_ending: bool
) -> str | None:
    """Return why the attempt ends after this death; None to start the driver again.

    A driver that ends deliberately (finished, preempted, bad settings, a known error) is not started
    again, nor after TERM, nor one that dies twice within ``WINDOW_S`` seconds without a trained step
    between the two deaths. The batch script then decides about a whole restart.
    Args:
        earlier: deaths in this attempt after which it was started again.
        is_ending: a stop was requested, or a node or Ray is lost.
    """
    if not is_crash(death.code):
        return "the driver ended by itself"
    if is_ending:
        return "the attempt is ending"
    if len(earlier) >= max_restarts:
        return f"the driver was started again {len(earlier)} times already, the maximum"
    recent = [one for one in earlier if death.at - one.at < WINDOW_S]
    if recent and death.step <= max(one.step for one in recent):
        return (
            f"the driver has died {len(recent) + 1} times within {WINDOW_S:.0f} s "
            "without a newly trained step"
        )
    return None


def is_crash(code: int) -> bool:
    """Whether a driver that ended with ``code`` may work when it is started again."""
    return code == EXIT_CRASHED or -code in CRASHES


def last_step(metrics: Path) -> int:
    """The step of the last complete line of ``metrics.jsonl``; -1 without one. Blocks."""
    for line in reversed(tail_or_empty(metrics, LAST_LINES_BYTES).splitlines()):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return -1
