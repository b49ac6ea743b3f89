"""Evaluation beside training: a version of the policy on engines of --eval-engines.

Input: the steps to evaluate, a folder, the health of a group of engines or of spare ones. Output: the metrics of each
step, later, while the next steps train.

    begin: the trainer writes the weights of the version to a folder -> the engines read it ->
    evaluate -> done: the metrics are on disk -> the folder is removed

A folder is complete when it has its name, and it is there until the metrics of its step are on disk.
So an attempt that is killed leaves the folders of the evaluations that it owes, and the next attempt
carries them out (``resume``). The loop waits only while the weights are written, and at the end of
the run.
"""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from rlpost.driver.engines.engine_health import Hook
from rlpost.driver.engines.joining import JoiningEngines
from rlpost.driver.placement import Placement
from rlpost.durable.daemon_threads import in_daemon
from rlpost.engines.engine_side_weights import (
    AdapterMover,
    DiskMover,
    PauseMode,
    WeightUpdate,
)
from rlpost.engines.load_check import LoadCheck
from rlpost.errors import CheckpointError, Fenced, Preempted
from rlpost.types import EngineAddress

logger = logging.getLogger(__name__)

MAX_WAITING = 4
"""Folders of weights that may wait; a further evaluation is skipped, with a warning."""
_FOLDER = re.compile(r"step-(\d+)-version-(\d+)")

Metrics = Mapping[str, float]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The weights of ``version``, written after ``step``."""

    step: int
    version: int
    folder: Path

    @classmethod
    def at(cls, root: Path, step: int, version: int) -> Snapshot:
        """Return the snapshot of a step below ``root``."""
        return cls(step, version, root / f"step-{step:07d}-version-{version}")


class Receivers(Protocol):
    """The engines that read a snapshot."""

    @property
    def addresses(self) -> tuple[EngineAddress, ...]:
        """Their addresses now."""

    @property
    def api_key(self) -> str:
        """Their key."""


class SnapshotWeights:
    """Gives a group of engines the weights of a folder (``EngineWeights``)."""

    engines_are_stuck = False

    def __init__(
        self,
        engines: Receivers,
        jobs: JoiningEngines | None = None,
        *,
        load_adapters: bool,
        timeout_s: float,
    ) -> None:
        """
        Args:
            jobs: engines of the group on other jobs; None without them.
            load_adapters: the folders have adapters alone.
        """
        self._engines, self._jobs, self._timeout_s = engines, jobs, timeout_s
        self._mover = AdapterMover if load_adapters else DiskMover
        self._load_check = None if load_adapters else LoadCheck()
        self.folder: Path | None = None
        """What the next update reads; without one the engines keep their weights."""

    async def connect(self) -> None:
        """Do nothing: engines read files."""

    def move(self, placement: Placement) -> None:
        """Do nothing: the addresses are those of the group."""

    async def update(
        self, version: int, *, pause: PauseMode = "abort", ready: Hook | None = None
    ) -> None:
        """Let all engines read ``folder``. Raises SyncError."""
        if self.folder is None:
            return
        if self._jobs is not None:
            await self._jobs.serve(version, self.folder)
        if not self._engines.addresses:
            return
        folder = self.folder
        update = WeightUpdate(
            self._engines.addresses, api_key=self._engines.api_key, timeout_s=self._timeout_s
        )

        async def write(_: int) -> str:
            if self._load_check is not None:
                await self._load_check.check_folder(update.receivers, folder)
            return str(folder)

        await update.update(version, self._mover(write), pause=pause, ready=ready)

    async def forget(self) -> None:
        """Read the folder no more. Engines of this job keep its weights; others wait for the next."""
        self.folder = None
        if self._jobs is not None:
            await self._jobs.before()


class EvaluatingEngines(Protocol):
    """The health of the engines that evaluate: ``EngineHealth`` or ``SpareEngines``."""

    async def update(self, version: int, *, pause: PauseMode, before: Hook, ready: Hook) -> None:
        """Bring the engines to ``version``. Raises SyncError."""

    async def over(self, generating: Awaitable[T], /) -> T:
        """Return the result of ``generating``; replace engines that die before it ends."""

    def forget_restarts(self) -> None:
        """Record that an evaluation has ended: restarts before it are no reason to give up."""


class BackgroundEvaluation:
    """Evaluates snapshots in order, one at a time. Call ``resume`` first, ``close`` last."""

    def __init__(
        self,
        root: Path,
        health: EvaluatingEngines,
        weights: SnapshotWeights,
        evaluate: Callable[[int], Awaitable[Metrics]],
    ) -> None:
        """
        Args:
            root: folder for snapshots, which all nodes and the next attempt see.
            evaluate: evaluates on the engines; the argument is the step. Raises Preempted.
        """
        self._root, self._health, self._weights, self._evaluate = root, health, weights, evaluate
        self._waiting: deque[Snapshot] = deque()
        self._working: asyncio.Task[None] | None = None
        self._done: Callable[[int, Metrics], Awaitable[None]] | None = None

    async def resume(self, step: int, done: Callable[[int, Metrics], Awaitable[None]]) -> None:
        """Carry out the evaluations that an earlier attempt owes, up to ``step``.

        Later steps are trained again, and then evaluated again. ``done`` gets the metrics of a
        step, and returns when they are on disk.
        """
        self._done = done
        owed = await in_daemon(lambda: self._owed(step))
        for snapshot in owed:
            logger.info("the evaluation of step %d is carried out now", snapshot.step)
        self._waiting.extend(owed)
        self._begin_work()

    async def begin(
        self, step: int, version: int, write: Callable[[str], Awaitable[None]], *, is_last: bool
    ) -> None:
        """Evaluate ``version`` after ``step``; return when ``write(folder)`` has written it.

        An evaluation whose weights cannot be written is skipped. Raises the error of an earlier one.
        """
        self.check()
        snapshot = Snapshot.at(self._root, step, version)
        if snapshot in self._waiting:
            return
        if len(self._waiting) > MAX_WAITING and not is_last:
            logger.warning(
                "the evaluation of step %d is skipped: %d others wait for the engines of "
                "--eval-engines; use more engines, or a larger --eval-interval",
                *(step, len(self._waiting)),
            )
            return
        try:
            await in_daemon(lambda: self._root.mkdir(mode=0o700, exist_ok=True))
            await write(str(snapshot.folder))
        except (CheckpointError, OSError) as error:
            if isinstance(error, Fenced):
                raise
            logger.error("the evaluation of step %d is skipped: %s", step, error)
            return
        self._waiting.append(snapshot)
        self._begin_work()

    def check(self) -> None:
        """Raise the error of an evaluation that failed."""
        if self._working is not None and self._working.done() and not self._working.cancelled():
            self._working.result()

    async def finish(self) -> None:
        """Wait for all evaluations. Raises their error, and Preempted."""
        if self._working is not None:
            if self._waiting:
                logger.info("waiting for the evaluation of step %d", self._waiting[-1].step)
            await asyncio.shield(self._working)

    async def close(self) -> None:
        """Stop; the next attempt carries out what is not done."""
        if self._working is not None:
            self._working.cancel()
            await asyncio.gather(self._working, return_exceptions=True)

    def _begin_work(self) -> None:
        if self._waiting and (self._working is None or self._working.done()):
            self._working = asyncio.create_task(self._work())
            self._working.add_done_callback(_retrieve_error)

    async def _work(self) -> None:
        assert self._done is not None, "resume comes first"
        while self._waiting:
            snapshot = self._waiting[0]
            started = time.monotonic()
            self._weights.folder = snapshot.folder
            await self._health.update(
                snapshot.version, pause="abort", before=_nothing, ready=_nothing
            )
            metrics = dict(await self._health.over(self._evaluate(snapshot.step)))
            self._health.forget_restarts()
            metrics["time/eval_beside_s"] = time.monotonic() - started
            await self._done(snapshot.step, metrics)
            logger.info("evaluated step %d in %.1f s", snapshot.step, time.monotonic() - started)
            self._waiting.popleft()
            # One that dies before the next snapshot waits for it.
            await self._weights.forget()
            await in_daemon(partial(shutil.rmtree, snapshot.folder, ignore_errors=True))

    def _owed(self, step: int) -> list[Snapshot]:
        """Return the snapshots up to ``step``; remove later ones, and those half written.

        Folders with other names are not ours, and stay.
        """
        owed = []
        for folder in self._root.glob("*") if self._root.is_dir() else ():
            is_half_written = folder.name.startswith(".")
            name = _FOLDER.fullmatch(folder.name.removeprefix("."))
            if name is None:
                continue
            if is_half_written or int(name[1]) > step:
                shutil.rmtree(folder, ignore_errors=True)
            else:
                owed.append(Snapshot(int(name[1]), int(name[2]), folder))
        return sorted(owed, key=lambda snapshot: snapshot.step)


def _retrieve_error(task: asyncio.Task[None]) -> None:
    # asyncio logs an error that is never retrieved; ``check`` and ``finish`` raise it.
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, Preempted):
        logger.error("the evaluation beside training failed: %s", error)


async def _nothing() -> None:
    pass
