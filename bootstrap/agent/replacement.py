"""Replace a node that is lost in the middle of a run by a spare of the allocation.

Input: losses, the spares that have joined, the driver's list of hosts that it can lose. Output: a
spare's node in Ray, and ``lost_nodes.json`` for the driver; or the loss, when the attempt has to
end as it would without spares. ``choose_spare`` is pure.

    lost -> joining (a spare starts Ray) -> replaced
                 |        ^ the spare fails: the next one
                 +-> given up: no spare is left, or the driver cannot continue without the node

A lost node must not end the run with a verdict: it is ordered to end if it can be reached, and
reads the list before it writes a verdict (``node``). Each loss consumes at least one spare, so the
number of spares bounds the work of this module.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from bootstrap.agent.gathering import Gathering
from bootstrap.agent.local_ray import LocalRay, RayError
from bootstrap.agent.rendezvous import BringupError, NodeReport, Reception, check_versions
from bootstrap.agent.verdict import HostLoss
from bootstrap.links.awaiting import first_of
from bootstrap.links.link import LinkLost
from common.attempt import EXCLUDE_FILE
from common.cluster import Cluster
from common.files import write_atomic
from common.lost_nodes import LostNode, State, read_replaceable, write_lost_nodes
from common.message_codec import Message

logger = logging.getLogger(__name__)

JOIN_S = 30.0
"""Deadline of a spare to be registered in Ray; its process has imported Ray already."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The spare that takes the place of a lost node; None if the attempt has to end, and why."""

    spare: str | None
    why: str = ""


def choose_spare(host: str, spares: Sequence[str], replaceable: Collection[str]) -> Decision:
    """Decide what happens when ``host`` is lost; ``replaceable``: hosts that may be lost."""
    if host not in replaceable:
        return Decision(None, f"the driver cannot continue without {host}")
    if not spares:
        return Decision(None, "no spare node is left")
    return Decision(spares[0])


class Replacements:
    """The lost nodes of one attempt. Does nothing until ``begin``."""

    def __init__(
        self,
        attempt_dir: Path,
        gathering: Gathering,
        reception: Reception,
        *,
        give_up: Callable[[HostLoss], None],
    ) -> None:
        """``give_up`` ends the attempt because of a loss."""
        self._attempt_dir = attempt_dir
        self._gathering = gathering
        self._reception = reception
        self._give_up = give_up
        self.set_driver_cluster: Callable[[Cluster], None] = lambda _: None
        """Called with the new cluster after each replacement."""
        self._cluster: Cluster | None = None  # and the next three: set by ``begin``
        self._own: NodeReport
        self._ray: LocalRay
        self._order: Message
        self._lost: dict[str, LostNode] = {}
        self._excluded: list[str] = []
        self._failed_spares: dict[str, asyncio.Future[str]] = {}  # those that are joining
        self._running: dict[str, asyncio.Task[None]] = {}
        self._causes: dict[str, HostLoss] = {}
        self._writing = asyncio.Lock()
        self._write: asyncio.Task[None] | None = None  # the latest; a thread cannot be cancelled

    def begin(self, cluster: Cluster, own: NodeReport, ray: LocalRay, order: Message) -> None:
        """The cluster is up: losses from now on can be replaced.

        ``own`` is the head's report, ``order`` the one that starts Ray on another node.
        """
        self._cluster, self._own, self._ray, self._order = cluster, own, ray, order

    @property
    def excluded(self) -> tuple[str, ...]:
        """Replaced hosts that the next attempt must not use."""
        return tuple(self._excluded)

    @property
    def unsettled(self) -> HostLoss | None:
        """A loss that is being replaced at this moment."""
        return next((self._causes[host] for host in self._running), None)

    def take(self, host: str, loss: HostLoss) -> bool:
        """Start to replace ``host``; return False if the attempt has to end instead."""
        if host in self._running:
            return True
        if self._cluster is None or not self._gathering.spares:
            return False
        self._causes[host] = loss
        self._running[host] = asyncio.create_task(self._replace(host, loss))
        self._running[host].add_done_callback(lambda _: self._running.pop(host))
        return True

    def give_up_spare(self, host: str, cause: str) -> None:
        """A spare is lost; if it was joining, the next one is tried."""
        failed = self._failed_spares.get(host)
        if failed is not None and not failed.done():
            failed.set_result(cause)

    async def end(self) -> None:
        """Cancel pending replacements, because the attempt ends.

        When this returns, no write is in flight that could replace the files of the verdict.
        """
        for task in self._running.values():
            task.cancel()
        if self._write is not None:
            await asyncio.wait([self._write])

    async def _replace(self, host: str, loss: HostLoss) -> None:
        try:
            await self._replace_or_give_up(host, loss)
        except OSError as error:
            logger.error("%s cannot be replaced: %s", host, error)
            self._give_up(loss)
        except Exception:
            logger.exception("%s cannot be replaced", host)
            self._give_up(loss)

    async def _replace_or_give_up(self, host: str, loss: HostLoss) -> None:
        assert self._cluster is not None
        began = time.monotonic()
        node = next(node for node in self._cluster.nodes if node.host == host)
        lost = LostNode(host, node.ip, loss.cause, time.time())
        replaceable = await asyncio.to_thread(read_replaceable, self._attempt_dir)
        while (decision := choose_spare(host, self._gathering.spares, replaceable)).spare:
            self._gathering.take_spare(decision.spare)
            logger.warning("%s; the spare node %s joins", loss.cause, decision.spare)
            await self._record(lost, "joining", loss)
            await self._end_agent(host)
            problem = await self._join(decision.spare)
            if problem is None:
                spare = self._report(decision.spare).node
                self._cluster = self._cluster.with_replacement(host, spare)
                self._gathering.replace(host, decision.spare)
                self.set_driver_cluster(self._cluster)
                await self._record(replace(lost, replacement=spare), "replaced", loss)
                seconds = time.monotonic() - began
                logger.info("%s replaces %s after %.1f s", decision.spare, host, seconds)
                return
            logger.error("the spare node %s did not join: %s", decision.spare, problem)
        logger.warning("%s is not replaced: %s", host, decision.why)
        if host in self._lost:
            await self._record(lost, "given up", loss)
        self._give_up(replace(loss, cause=f"{loss.cause}; {decision.why}"))

    async def _join(self, spare: str) -> str | None:
        """Start Ray on a spare; return None when it is registered, else the problem."""
        failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._failed_spares[spare] = failed
        report = self._report(spare)
        joining = asyncio.create_task(self._start_ray(report))
        try:
            await first_of(joining, failed, timeout_s=JOIN_S)
            if failed.done():
                return failed.result()
            if not joining.done():
                return f"Ray was not registered within {JOIN_S:.0f} s"
            joining.result()
        except (LinkLost, RayError, BringupError) as error:
            return str(error)
        finally:
            joining.cancel()
            del self._failed_spares[spare]
        return None

    async def _start_ray(self, report: NodeReport) -> None:
        check_versions([self._own, report])
        await self._reception.links[report.rank].send(self._order)
        await self._ray.wait_registered({report.ip: report.num_gpus})

    async def _end_agent(self, host: str) -> None:
        """End the agent of a lost node, if it can be reached."""
        link = self._reception.links[self._report(host).rank]
        with suppress(LinkLost, TimeoutError):
            await asyncio.wait_for(link.send({"kind": "end", "keep_logs": True}), 1.0)
        link.close()

    async def _record(self, lost: LostNode, state: State, loss: HostLoss) -> None:
        """Write the list for the driver, and the hosts that the next attempt excludes."""
        self._lost[lost.host] = replace(lost, state=state)
        new = [host for host in loss.exclude if host not in self._excluded]
        self._excluded += new
        async with self._writing:  # two nodes may be lost at the same time
            excluded = self._excluded if new else ()
            write = asyncio.to_thread(
                _write_record, self._attempt_dir, [*self._lost.values()], [*excluded]
            )
            self._write = asyncio.create_task(write)
            await asyncio.shield(self._write)

    def _report(self, host: str) -> NodeReport:
        return next(each for each in self._reception.reports.values() if each.host == host)


def _write_record(attempt_dir: Path, lost: Sequence[LostNode], excluded: Sequence[str]) -> None:
    write_lost_nodes(attempt_dir, lost)
    if excluded:
        write_atomic(attempt_dir / EXCLUDE_FILE, "".join(f"{host}\n" for host in excluded))
