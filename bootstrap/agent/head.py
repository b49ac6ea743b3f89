"""Head agent: bring up the Ray cluster, run and monitor the driver, write the verdict.

Input: facts, options, the secret, the stop request. Output: one ``Cluster`` line on the driver's
standard input, ``verdict.json`` and ``verdict``.

Invariants: the driver and all Ray processes are started first, so that their imports overlap with
the bring-up. The driver receives its line only when every node and GPU is registered in Ray; if the
bring-up fails it receives an end of file without a line. A driver that crashes is started again
(``driver_process``). The verdict is written before anything is torn down.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from bootstrap.agent.disks import places_of, until_full
from bootstrap.agent.driver_process import DriverProcess
from bootstrap.agent.early_exits import failures_before_joining
from bootstrap.agent.gathering import Gathering
from bootstrap.agent.local_ray import LocalRay, RayError
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
    NodeReport,
    Reception,
    check_versions,
    describe_missing,
    head_document,
    installed_versions,
)
from bootstrap.agent.replacement import Replacements
from bootstrap.agent.verdict import AttemptOutcome, AttemptVerdict, HostLoss, decide, write_verdict
from bootstrap.links.awaiting import all_or_first_error, first_of, look_at_error
from bootstrap.links.identity import Facts
from bootstrap.links.link import Link, LinkLost
from bootstrap.links.monitor import StopSignals
from bootstrap.links.session_folder import SessionFolder, make_session_folder
from bootstrap.network.here import (
    LOOPBACK_IFNAME,
    LOOPBACK_IP,
    NetworkError,
    ifname_of,
    ip_of,
    local_addresses,
    log_network_here,
)
from bootstrap.network.host import read_host
from bootstrap.network.sockets import published_addresses
from bootstrap.preflight.comparison import comparison_table, network_row
from common.addresses import host_port
from common.attempt import CAUSE_FILE, DRIVER_LOG, SECRET_FILE
from common.cluster import Cluster
from common.exit_codes import EXIT_CONFIG, EXIT_DONE, EXIT_PREEMPTED
from common.files import tail, text_or_empty, write_atomic
from common.message_codec import Message
from common.port_blocks import PortBlock, PortError, claim_block, ephemeral_floor
from common.units import counted

logger = logging.getLogger(__name__)

_DRIVER_END_GRACE_S = 10.0
_NODES_END_S = 30.0
# The driver often detects a lost node (through a Ray exception) before the head agent does.
_LOSS_MAY_FOLLOW_S = 3.0
_DELIBERATE_EXITS = (EXIT_DONE, EXIT_PREEMPTED, EXIT_CONFIG)


class HeadAgent:
    """Runs one attempt on its first node."""

    def __init__(
        self,
        facts: Facts,
        options: Options,
        secret: bytes,
        stop: StopSignals,
    ) -> None:
        self._facts = facts
        self._options = options
        self._stop = stop
        self._environ = base_environment(os.environ, facts, options.attempt_dir / SECRET_FILE)
        self._reception = Reception(secret, facts.hosts, self._on_joined)
        loop = asyncio.get_running_loop()
        self._lost: asyncio.Future[HostLoss] = loop.create_future()
        self._stopped_before_loss = False
        self._gathering = Gathering(facts, options, self._reception)
        self._replacements = Replacements(
            options.attempt_dir, self._gathering, self._reception, give_up=self._lose
        )
        self._following: list[asyncio.Task[None]] = []
        self._watching: list[asyncio.Task[None]] = []  # Ray and the disks of this node
        self._ending = False
        self._claim: socket.socket | None = None
        self._session: SessionFolder | None = None
        self._ray: LocalRay | None = None

    async def run(self) -> AttemptVerdict:
        """Run the attempt to its end; the verdict is on disk when this returns."""
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        bringup = asyncio.create_task(self._bring_up())
        launching = asyncio.create_task(self._watch_launch())
        reporting = asyncio.create_task(self._gathering.report_missing())
        self._session = make_session_folder(temp_dir(self._facts), os.environ)
        self._environ |= self._session.environment
        driver = await DriverProcess.start(
            self._options, self._environ, is_ending=self._is_attempt_ending
        )
        try:
            outcome = await self._outcome_of_bringup(driver, bringup)
            if outcome is None:
                logger.info("the cluster is up after %.1f s", loop.time() - started_at)
                self._replacements.set_driver_cluster = driver.set_cluster
                driver.hand_over(bringup.result())
                outcome = await self._outcome_of_run(driver)
            else:
                driver.close_input()
            self._ending = True  # no loss starts a replacement while the verdict is written
            await self._replacements.end()
            verdict = self._with_excluded(decide(outcome))
            for task in self._watching:
                task.cancel()
            if self._watching:
                await asyncio.wait(self._watching)  # frees the reserved disk space for the verdict
            # A hanging file system must not stop the heartbeats: nodes would report this host lost.
            await asyncio.to_thread(write_verdict, self._options.attempt_dir, verdict)
            logger.info("verdict: %s (%s)", verdict.verdict, verdict.cause)
        finally:
            self._ending = True
            launching.cancel()
            reporting.cancel()
            bringup.cancel()
            await asyncio.wait([bringup])
        await self._tear_down(driver, keep_logs=verdict.verdict == "failed")
        return verdict

    def _is_attempt_ending(self) -> bool:
        return self._ending or self._lost.done() or self._stop.requested.is_set()

    async def _outcome_of_bringup(
        self, driver: DriverProcess, bringup: asyncio.Task[Cluster]
    ) -> AttemptOutcome | None:
        """Outcome of a failed bring-up; None once the driver can have the cluster."""
        stopped = asyncio.create_task(self._stop.requested.wait())
        await first_of(bringup, driver.exited, self._lost, stopped)
        stopped.cancel()
        if driver.exited.done():
            return await self._outcome_of_driver(driver)
        if self._lost.done():
            loss = self._lost.result()
            return AttemptOutcome(bringup_error=loss.cause, exclude=loss.exclude)
        if bringup.done():
            error = bringup.exception()
            if error is None:
                return None
            if isinstance(error, BringupError):
                return AttemptOutcome(
                    bringup_error=str(error), bringup_verdict=error.verdict, exclude=error.exclude
                )
            if not isinstance(error, (LinkLost, RayError, NetworkError, PortError, OSError)):
                logger.error("bring-up failed", exc_info=error)
            return AttemptOutcome(bringup_error=str(error) or repr(error))
        # Nothing has started, so there is nothing to save.
        return AttemptOutcome(stop_requested=True, was_up=False)

    async def _outcome_of_run(self, driver: DriverProcess) -> AttemptOutcome:
        stopped = asyncio.create_task(self._stop.requested.wait())
        await first_of(driver.exited, self._lost, stopped)
        if not driver.exited.done() and not self._lost.done():
            patience_s = await self._stop.seconds_for_the_driver(self._options.stop_grace_s)
            logger.info("a stop was requested; the driver has %.0f s", patience_s)
            await first_of(driver.exited, self._lost, timeout_s=patience_s)
        stopped.cancel()
        if driver.exited.done() and driver.exited.result() not in _DELIBERATE_EXITS:
            await first_of(self._lost, timeout_s=_LOSS_MAY_FOLLOW_S)
        if self._lost.done() and not driver.exited.done():
            cause = self._lost.result().cause
            logger.error("%s; the driver has %.0f s", cause, self._options.loss_grace_s)
            await self._stop.write(cause, within_s=self._options.loss_grace_s)
            await first_of(driver.exited, timeout_s=self._options.loss_grace_s)
        return await self._outcome_of_driver(driver)

    def _with_excluded(self, verdict: AttemptVerdict) -> AttemptVerdict:
        """The verdict, with the hosts that spares have replaced."""
        excluded = dict.fromkeys((*self._replacements.excluded, *verdict.exclude))
        return replace(verdict, exclude=tuple(excluded))

    async def _outcome_of_driver(self, driver: DriverProcess) -> AttemptOutcome:
        loss, is_stopped = self._replacements.unsettled, self._stop.requested.is_set()
        if self._lost.done():
            loss, is_stopped = self._lost.result(), self._stopped_before_loss
        code = driver.exited.result() if driver.exited.done() else None
        attempt_dir = self._options.attempt_dir
        return AttemptOutcome(
            driver_code=code,
            driver_tail=await asyncio.to_thread(tail, attempt_dir / DRIVER_LOG),
            driver_cause=await asyncio.to_thread(text_or_empty, attempt_dir / CAUSE_FILE),
            lost=loss.cause if loss else None,
            exclude=loss.exclude if loss else (),
            stop_requested=is_stopped,
        )

    async def _bring_up(self) -> Cluster:
        deadline = asyncio.timeout(self._options.bringup_deadline_s)
        try:
            async with deadline:
                self._gathering.begin()
                # The bound socket reserves the block of ports for the whole attempt.
                ports, self._claim = claim_block(
                    self._facts.job_id, ephemeral_floor(), self._bind_ip()
                )
                preparing = asyncio.create_task(self._prepare_ray())
                # on an unfit host preflight reports the problem
                preparing.add_done_callback(look_at_error)
                await self._listen_for_nodes(ports)
                own_report, environ = await self._report_own_node()
                starting = self._start_ray(own_report, ports, environ, preparing)
                reports, _ = await all_or_first_error(self._admit(own_report), starting)
                order = {"kind": "start_ray", "head_ip": own_report.ip, "port_base": ports.base}
                await self._start_others(reports, order)
        except TimeoutError:
            if not deadline.expired():  # a shared file system can raise it too (ETIMEDOUT)
                raise
            raise await self._too_late() from None
        job_ports = ports.job_ports
        cluster = Cluster(
            host_port(reports[0].ip, ports.gcs),
            str(self._options.attempt_dir),
            tuple(report.node for report in reports),
            job_ports.start,
            len(job_ports),
        )
        assert self._ray is not None
        self._replacements.begin(cluster, own_report, self._ray, order)
        return cluster

    async def _prepare_ray(self) -> None:
        log = self._options.attempt_dir / f"ray-{self._facts.host}.log"
        assert self._session is not None
        self._ray = await LocalRay.prepare(self._session, ray_environment(self._environ), log)

    def _bind_ip(self) -> str:
        """Address to listen on; a single node uses the loopback interface by default."""
        ifname = self._options.socket_ifname
        alone = len(self._facts.hosts) == 1
        if ifname == LOOPBACK_IFNAME or (alone and not ifname):
            return LOOPBACK_IP
        # The interface that reaches the nodes is unknown until they connect.
        return ip_of(ifname, local_addresses()) if ifname else ""

    async def _listen_for_nodes(self, ports: PortBlock) -> None:
        """Listen for the other nodes, if any, and publish the addresses."""
        if len(self._facts.hosts) == 1:
            return
        assert self._claim is not None
        await self._reception.open(self._claim)
        ifname = self._options.socket_ifname
        published = published_addresses(read_host(), local_addresses(), ifname)
        path = self._options.attempt_dir / HEAD_FILE
        await asyncio.to_thread(write_atomic, path, head_document(ports.rendezvous, published))

    async def _report_own_node(self) -> tuple[NodeReport, dict[str, str]]:
        """Report of the head and its network variables, once the first node has connected."""
        facts, options = self._facts, self._options
        # slow on a cold file system; heartbeats continue
        await asyncio.to_thread(installed_versions)
        ip, ifname = self._bind_ip() or LOOPBACK_IP, options.socket_ifname or LOOPBACK_IFNAME
        if len(facts.hosts) > 1:
            await self._gathering.wait_for_first()
        if self._reception.links:  # all others may be spares that never joined
            ip = _only_local_ip(self._reception.links.values())
            ifname = ifname_of(ip, local_addresses())
        network, detection = log_network_here(ifname, ip)
        self._gathering.own_conflicts = detection.conflict_lines if self._reception.links else None
        row = network_row(network, detection, installed_versions())
        own_report = NodeReport(
            facts.host, 0, options.num_gpus, installed_versions(), ip, ifname, network=row
        )
        # Test the address, because on a routed fabric the loopback interface holds a routable one.
        # A node alone needs no fabric, and NCCL would fail where it asks for an absent plug-in.
        is_alone = not self._reception.links or ipaddress.ip_address(ip).is_loopback
        return own_report, {} if is_alone else detection.rdma_env

    async def _admit(self, own: NodeReport) -> list[NodeReport]:
        """Reports of the selected nodes, in order of topology, once enough have joined."""
        await self._gathering.wait()
        links = self._reception.links
        if links:
            _only_local_ip(links.values())
        await self._gathering.choose(own.ip if links else "")
        by_host = {report.host: report for report in [own, *self._reception.reports.values()]}
        reports = [by_host[host] for host in self._gathering.used]
        logger.info(
            "nodes\n%s", comparison_table({report.host: report.network for report in reports})
        )
        check_versions(reports)
        return reports

    async def _start_ray(
        self,
        own_report: NodeReport,
        ports: PortBlock,
        fabric: dict[str, str],
        preparing: asyncio.Task[None],
    ) -> None:
        """Start Ray on this node; returns when other nodes can join it."""
        if not await self._gathering.is_own_host_fit():
            return  # Gathering.choose ends the attempt and reports the reason
        await preparing
        assert self._session is not None
        options = self._options
        node = RayNode(
            ip=own_report.ip,
            head_ip=own_report.ip,
            ports=ports,
            temp_dir=str(self._session.path),
            num_cpus=len(os.sched_getaffinity(0)),
            num_gpus=options.num_gpus,
            object_store_memory=options.object_store_memory,
            dashboard_host=options.ray_dashboard_host,
        )
        assert self._ray is not None
        self._ray.start(node, network_environment(self._environ, node, own_report.ifname, fabric))
        await self._ray.wait_registered({own_report.ip: own_report.num_gpus})
        logger.info("Ray is up on this node")
        watches = (self._watch_ray(self._ray), self._watch_disks(Path(node.temp_dir)))
        self._watching = [asyncio.create_task(watch) for watch in watches]

    async def _start_others(self, reports: Sequence[NodeReport], order: Message) -> None:
        """Start Ray on the other nodes; returns when every node and GPU is registered."""
        await asyncio.gather(
            *(self._reception.links[report.rank].send(order) for report in reports[1:])
        )
        assert self._ray is not None
        await self._ray.wait_registered({report.ip: report.num_gpus for report in reports})
        if not self._gathering.spares:
            self._ray.stop_watching()

    async def _watch_ray(self, ray: LocalRay) -> None:
        await asyncio.wait([ray.kept.exited])
        self._lose(HostLoss(f"{self._facts.host}: {await ray.last_words()}"))

    async def _watch_disks(self, ray_folder: Path) -> None:
        full = await until_full(places_of(ray_folder, self._options.attempt_dir))
        self._lose(
            HostLoss(f"{self._facts.host}: {full}", (self._facts.host,) if full.node_is_bad else ())
        )

    async def _watch_launch(self) -> None:
        """Report or drop the nodes whose task failed before their agent joined."""
        causes: dict[str, str] = {}
        attempt_dir, hosts = self._options.attempt_dir, self._facts.hosts
        async for failed in failures_before_joining(attempt_dir, hosts, self._reception.missing):
            causes |= failed
            needed = [
                host
                for host, cause in failed.items()
                if not self._gathering.record_loss(host, cause)
            ]
            for host in failed.keys() - set(needed):
                logger.warning("%s; the run continues without it", failed[host])
            if needed:
                self._lose(HostLoss("\n".join(causes.values()), self._suspected(causes)))

    def _on_joined(self, report: NodeReport, link: Link) -> None:
        self._gathering.record_node(report)
        self._following.append(asyncio.create_task(self._follow(report, link)))

    async def _follow(self, report: NodeReport, link: Link) -> None:
        """Receive a node's messages until its connection ends."""
        try:
            while True:
                message = await link.receive()
                self._gathering.dispatch(report.host, message)
                if message["kind"] == "lost":
                    exclude = (report.host,) if message.get("node_is_bad") else ()
                    loss = HostLoss(f"{report.host}: {message['cause']}", exclude)
                    self._on_node_end(report.host, loss)
        except LinkLost as error:
            cause = f"{report.host} is gone: {error}"
            self._on_node_end(
                report.host, HostLoss(cause, (report.host,) if error.node_is_bad else ())
            )

    def _on_node_end(self, host: str, loss: HostLoss) -> None:
        self._replacements.give_up_spare(host, loss.cause)
        if self._gathering.record_loss(host, loss.cause):
            logger.info("%s; the run continues without it", loss.cause)
        elif (
            self._ending or self._stop.requested.is_set() or not self._replacements.take(host, loss)
        ):
            self._lose(loss)

    def _lose(self, loss: HostLoss) -> None:
        if not self._ending and not self._lost.done():
            self._stopped_before_loss = self._stop.requested.is_set()
            self._lost.set_result(loss)

    def _suspected(self, hosts: Collection[str]) -> tuple[str, ...]:
        """The hosts to exclude of those that did not join.

        If they are all but the head, suspect the head or its port rather than each of them.
        """
        all_others = len(hosts) > 1 and len(hosts) == len(self._facts.hosts) - 1
        return () if all_others else tuple(hosts)

    async def _too_late(self) -> BringupError:
        """Error that names the hosts that delayed the bring-up, with their last lines."""
        within = f"within {self._options.bringup_deadline_s:.0f} s"
        attempt_dir = self._options.attempt_dir
        if missing := self._reception.missing():
            logs = await asyncio.to_thread(describe_missing, missing, attempt_dir, "agent-HOST.log")
            cause = f"{', '.join(missing)} of {counted(len(self._facts.hosts), 'node')} did not join {within}:\n{logs}"
            return BringupError(cause, exclude=self._suspected(missing))
        registered = self._ray.registered if self._ray is not None else {}
        reports = self._reception.reports.values()
        late = [
            it.host for it in reports if it.host in self._gathering.used and it.ip not in registered
        ]
        if not registered:  # no other node can start before the head
            late = [self._facts.host]
        if not late:
            return BringupError(
                f"all nodes joined and Ray is up on the head, but preflight did not finish {within}"
            )
        logs = await asyncio.to_thread(describe_missing, late, attempt_dir, "ray-HOST.log")
        return BringupError(f"Ray did not come up {within} on:\n{logs}")

    async def _tear_down(self, driver: DriverProcess, *, keep_logs: bool) -> None:
        for link in self._reception.links.values():
            with suppress(LinkLost):
                await link.send({"kind": "end", "keep_logs": keep_logs})
        await driver.end(_DRIVER_END_GRACE_S)  # before Ray, or it would log the loss of Ray
        if self._ray is not None:
            kept_logs = self._options.attempt_dir / f"ray-{self._facts.host}"
            await self._ray.end(kept_logs if keep_logs else None)
        elif self._session is not None:
            self._session.remove()
        if self._following:
            await asyncio.wait(self._following, timeout=_NODES_END_S)
        for link in self._reception.links.values():
            link.close()
        self._reception.close()
        if self._claim is not None:
            self._claim.close()


def _only_local_ip(links: Collection[Link]) -> str:
    """The head's address; all nodes must have connected to the same one."""
    reached = {link.local_ip: link.peer_ip for link in links}
    if len(reached) > 1:
        ways = ", ".join(f"{peer} reached {local}" for local, peer in reached.items())
        raise NetworkError(
            f"the nodes connected over different networks ({ways}); choose one with --socket-ifname"
        )
    return next(iter(reached))
