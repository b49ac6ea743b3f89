"""Node agent, on every node but the head: join, run Ray, report to the head, end on its order.

Input: facts, options, the secret. Output: messages to the head, which writes the verdict. A node
writes the verdict only if it loses the head without an order to end, so that the batch script and
the user see the cause. A spare node never does, because the head may continue without it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from bootstrap.agent.disks import DiskFull, places_of, until_full
from bootstrap.agent.early_exits import describe, read_failed_tasks
from bootstrap.agent.gathering import read_this_host
from bootstrap.agent.local_ray import LocalRay, RayError
from bootstrap.agent.node_report import node_report
from bootstrap.agent.options import Options
from bootstrap.agent.ray_command import (
    RayNode,
    base_environment,
    network_environment,
    ray_environment,
    temp_dir,
)
from bootstrap.agent.rendezvous import (
    HEAD_FILE,
    BringupError,
    head_candidates,
    join,
)
from bootstrap.links.awaiting import first_of
from bootstrap.links.identity import Facts
from bootstrap.links.link import SILENCE_S, Link, LinkLost
from bootstrap.links.monitor import StopSignals
from bootstrap.links.session_folder import SessionFolder, make_session_folder
from bootstrap.network.detect import Detection
from bootstrap.network.here import (
    NetworkError,
    ifname_of,
    ip_of,
    local_addresses,
    log_network_here,
)
from bootstrap.network.network_facts import NetworkFacts
from bootstrap.preflight.bandwidth import measure_here
from bootstrap.preflight.shared_folder import ORDER, take_part
from common.addresses import host_port
from common.attempt import EXCLUDE_FILE, SECRET_FILE, VERDICT_FILE, VERDICT_JSON
from common.files import write_atomic, write_first
from common.lost_nodes import read_lost_nodes
from common.message_codec import Message
from common.port_blocks import PortBlock, candidate_blocks, ephemeral_floor

logger = logging.getLogger(__name__)

_MAX_CAUSE_CHARS = 8_000
# The network is polled more often; a thousand nodes would overload a shared file system.
_SHARED_FOLDER_POLL_S = 0.25
# Both ends of a broken connection notice it within ``link.SILENCE_S``, the head perhaps last.
_HEAD_DECIDES_S = SILENCE_S + 5.0


class NodeAgent:
    """Runs one attempt on a node other than the head."""

    def __init__(self, facts: Facts, options: Options, secret: bytes, stop: StopSignals) -> None:
        self._facts = facts
        self._options = options
        self._secret = secret
        self._stop = stop
        self._environ = base_environment(os.environ, facts, options.attempt_dir / SECRET_FILE)
        self._session: SessionFolder | None = None
        self._ray: LocalRay | None = None
        self._head_addresses: list[tuple[str, int]] = []
        self._refresh_at = 0.0
        self._fabric: dict[str, str] = {}  # variables for the RDMA ports of this node
        self._keep_logs = True  # of Ray, unless the head's order says otherwise
        self._is_needed = not options.spare_nodes  # with spares: set by the order to start Ray

    async def run(self) -> None:
        """Run until the head orders the end.

        Raises:
            BringupError: the head was not found before the deadline.
        """
        link = None
        try:
            link = await self._join()
            if link is not None:
                await self._serve(link)
        except LinkLost as error:
            cause = f"{self._facts.host} lost the head {self._facts.head_host}: {error}"
            logger.error("%s", cause)
            # the batch script treats a verdict as the end of the attempt
            if self._is_needed and not await self._is_replaced(error):
                self._leave_verdict(cause)
        finally:
            if self._ray is not None:
                logs = self._options.attempt_dir / f"ray-{self._facts.host}"
                await self._ray.end(logs if self._keep_logs else None)
            if link is not None:
                link.close()

    async def _is_replaced(self, loss: LinkLost) -> bool:
        """Whether the head is alive and has let a spare replace this node.

        If the connection is broken, each side may consider the other one lost.
        """
        if not self._options.spare_nodes:
            return False
        deadline = time.monotonic() + (_HEAD_DECIDES_S if loss.node_is_bad else 0.0)
        while True:
            lost = await asyncio.to_thread(read_lost_nodes, self._options.attempt_dir)
            if any(node.host == self._facts.host for node in lost):
                logger.info("the head is alive; a spare node replaces this one")
                return True
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(_SHARED_FOLDER_POLL_S)

    def _leave_verdict(self, cause: str) -> None:
        attempt_dir = self._options.attempt_dir
        if write_first(
            attempt_dir / VERDICT_JSON, json.dumps({"verdict": "failed", "cause": cause})
        ):
            write_first(attempt_dir / VERDICT_FILE, "failed\n")

    async def _join(self) -> Link | None:
        """Connect to the head; None if a stop was requested first."""
        facts, options = self._facts, self._options
        preparing = asyncio.create_task(self._prepare_ray())
        logger.info("reading this host")  # the last line if that hangs, e.g. on a dead mount
        host_facts = await read_this_host(facts, options)
        source_ip = None
        try:
            source_ip = (
                ip_of(options.socket_ifname, local_addresses()) if options.socket_ifname else None
            )
            await preparing
        except (NetworkError, RayError) as error:  # report it to the head over any interface
            host_facts = replace(host_facts, problem=str(error))
        logger.info("looking for the head %s", facts.head_host)
        joining = asyncio.create_task(
            join(
                lambda link: node_report(
                    facts, options.num_gpus, link, host_facts, self._read_network
                ),
                secret=self._secret,
                candidates=self._candidates,
                source_ip=source_ip,
            )
        )
        stopped = asyncio.create_task(self._stop.requested.wait())
        await first_of(joining, stopped, timeout_s=options.bringup_deadline_s)
        if joining.done():
            return joining.result()
        joining.cancel()
        if stopped.done():
            return None
        tried = ", ".join(host_port(host, port) for host, port in self._candidates())
        raise BringupError(
            f"{facts.host} did not find the head {facts.head_host} within {options.bringup_deadline_s:.0f} s "
            f"(tried {tried}); is port {tried.partition(',')[0]} open between the nodes?"
        )

    async def _prepare_ray(self) -> None:
        log = self._options.attempt_dir / f"ray-{self._facts.host}.log"
        self._session = make_session_folder(temp_dir(self._facts), os.environ)
        self._environ |= self._session.environment
        self._ray = await LocalRay.prepare(self._session, ray_environment(self._environ), log)

    def _read_network(self, ifname: str, ip: str) -> tuple[NetworkFacts, Detection]:
        """Read this node's network; keeps the variables for Ray."""
        facts, found = log_network_here(ifname, ip)
        self._fabric = found.rdma_env
        return facts, found

    def _candidates(self) -> Sequence[tuple[str, int]]:
        """Addresses to try for the head, refreshed every ``_SHARED_FOLDER_POLL_S`` seconds."""
        attempt_dir, now = self._options.attempt_dir, time.monotonic()
        if now >= self._refresh_at:
            self._refresh_at = now + _SHARED_FOLDER_POLL_S
            # os.path.exists, unlike Path.exists, does not raise on a lost mount.
            if os.path.exists(attempt_dir / VERDICT_FILE):
                raise BringupError(
                    f"the attempt has ended already; see {attempt_dir / VERDICT_JSON}"
                )
            self._check_head_began()
            first = next(candidate_blocks(self._facts.job_id, ephemeral_floor()))
            self._head_addresses = head_candidates(
                self._facts.head_host, first.rendezvous, attempt_dir / HEAD_FILE
            )
        return self._head_addresses

    def _check_head_began(self) -> None:
        """Write the verdict for a head whose task failed before its agent started.

        Raises:
            BringupError: the head's task has failed, so there is no head to connect to.
        """
        attempt_dir, head = self._options.attempt_dir, self._facts.head_host
        how = read_failed_tasks(attempt_dir, self._facts.hosts).get(head)
        if how is None or os.path.exists(attempt_dir / VERDICT_FILE):
            return
        cause = describe(head, how, attempt_dir)
        write_atomic(attempt_dir / EXCLUDE_FILE, f"{head}\n")
        self._leave_verdict(cause)
        raise BringupError(cause)

    async def _serve(self, link: Link) -> None:
        order = await self._next_order(link)
        if order["kind"] == ORDER:
            await link.send(
                await asyncio.to_thread(
                    take_part, self._options.attempt_dir, order, self._facts.host
                )
            )
            order = await self._next_order(link)
        if order["kind"] == "measure":
            log = self._options.attempt_dir / f"bandwidth-{self._facts.host}.log"
            await link.send(await measure_here(order, link.local_ip, self._options.num_gpus, log))
            order = await self._next_order(link)
        if order["kind"] == "end":
            return
        self._is_needed = True
        life = asyncio.create_task(
            self._run_ray(link, head_ip=order["head_ip"], port_base=order["port_base"])
        )
        end_order = asyncio.create_task(self._next_order(link))
        await first_of(life, end_order)
        if not end_order.done():
            error = life.exception()
            logger.error("%s", error)
            bad = isinstance(error, DiskFull) and error.node_is_bad
            await link.send(
                {"kind": "lost", "cause": str(error)[:_MAX_CAUSE_CHARS], "node_is_bad": bad}
            )
        life.cancel()
        await end_order

    async def _next_order(self, link: Link) -> Message:
        order = await link.receive()
        self._keep_logs = order.get("keep_logs", True)
        return order

    async def _run_ray(self, link: Link, *, head_ip: str, port_base: int) -> NoReturn:
        """Start Ray; raise when it exits or when its disk on this node is full."""
        options = self._options
        assert self._session is not None
        node = RayNode(
            ip=link.local_ip,
            head_ip=head_ip,
            ports=PortBlock(port_base),
            temp_dir=str(self._session.path),
            num_cpus=len(os.sched_getaffinity(0)),
            num_gpus=options.num_gpus,
            object_store_memory=options.object_store_memory,
        )
        ifname = ifname_of(node.ip, local_addresses())
        assert self._ray is not None, "a node without a Ray process is not selected"
        self._ray.start(node, network_environment(self._environ, node, ifname, self._fabric))
        full = asyncio.create_task(until_full(places_of(Path(node.temp_dir), None)))
        try:
            await first_of(self._ray.kept.exited, full)
        finally:
            full.cancel()
        raise full.result() if full.done() else RayError(await self._ray.last_words())
