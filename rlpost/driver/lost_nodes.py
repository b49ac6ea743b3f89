"""Lost nodes of a run: follows the agents' list, and moves the placement to the replacements.

Input: ``lost_nodes.json`` of the attempt, which the head's agent writes. Output: the engines and
trainer ranks that ran on a lost node, the placement with replacements, a line in the ledger once
all of them run again. Without spare nodes the list is not followed, and every method returns at
once.

    lost -> engines get no more requests; a pass over ranks ends with TrainerDied
         -> ``wait_for_replacements``: the replacement has joined -> ranks start there (``trainer_recovery``)
         -> engines start there (``engine_health``), which needs ranks that answer -> recorded

The driver often sees a failure (an exception of Ray, an engine that does not answer) before the
agents know its cause: ``another`` and ``new_slots`` wait a bounded time for the list.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from common.bounded import await_unless, cancel_all
from common.cluster import Cluster, Node
from common.fleet_name import POLICY
from common.lost_nodes import LostNode, read_lost_nodes, write_replaceable
from rlpost.driver.decision import Death
from rlpost.driver.ledger_lines import RecordEvent, not_recorded
from rlpost.driver.placement import Offer, Placement, Slot, replaced
from rlpost.durable.daemon_threads import in_daemon
from rlpost.errors import PlacementError, SyncError, TrainerDied

logger = logging.getLogger(__name__)

T = TypeVar("T")
Part = str
"""``ENGINES`` of the policy, ``RANKS``, or the engines of a group (``part_of``)."""
ENGINES, RANKS = "engines", "ranks"

POLL_S = 0.2
MAY_FOLLOW_S = 15.0
"""How much later than the driver the agents may notice a loss: for a silent node they need 10 s."""
RANKS_MAY_FOLLOW_S = 2.0
"""The same if all ranks of a node died; Ray notices a silent node later than the agents do."""
REPLACED_S = 120.0
"""Deadline for the agents to replace a node or to end the attempt; several spares may fail."""


def part_of(group: str) -> Part:
    """Return the part of a node that the engines of a group are."""
    return ENGINES if group == POLICY else f"{ENGINES}.{group}"


class NodeLost(SyncError):
    """A node with engines was lost during an update or a repair of engines."""


@dataclass(frozen=True, slots=True)
class NodeLoss:
    """A lost node, and the numbers of the engines and ranks that had a part on it, by part."""

    node: LostNode
    parts: Mapping[Part, tuple[int, ...]]

    def concerns(self, part: Part) -> bool:
        """Whether the loss interrupts work on these engines: those of the policy need the ranks."""
        return part in self.parts or (part == ENGINES and RANKS in self.parts)


class LostNodes:
    """Lost nodes of a run. Call ``begin`` once there is a placement."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        offer: Callable[[Node], Awaitable[Offer]],
        joined: Callable[[Node], None] | None = None,
        record: RecordEvent = not_recorded,
        poll_s: float = POLL_S,
    ) -> None:
        """
        Args:
            offer: returns the GPUs of a node that has joined Ray.
            joined: called with each node that takes the place of another.
        """
        self._folder = Path(cluster.attempt_dir)
        self._cluster = cluster
        self._offer, self._joined, self._record = offer, joined, record
        self._poll_s = poll_s
        self._placement: Placement | None = None
        self._keeps_ranks = True
        self._losses: dict[str, NodeLoss] = {}  # every loss of this attempt, by host
        self._unplaced: list[str] = []  # lost hosts that are not replaced yet
        self._away: dict[str, set[Part]] = {}  # by lost host, the parts that are not back yet
        self._changed = asyncio.Condition()
        self._settling = asyncio.Lock()
        self._following: asyncio.Task[None] | None = None

    @classmethod
    def none(cls) -> LostNodes:
        """Return an instance for a run without spare nodes, in which any loss ends the attempt."""

        async def offers_nothing(node: Node) -> Offer:
            raise PlacementError(f"{node.host} is not expected")

        return cls(Cluster("", "", (), 0, 0), offer=offers_nothing)

    async def begin(self, placement: Placement, *, ranks_recover: bool) -> None:
        """Follow the list, and tell the agents which nodes this run can lose.

        ``ranks_recover``: also those with trainer ranks.
        """
        self._placement, self._keeps_ranks = placement, not ranks_recover
        await self._write_replaceable()
        self._following = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Stop following."""
        if self._following is not None:
            await cancel_all([self._following])

    @property
    def engines(self) -> list[int]:
        """Engines with a part on a lost node, which are not back yet."""
        return self.away(ENGINES)

    @property
    def ranks(self) -> list[int]:
        """Trainer ranks on lost nodes, which are not back yet."""
        return self.away(RANKS)

    def away(self, part: Part) -> list[int]:
        """Return the numbers of a part that were on lost nodes and are not back yet."""
        lost = [self._losses[host] for host, parts in self._away.items() if part in parts]
        return sorted({each for loss in lost for each in loss.parts[part]})

    def of_group(self, group: str) -> LostNodes | GroupNodes:
        """Return the lost nodes as the engines of a group see them."""
        return self if group == POLICY else GroupNodes(self, group)

    async def wait(self, timeout_s: float, *, may_repair: bool, part: Part = ENGINES) -> None:
        """Wait until another node is lost, at most ``timeout_s`` seconds.

        ``may_repair``: also return when engines of an earlier loss can be restarted, as all ranks
        are back.
        """
        number = self.num_lost_with(part)

        def is_due() -> bool:
            waits_for_ranks = part == ENGINES and bool(self.ranks)
            can_repair = may_repair and bool(self.away(part)) and not waits_for_ranks
            return self.num_lost_with(part) > number or can_repair

        await self._happens(is_due, timeout_s)

    async def another(self, than: int, part: Part = ENGINES) -> bool:
        """Whether more nodes than ``than`` are lost now or within MAY_FOLLOW_S."""
        if self._following is None:
            return False
        return await self._happens(lambda: self.num_lost_with(part) > than, MAY_FOLLOW_S)

    @property
    def num_lost(self) -> int:
        """Number of nodes with engines of the policy or with ranks that are lost so far."""
        return self.num_lost_with(ENGINES)

    def num_lost_with(self, part: Part) -> int:
        """Return the number of lost nodes whose loss concerns a part."""
        return sum(loss.concerns(part) for loss in self._losses.values())

    async def unless_lost(self, work: Awaitable[T], part: Part = ENGINES) -> T:
        """Return the result of ``work``; cancel it when another node with engines is lost.

        Raises NodeLost then.
        """
        return await await_unless(work, self._raise_when_lost(self.num_lost_with(part), part))

    async def _raise_when_lost(self, number: int, part: Part) -> None:
        await self._until(lambda: self.num_lost_with(part) > number)
        raise NodeLost(f"lost with {part} {self.away(part)}: {self._causes}")

    async def unless_ranks_lost(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of ``work()``; cancel it when a node with trainer ranks is lost.

        Raises TrainerDied then, and if ranks are lost already.
        """
        self.check_ranks()
        return await await_unless(work(), self._raise_when_ranks_lost())

    async def _raise_when_ranks_lost(self) -> None:
        await self._until(lambda: bool(self.ranks))
        self.check_ranks()

    def check_ranks(self) -> None:
        """Raise TrainerDied while trainer ranks of a lost node are not back."""
        if self.ranks:
            raise TrainerDied(f"lost with ranks {self.ranks}: {self._causes}", self.ranks)

    async def new_slots(self, death: Death, placement: Placement) -> Placement:
        """Return where trainer ranks start after a death. Raises what ``wait_for_replacements`` raises."""
        if self._following is None:
            return placement
        dead = {placement.actors[rank].ip for rank in death.ranks}
        living = enumerate(placement.actors)
        living_on = {slot.ip for rank, slot in living if rank not in death.ranks}
        if dead - living_on and not self.ranks:
            await self._happens(lambda: bool(self.ranks), RANKS_MAY_FOLLOW_S)
        return await self.wait_for_replacements()

    async def wait_for_replacements(self) -> Placement:
        """Wait until every lost node is replaced; return the placement.

        Raises PlacementError when a replacement is too small, or the agents do not decide in time.
        """
        assert self._placement is not None
        async with self._settling:
            while self._unplaced:
                host = self._unplaced[0]
                node = await self._replacement_of(host)
                offer = await self._offer(node)
                self._placement = replaced(self._placement, self._losses[host].node.ip, offer)
                self._cluster = self._cluster.with_replacement(host, node)
                self._unplaced.remove(host)
                if self._joined is not None:
                    self._joined(node)
                logger.info("%s takes the place of %s, which is lost", node.host, host)
                await self._write_replaceable()
        return self._placement

    async def back(self, part: Part) -> None:
        """Record that all engines, or all ranks, run again; the ledger gets a node's last part."""
        async with self._changed:
            placed = [host for host in self._away if host not in self._unplaced]
            for host in placed:
                self._away[host].discard(part)
            whole = [host for host in placed if not self._away[host]]
            for host in whole:
                del self._away[host]
            self._changed.notify_all()
        for host in whole:
            self._record_replaced(self._losses[host].node)

    def _record_replaced(self, lost: LostNode) -> None:
        assert lost.replacement is not None
        seconds, new = round(time.time() - lost.lost_at, 3), lost.replacement.host
        logger.info("%s has replaced %s %.1f s after its loss", new, lost.host, seconds)
        # For goodput, the trainer's time is in the event of the trainer's recovery.
        what = {"role": "node", "phase": "generate", "cause": lost.cause, "seconds": seconds}
        self._record("recovered", host=lost.host, replacement=new, **what)

    async def _write_replaceable(self) -> None:
        """Tell the agents which nodes may be lost: all that the run uses except the driver's."""
        assert self._placement is not None
        with_ranks = {slot.ip for slot in self._placement.actors}
        used = {part.ip for parts in self._placement.all_engines for part in parts} | with_ranks
        if self._keeps_ranks:
            used -= with_ranks
        hosts = [node.host for node in self._cluster.nodes[1:] if node.ip in used]
        try:
            await in_daemon(lambda: write_replaceable(self._folder, hosts))
        except OSError as error:
            logger.warning("a lost node will end the attempt: %s", error)

    async def _replacement_of(self, host: str) -> Node:
        """Wait for the agents' decision. After giving up they ask the driver to stop."""
        try:
            async with asyncio.timeout(REPLACED_S), self._changed:
                while (node := self._losses[host].node.replacement) is None:
                    await self._changed.wait()
                return node
        except TimeoutError:
            cause = self._losses[host].node.cause
            raise PlacementError(
                f"{host} is not replaced within {REPLACED_S:.0f} s: {cause}"
            ) from None

    async def _happens(self, condition: Callable[[], bool], within_s: float) -> bool:
        try:
            await asyncio.wait_for(self._until(condition), within_s)
        except TimeoutError:
            return False
        return True

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(condition)

    @property
    def _causes(self) -> str:
        return "; ".join(self._losses[host].node.cause for host in self._away)

    async def _follow(self) -> None:
        while True:
            await self._take(await in_daemon(lambda: read_lost_nodes(self._folder)))
            await asyncio.sleep(self._poll_s)

    async def _take(self, lost: Sequence[LostNode]) -> None:
        """Record new losses and new states of earlier ones."""
        assert self._placement is not None
        for node in lost:
            known = self._losses.get(node.host)
            if known is not None and known.node == node:
                continue
            if known is None and all(each.host != node.host for each in self._cluster.nodes):
                continue  # replaced before this driver began
            async with self._changed:
                if known is None:
                    loss = self._loss(node)
                    self._away[node.host] = set(loss.parts)
                    self._unplaced.append(node.host)
                    logger.warning("%s is lost (%s)", node.host, node.cause)
                else:
                    loss = replace(known, node=node)
                self._losses[node.host] = loss
                self._changed.notify_all()

    def _loss(self, node: LostNode) -> NodeLoss:
        placement = self._placement
        assert placement is not None
        workers: dict[Part, Sequence[Sequence[Slot]]] = {
            ENGINES: placement.engines,
            RANKS: [[slot] for slot in placement.actors],
            **{part_of(name): engines for name, engines in placement.groups.items()},
        }
        on_node = {
            part: tuple(
                number for number, slots in enumerate(all_slots) if _has_slot(slots, node.ip)
            )
            for part, all_slots in workers.items()
        }
        return NodeLoss(node, {part: numbers for part, numbers in on_node.items() if numbers})


class GroupNodes:
    """Lost nodes as the engines of a group other than the policy's see them.

    The same interface as ``LostNodes`` has for the policy's engines; these wait for no ranks.
    """

    ranks: Sequence[int] = ()

    def __init__(self, nodes: LostNodes, group: str) -> None:
        self._nodes, self._group, self._part = nodes, group, part_of(group)

    @property
    def engines(self) -> list[int]:
        """Engines of the group with a part on a lost node, which are not back yet."""
        return self._nodes.away(self._part)

    @property
    def num_lost(self) -> int:
        """Number of nodes with engines of the group that are lost so far."""
        return self._nodes.num_lost_with(self._part)

    async def wait(self, timeout_s: float, *, may_repair: bool) -> None:
        await self._nodes.wait(timeout_s, may_repair=may_repair, part=self._part)

    async def another(self, than: int) -> bool:
        return await self._nodes.another(than, self._part)

    async def unless_lost(self, work: Awaitable[T]) -> T:
        return await self._nodes.unless_lost(work, self._part)

    def check_ranks(self) -> None:
        """Do nothing: the group needs no ranks."""

    async def wait_for_replacements(self) -> Placement:
        """Return the placement of the group; see ``LostNodes``."""
        return (await self._nodes.wait_for_replacements()).of_group(self._group)

    async def back(self, part: Part) -> None:
        """Record that all engines of the group run again."""
        await self._nodes.back(self._part if part == ENGINES else part)


def _has_slot(slots: Sequence[Slot], ip: str) -> bool:
    return any(slot.ip == ip for slot in slots)
