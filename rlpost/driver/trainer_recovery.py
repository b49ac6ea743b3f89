"""Trainer recovery: starts dead trainer ranks again while everything else of the attempt stays.

Input: operations of the trainer, and a starter of ranks (``trainer_ranks``). Output: the results of
these operations, as if no rank had died. The trainer's state is a function of the newest checkpoint
c and of the batches of the steps after it, which the journal holds on disk:

    over(operation) -> a rank died -> [decision] -> abandon a save in progress -> kill all ranks
    -> new processes (standbys where there are some) -> load c -> connect the engines
    -> train the steps after c again, discard their metrics -> the operation again

Survivors are started again too: their process groups are broken, and their memory may be. Engines,
their caches and their answers are not touched; they receive weights only in the operation that was
interrupted, if that is a weight update. ``rlpost.driver.decision`` decides when the attempt ends
instead; a failure of the recovery ends it too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from common.bounded import cancel_all
from common.process_end import ProcessId
from rlpost.config.tree import Config
from rlpost.driver.calls import repeat
from rlpost.driver.checkpoints import Checkpoints
from rlpost.driver.decision import (
    Death,
    Phase,
    Recovery,
    Situation,
    lost_peer_or_device,
    refusal,
)
from rlpost.driver.ledger_lines import RecordEvent, not_recorded
from rlpost.driver.lost_nodes import LostNodes
from rlpost.driver.placement import Placement
from rlpost.driver.preemption import StopRequest
from rlpost.driver.trainer_ranks import TrainerRanks
from rlpost.driver.training import Training
from rlpost.driver.worker_groups import Actor, ActorGroup, remote
from rlpost.durable.daemon_threads import in_daemon
from rlpost.durable.state import RunState
from rlpost.durable.trained_batches import TrainedBatches
from rlpost.errors import (
    Fenced,
    HalfTrained,
    Hang,
    Preempted,
    RlpostError,
    TrainerDied,
    WorkerFailed,
)
from rlpost.rollout.policy_versions import PolicyVersions

logger = logging.getLogger(__name__)

T = TypeVar("T")

ANSWER_S = 5.0
"""Deadline of a rank's answer to a liveness check."""
NAMED_S, POLL_S = 5.0, 0.2
"""How long to look for the dead rank after another one reported a broken connection."""
WATCH_S = 2.0
"""Seconds between two polls of idle ranks."""
END_S = 60.0
"""Deadline for the end of killed processes: the kernel frees their GPU memory first."""


Batches = Callable[[RunState, Path | None, int], Awaitable[TrainedBatches]]
"""``batches(state, checkpoint, until)``: the batches after ``state`` and before step ``until``."""


class TrainerRecovery:
    """Makes the trainer's operations survive the death of its ranks."""

    def __init__(
        self,
        config: Config,
        group: ActorGroup,
        ranks: TrainerRanks,
        *,
        placement: Placement,
        checkpoints: Checkpoints,
        stop: StopRequest,
        record: RecordEvent = not_recorded,
        nodes: LostNodes | None = None,
    ) -> None:
        """
        Args:
            group: the ranks that every caller uses; their workers are replaced.
            ranks: starts ranks, and connects them with what stays.
            nodes: lost nodes, whose ranks count as dead before Ray says so; it chooses the slots of
                new ranks.
        """
        self._nodes = LostNodes.none() if nodes is None else nodes
        self._config, self._group, self._ranks = config, group, ranks
        self._placement, self._checkpoints, self._stop = placement, checkpoints, stop
        self._record = record
        self._past: list[Recovery] = []
        self._processes: list[tuple[str, ProcessId]] = []
        self._step = 0
        self._versions = PolicyVersions()
        self._batches: Batches | None = None
        self._early: asyncio.Task[None] | None = None  # a recovery beside generation
        self.training: Training

    async def begin(self, training: Training) -> None:
        """Take over ranks that have started. ``resume`` follows."""
        self.training = training
        await self._note_ranks()

    def resume(self, step: int, versions: PolicyVersions, batches: Batches) -> None:
        """Set the number of trained steps, and the source of batches to train again."""
        self._step, self._versions, self._batches = step, versions, batches

    def note_step(self, step: int) -> None:
        """Record that the trainer has completed ``step`` steps. Standbys are started now."""
        self._step = step
        self._ranks.stand_by(self._placement)

    async def over(self, phase: Phase, operation: Callable[[], Awaitable[T]]) -> T:
        """Return the result of ``operation``; after a death of ranks, restart them and repeat it.

        ``operation`` must be repeatable from the trainer's state before it.

        Raises:
            HalfTrained: a stop was requested while ranks were dead; the journal is durable.
            RlpostError: the error of ``operation``, if no rank died or a recovery is refused; else
                that of a recovery that failed.
        """
        await self._end_of_early()
        return await repeat(
            partial(self._nodes.unless_ranks_lost, operation),
            recover=partial(self._recover_from, phase),
        )

    async def _recover_from(self, phase: Phase, error: RlpostError) -> bool:
        """Restart ranks if they died; False if they did not, or the attempt has to end."""
        death = await self._death(error)
        if death is None:
            return False
        try:
            await self.recover(death, phase)
        except _Refused as refused:
            logger.error("the trainer is not started again: %s", refused)
            return False
        return True

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[None]:
        """Restart dead ranks while the block generates, instead of after it.

        It does nothing if engines use the ranks' GPUs. The next ``over`` raises the error of a
        recovery that failed.
        """
        if self._ranks.engines_hold_gpus():
            yield
            return
        watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            await cancel_all([watching])
            if not watching.cancelled() and (error := watching.exception()) is not None:
                logger.warning("dead ranks are found at the end of the phase only: %s", error)

    async def close(self) -> None:
        """Cancel a recovery that runs beside generation."""
        if self._early is not None:
            await cancel_all([self._early])

    async def _watch(self) -> None:
        while not self._stop.requested():
            await asyncio.sleep(WATCH_S)
            if self._early is not None:
                await asyncio.wait([self._early])
                if self._early.exception() is not None:
                    return
                self._early = None
            dead = self._nodes.ranks or await self._group.workers.dead(ANSWER_S)
            if dead:
                self._early = asyncio.create_task(self.recover(self._death_of(dead), "generate"))

    async def _end_of_early(self) -> None:
        """Wait for a recovery that runs beside generation; raise its error."""
        if self._early is not None:
            early, self._early = self._early, None
            with suppress(_Refused):  # the operation will fail on the dead ranks and be refused
                await early

    async def recover(self, death: Death, phase: Phase) -> None:
        """Start all ranks again, and bring them to the step that the trainer had completed.

        ``phase`` is the operation that failed, and that the caller repeats.

        Raises:
            HalfTrained: a stop was requested; the next attempt replays the journal.
            RlpostError: the attempt has to end.
        """
        began = time.monotonic()
        self._raise_if_refused(phase, began)
        if self._stop.requested():
            raise HalfTrained(f"a stop was requested; {death.headline}")
        logger.error("trainer died at step %d in %s: %s", self._step, phase, death.cause)
        self._past.append(Recovery(began, self._step))
        if death.hang:
            self._record("hang", **death.hang)
        try:
            async with self._ranks.paused():
                again = await self._stop.unless_requested(self._restart(death))
        except (HalfTrained, Fenced):
            raise
        except Preempted as request:
            raise HalfTrained(f"{request}; the trainer was being started again") from None
        except (RlpostError, OSError) as error:
            raise RlpostError(
                f"{death.cause}\nThe trainer could not be started again: {error}"
            ) from error
        await self._nodes.back("ranks")
        seconds = time.monotonic() - began
        logger.warning(
            "trainer recovered at step %d after %.1f s; steps trained again: %d",
            *(self._step, seconds, again),
        )
        self._record(
            "recovered",
            role="trainer",
            ranks=list(death.ranks),
            cause=death.headline,
            phase=phase,
            step=self._step,
            seconds=round(seconds, 3),
            steps_again=again,
        )

    def _raise_if_refused(self, phase: Phase, now: float) -> None:
        settings = self._config
        situation = Situation(
            phase,
            self._step,
            now,
            settings.cluster.max_trainer_recoveries,
            engines_hold_gpus=self._ranks.engines_hold_gpus(),
            lacks_optimizer=settings.checkpoint.no_save_optim and self._checkpoints.has_committed,
        )
        why = refusal(self._past, situation)
        if why is None and self._batches is None:
            why = "the run has not begun to train"
        if why is not None:
            raise _Refused(why)

    async def _restart(self, death: Death) -> int:
        """Start ranks and train steps again; return the number of these steps."""
        assert self._batches is not None, "resume comes first"
        await self._checkpoints.abandon("a rank of the trainer died")
        # Their end is awaited by ``until_ended``, except on a lost node.
        await self._group.workers.kill()
        placement = await self._nodes.new_slots(death, self._placement)
        checkpoint, state = await in_daemon(self._checkpoints.of_attempt)
        steps = range(state.step, self._step)
        reading = asyncio.ensure_future(self._batches(state, checkpoint, self._step))
        try:
            self.training = await self._within_deadline(self._start(checkpoint, placement))
            batches = await reading if steps else None
        finally:
            await cancel_all([reading])
        self._placement = placement
        for step in steps:
            assert batches is not None
            groups = await batches.groups(step)
            await self.training.train(groups, step + 1, self._versions)
            logger.info("step %d is trained again", step + 1)
        return self._step - state.step

    async def _start(self, checkpoint: Path | None, placement: Placement) -> Training:
        await self._ranks.prepare()
        self._group.replace(await self._ranks.create(placement))
        left = await self._group.workers.until_ended(self._processes, within_s=END_S)
        if left:
            raise RlpostError(
                f"killed ranks did not end within {END_S:.0f} s: {', '.join(left)}; a process in "
                "uninterruptible sleep waits for a device or for storage"
            )
        training = await self._ranks.set_up(placement, checkpoint)
        await self._note_ranks()
        await self._ranks.connect(placement)
        return training

    async def _note_ranks(self) -> None:
        self._processes = await self._group.workers.processes()
        await self._ranks.note_gpus()

    async def _within_deadline(self, starting: Awaitable[Training]) -> Training:
        """Await ``starting``. Raises RlpostError after --bringup-deadline-s, naming silent ranks."""
        deadline_s = self._config.cluster.bringup_deadline_s
        try:
            async with asyncio.timeout(deadline_s) as limit:
                return await starting
        except TimeoutError:
            if not limit.expired():
                raise
            answers = await self._group.answers(remote(Actor.position), within_s=ANSWER_S)
            silent = [
                name
                for name, answer in zip(self._group.workers.names, answers, strict=True)
                if answer is None
            ]
            missing = f"without an answer: {', '.join(silent)}" if silent else "every rank answers"
            raise RlpostError(
                f"ranks were not ready after {deadline_s} s (--bringup-deadline-s); {missing}"
            ) from None

    async def _death(self, error: RlpostError) -> Death | None:
        """Return which ranks died, if that is why an operation failed with ``error``."""
        if isinstance(error, Hang):
            ranks = tuple(error.details.get("ranks", ()))
            return Death(ranks, str(error), dict(error.details))
        if isinstance(error, TrainerDied):
            return Death(tuple(error.ranks), str(error))
        is_broken = isinstance(error, WorkerFailed) and lost_peer_or_device(str(error))
        end = time.monotonic() + (NAMED_S if is_broken else 0.0)
        while True:
            dead = await self._group.workers.dead(ANSWER_S)
            if dead:
                return self._death_of(dead, f"; first error: {error}")
            if time.monotonic() >= end:
                break
            await asyncio.sleep(POLL_S)
        return Death((), str(error)) if is_broken else None

    def _death_of(self, dead: Sequence[int], more: str = "") -> Death:
        names = ", ".join(self._group.workers.names[rank] for rank in dead)
        return Death(tuple(dead), f"{names} died{more}")


class _Refused(RlpostError):
    """The attempt has to end; the message is the reason."""
