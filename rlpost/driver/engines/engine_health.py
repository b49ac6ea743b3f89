"""Restart engines that are dead or hang, and update their weights before they serve again.

Input: the engines and the weight coordinator. Output: engines that all answer and hold one
version, or an error. ``rlpost.engines.own_membership`` decides what happens to an engine; this
module carries it out. During an outage of an engine its requests are sent again to others, so no
prompt is lost and none is answered twice. Engines on a lost node are restarted on its
replacement. A colocated engine cannot receive weights while the trainer is offloaded, so it is
dismissed at once and restarted with the next update, before the trainer is onloaded: SGLang sizes
its KV cache by the memory that is free when the process starts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Protocol, TypeVar

from common.bounded import await_unless, cancel_all, for_each, together
from common.units import counted
from rlpost.config.tree import Config
from rlpost.driver.engines.engine_events import EngineEvents, Phase
from rlpost.driver.engines.own_engines import OwnEngines
from rlpost.driver.lost_nodes import GroupNodes, LostNodes, NodeLost
from rlpost.driver.placement import Placement
from rlpost.driver.preemption import StopRequest
from rlpost.engines.engine_side_weights import PauseMode
from rlpost.engines.own_membership import (
    MAX_RESTARTS,
    Admit,
    GiveUp,
    SendWeights,
    Start,
    Stop,
)
from rlpost.errors import EngineDied, Preempted, RlpostError, SyncError, TrainerDied

logger = logging.getLogger(__name__)

T = TypeVar("T")
Hook = Callable[[], Awaitable[None]]

NO_ANSWER = "no answer to the health check"
NODE_LOST = "the node is lost"
STUCK = "blocked in a broadcast that lost a peer"


class EngineWeights(Protocol):
    """Gives engines their weights (``rlpost.driver.weight_coordinator``)."""

    @property
    def engines_are_stuck(self) -> bool:
        """Whether engines that answer cannot take another update."""

    async def connect(self) -> None:
        """Connect to all engines; called after a restart. Raises SyncError."""

    def move(self, placement: Placement) -> None:
        """Use ``placement`` from the next ``connect`` on."""

    async def update(
        self, version: int, *, pause: PauseMode = "abort", ready: Hook | None = None
    ) -> None:
        """Bring all engines to ``version``. Raises SyncError."""


class OwnWeights:
    """For engines that keep the weights of their model folder."""

    engines_are_stuck = False

    async def connect(self) -> None:
        """Do nothing."""

    def move(self, placement: Placement) -> None:
        """Do nothing."""

    async def update(
        self, version: int, *, pause: PauseMode = "abort", ready: Hook | None = None
    ) -> None:
        """Do nothing."""


class EngineHealth:
    """Runs weight updates and repairs of engines, one at a time."""

    def __init__(
        self,
        config: Config,
        engines: OwnEngines,
        weights: EngineWeights,
        *,
        stop: StopRequest,
        check_others: Callable[[int], None] = lambda _: None,
        nodes: LostNodes | GroupNodes | None = None,
        events: EngineEvents | None = None,
        weights_onloaded: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
        before_start: Hook | None = None,
    ) -> None:
        """
        Args:
            stop: a stop request ends health checks and repairs that wait for engines to start,
                because Slurm may already have killed engines.
            check_others: called at each check with the number of engines of this job; raises
                RolloutError when no other engine has served for too long either.
            nodes: lost nodes that the agents replace; without it a lost node ends the run.
            events: receives deaths and restarts; without it they are logged only.
            weights_onloaded: context in which the trainer has its weights; entered for repairs
                while engines on other GPUs than the trainer's generate.
            before_start: awaited before engines on the trainer's GPUs are restarted, once the
                processes of those that failed have ended; offloads the trainer.
        """
        self._events = events or EngineEvents()
        self._stop = stop
        self._check_others = check_others
        self._nodes = LostNodes.none() if nodes is None else nodes
        self._interval_s = config.sglang.rollout_health_check_interval
        self._shares_gpus = config.cluster.colocate
        self._engines = engines
        self._weights = weights
        self._weights_onloaded = weights_onloaded
        self._before_start = before_start or _nothing
        self._busy = asyncio.Lock()
        self._check_at: float | None = None
        """When the next check is due, on the clock of the event loop; batches may be shorter."""

    @property
    def num_serving(self) -> int:
        """Engines of this job that get requests."""
        return len(self._engines.members.serving)

    def note_version(self, version: int) -> None:
        """Record the version that the trainer has for the engines; later repairs send it to all."""
        self._engines.members.set_version(version)

    def forget_restarts(self) -> None:
        """Count the restarts of each engine from 0 again."""
        self._engines.members.forget_restarts()

    async def update(self, version: int, *, pause: PauseMode, before: Hook, ready: Hook) -> None:
        """Bring all engines to ``version``; restart those that fail or were dismissed.

        ``before`` is awaited before each attempt to send weights, when all engines that are to
        receive them have started; ``ready`` once they have arrived.

        Raises SyncError when the update fails although every engine answers.
        """
        async with self._busy:
            self._engines.members.request_weights(version)
            self._events.lost(self._engines.members.dismissed, phase="sync", cause=NO_ANSWER)
            await self._repair(pause=pause, before=before, ready=ready)

    async def lend(self, most: int) -> list[int]:
        """Lend engines for an evaluation; not during an update or a repair. See ``OwnMembership.lend``."""
        async with self._busy:
            return self._engines.lend(most)

    async def give_back(self, indices: Sequence[int], version: int | None) -> None:
        """Take engines back that have ``version``; if it is not current they wait for the next."""
        async with self._busy:
            self._engines.give_back(indices, version)

    def paused(self) -> AbstractAsyncContextManager[object]:
        """Return a context without updates and repairs, which need a trainer that answers."""
        return self._busy

    async def leave_lost(self) -> None:
        """Stop sending requests to engines on lost nodes; not during an update or a repair."""
        if lost := self._nodes.engines:
            self._events.lost(lost, phase="generate", cause=NODE_LOST)
            await self._engines.lose(lost)

    async def begin_lost(self, placement: Placement) -> None:
        """Begin to start engines of lost nodes in ``placement``, while ranks start there.

        Call it while no update or repair is running. Engines that share GPUs with ranks start after
        the ranks.
        """
        lost = self._nodes.engines
        if lost and not self._shares_gpus:
            await self._engines.move(placement)
            self._weights.move(placement)
            for index in lost:
                self._engines.begin_restart(index)

    async def reconnect(self) -> None:
        """Connect the engines with ranks that were started again; call it in ``paused``.

        Their weights do not change. Engines that are blocked in a broadcast of the dead ranks are
        dismissed: the update that was interrupted restarts them. An engine that does not connect is
        left to the next update.
        """
        if self._weights.engines_are_stuck:
            self._fail_stuck()
            await self._stop_failed()
            return
        if self._nodes.engines:  # the repair that follows connects all engines
            return
        try:
            self._engines.members.disconnected()
            await self._weights.connect()
            self._engines.members.connected()
        except SyncError as error:
            logger.warning("%s", error)

    async def over(self, generating: Awaitable[T]) -> T:
        """Return the result of ``generating``; health-check and repair engines until it ends.

        A repair that fails cancels it, and its error is raised, except after a stop request:
        ``generating`` polls for that itself and aborts its requests.
        """
        checking = asyncio.create_task(self._check_health())
        try:
            # A stop request ends the checks, and ``generating`` continues.
            result = await await_unless(generating, asyncio.shield(checking))
            async with self._busy:  # let a repair in progress finish: its engine is starting
                checking.cancel()
            await asyncio.wait([checking])
            if not checking.cancelled():
                checking.result()  # that repair has failed
            return result
        finally:
            await cancel_all([checking])

    async def _check_health(self) -> None:
        """Check and repair until a stop is requested. Raises the error of a repair that fails."""
        try:
            while not self._stop.requested():
                await self._until_check()
                await self._check_once()
                self._check_at = asyncio.get_running_loop().time() + self._interval_s
        except Exception as error:
            if not self._stop.requested():
                raise
            logger.warning("a stop is requested; the engines are not repaired: %s", error)

    async def _until_check(self) -> None:
        """Wait until a check is due, or a node is lost. Time before this batch counts, too."""
        now = asyncio.get_running_loop().time()
        if self._check_at is None:
            self._check_at = now + self._interval_s
        if self._check_at > now:
            await self._nodes.wait(self._check_at - now, may_repair=not self._shares_gpus)

    async def _check_once(self) -> None:
        async with self._busy:
            self._check_others(self.num_serving)
            sick = await self._sick()
            lost = self._nodes.engines
            must_wait = self._shares_gpus or bool(self._nodes.ranks)
            self._fail(sick, phase="generate", cause=NO_ANSWER)
            if (lost or self._engines.members.needs_repair) and not must_wait:
                await self._repair_unless_ranks_are_lost()
                return
            await self.leave_lost()
            await self._stop_failed()
            if self._engines.addresses and not self.num_serving:
                self._report_that_none_serves()

    def _report_that_none_serves(self) -> None:
        """Raise EngineDied, unless engines are restarted once the ranks of a lost node are back."""
        if self._nodes.ranks and not self._shares_gpus:
            logger.warning("no engine serves until the ranks of the lost node run again")
            return
        remedy = "see the last lines of engine-*.log in the attempt's folder"
        if self._shares_gpus:
            remedy = (
                "with --colocate engines restart only at the next weight update, which needs a "
                f"batch; {remedy}"
            )
        raise EngineDied(f"no engine is left: {remedy}")

    async def _sick(self) -> list[int]:
        """Return engines that do not answer; empty after a node loss, whose engines are known."""
        if self._nodes.engines:
            return []
        try:
            return await self._nodes.unless_lost(self._engines.unhealthy(generating=True))
        except NodeLost:
            return []

    def _fail(self, engines: Iterable[int], *, phase: Phase, cause: str) -> None:
        """Record that engines have failed; those that are down are not recorded again."""
        self._engines.members.failed(self._report(engines, phase, cause))

    def _report(self, engines: Iterable[int], phase: Phase, cause: str) -> list[int]:
        """Record the loss of those of these engines that are not down; return them."""
        lost = sorted({*engines} - {*self._engines.members.down})
        self._events.lost(lost, phase=phase, cause=cause)
        return lost

    def _fail_stuck(self) -> None:
        """Record that engines are blocked in an abandoned broadcast: its members alone are.

        Call it before the next ``connect``, which begins with none abandoned.
        """
        if self._weights.engines_are_stuck:
            logger.warning("restarting all engines of the broadcast: those that answer are blocked")
            members = self._engines.members
            members.blocked(self._report(members.connections, "sync", STUCK))

    async def _stop_failed(self) -> None:
        """Stop engines that have failed; they start at the next repair or update."""
        action = self._engines.members.next_action(may_start=False)
        if isinstance(action, Stop):
            await for_each(self._engines.dismiss, action.engines)

    async def _repair_unless_ranks_are_lost(self) -> None:
        """Repair while engines generate; leave it if ranks are lost, until they are back."""
        mode = self._engines.pause_mode
        try:
            async with self._weights_onloaded():
                await self._repair(pause=mode, before=_nothing, ready=_nothing)
        except TrainerDied as error:
            if not self._nodes.ranks:
                raise
            logger.warning("engines wait for the trainer: %s", error)

    async def _repair(self, *, pause: PauseMode, before: Hook, ready: Hook) -> None:
        """Act until all engines serve with the same weights; again if a node is lost meanwhile.

        Raises EngineDied when the restarts of an engine do not help.
        """
        while True:
            num_lost = self._nodes.num_lost
            try:
                await self._nodes.unless_lost(self._act(pause, before, ready))
                break
            except (Preempted, TrainerDied):
                raise
            except RlpostError as error:
                if not await self._stop.unless_requested(self._nodes.another(than=num_lost)):
                    raise
                logger.warning("the repair begins again: %s", error)
                await self.leave_lost()
                self._fail_stuck()  # a lost node cancels ``_send``, which does not see its error
        await self._nodes.back("engines")

    async def _act(self, pause: PauseMode, before: Hook, ready: Hook) -> None:
        """Carry out the decisions, until there is nothing to do."""
        members = self._engines.members
        if self._nodes.engines:
            await self._replace_lost()
        while (action := members.next_action()) is not None:
            match action:
                case GiveUp(engine=index, problem=problem):
                    raise EngineDied(problem or _no_more_restarts(self._engines.name(index)))
                case Stop(engines=failed):
                    await for_each(self._engines.dismiss, failed)
                case Start(engines=down):
                    await self._start(down)
                case SendWeights():
                    await self._send(action, pause, before, ready)
                case Admit():
                    await self._admit(action)

    async def _replace_lost(self) -> None:
        """Move engines of lost nodes to the replacements, without a start. Raises TrainerDied."""
        await self.leave_lost()
        self._nodes.check_ranks()
        placement = await self._stop.unless_requested(self._nodes.wait_for_replacements())
        await self._engines.move(placement)
        self._weights.move(placement)

    async def _start(self, down: Sequence[int]) -> None:
        if self._shares_gpus:
            await self._before_start()
        # ``together``: a start that raises must not leave others behind, which a repair starts again.
        await self._stop.unless_requested(together([self._start_one(index) for index in down]))

    async def _start_one(self, index: int) -> None:
        """Restart an engine. That its process ends by itself is recorded, not raised.

        The state of a machine at one moment, such as too little memory, must not end the attempt.
        """
        try:
            await self._engines.restart(index)
        except EngineDied as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling() > 0:
                raise
            # The agents may notice later that the replacement of a lost node is lost, too.
            if self._nodes.engines and await self._nodes.another(than=self._nodes.num_lost):
                raise
            logger.warning("its start is tried again: %s", error)
            self._engines.members.started(index, str(error))

    async def _send(self, action: SendWeights, pause: PauseMode, before: Hook, ready: Hook) -> None:
        """Send the weights. A failure that engines explain is recorded. Raises SyncError."""
        members = self._engines.members
        await before()  # stops engines that do not release their memory
        if members.down:
            self._events.lost(members.down, phase="sync", cause=NO_ANSWER)
            return
        try:
            if action.connect:
                members.disconnected()
                await self._weights.connect()
                members.connected()
            await self._weights.update(action.version, pause=pause, ready=ready)
        except SyncError as error:
            sick = await self._engines.unhealthy(generating=False)
            if not (sick or members.down or self._weights.engines_are_stuck):
                raise
            logger.warning("%s", error)
            self._fail(sick, phase="sync", cause=str(error))
            self._events.lost(members.down, phase="sync", cause=NO_ANSWER)
            self._fail_stuck()
            return
        members.sent(action.version)

    async def _admit(self, action: Admit) -> None:
        members = self._engines.members
        version = members.version
        try:
            await self._engines.admit(action.engines)
        except EngineDied as error:
            sick = await self._engines.unhealthy(generating=False)
            if not sick:
                raise
            self._fail(sick, phase="sync", cause=str(error))
            return
        self._events.back(action.restarted, version=version)
        if action.restarted:
            number = counted(len(action.restarted), "engine")
            logger.info("%s restarted, at policy version %d", number, version)


def _no_more_restarts(name: str) -> str:
    return (
        f"{name} died or hung again after {MAX_RESTARTS} restarts since the last trained batch, or since the "
        f"last evaluation of --eval-engines; see the end of {name}-server.log in the attempt's folder. If it is "
        "killed for memory, lower --sglang-mem-fraction-static; if a pass is too long, --sglang-chunked-prefill-size"
    )


async def _nothing() -> None:
    pass
