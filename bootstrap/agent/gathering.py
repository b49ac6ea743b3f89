"""Track which hosts of the allocation have joined and pass preflight; select those of the cluster.

Input: nodes as they join and leave, and their reports. Output: the hosts of the cluster, one
preflight table in the log, and ``preflight.json``. Invariant: once selected, the hosts of a cluster
change only by ``replace``, which puts a spare into the place of a lost host.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from bootstrap.agent.options import Options
from bootstrap.agent.ray_command import temp_dir
from bootstrap.agent.rendezvous import BringupError, NodeReport, Reception, installed_versions
from bootstrap.agent.verdict import Word
from bootstrap.check_result import Check, level_of
from bootstrap.links.awaiting import first_of
from bootstrap.links.identity import Facts
from bootstrap.preflight.bandwidth import Survey
from bootstrap.preflight.checks import check_bandwidth, check_host, compare_hosts
from bootstrap.preflight.probe import CANARY_DIR, read_host
from bootstrap.preflight.shared_folder import ANSWER, FolderTest
from bootstrap.preflight.table import HeadObservations, HostFacts, Preflight, Requirements
from common.attempt import PREFLIGHT_JSON
from common.files import write_atomic
from common.units import first_names

logger = logging.getLogger(__name__)

ReadHost = Callable[[Facts, Options], Coroutine[Any, Any, HostFacts]]

REPORT_S = 30.0
_CANARY_S = 5.0
_CANARY_POLL_S = 0.05


class Gathering:
    """The head's list of hosts, from the first join to the selection."""

    def __init__(
        self,
        facts: Facts,
        options: Options,
        reception: Reception,
        *,
        read_host: ReadHost | None = None,
    ) -> None:
        """``read_host``: reads the facts of this host; by default ``read_this_host``."""
        self._facts = facts
        self._read_host = read_host or read_this_host
        self._options = options
        self._reception = reception
        self._wanted = Requirements(
            options.num_gpus, options.object_store_memory, options.share_gpus
        )
        # conflicts of this host's network; None while no other node has connected
        self.own_conflicts: tuple[str, ...] | None = None
        self._num_needed = options.num_nodes or len(facts.hosts) - options.spare_nodes
        self._fit: set[str] = {facts.host}
        self._absent: dict[str, str] = {}
        self._changed = asyncio.Event()
        self._first = asyncio.Event()
        self._own: asyncio.Task[HostFacts] | None = None
        self._survey = Survey()
        self._folder_test = FolderTest()
        self.used: tuple[str, ...] = ()
        self._spares: list[str] = []  # fit, joined and not used; in order of topology

    def begin(self) -> None:
        """Start preflight of the head's own host while the others join.

        Raises:
            BringupError: more spares than nodes.
        """
        if self._num_needed < 1:
            cause = f"--spare-nodes {self._options.spare_nodes} of {len(self._facts.hosts)} nodes leaves none"
            raise BringupError(cause, verdict="config")
        self._own = asyncio.create_task(self._read_host(self._facts, self._options))

    def record_node(self, report: NodeReport) -> None:
        """Record a node that has joined, with its report."""
        if level_of(check_host(_host_facts(report), self._wanted)) != "EXCLUDE_NODE":
            self._fit.add(report.host)
        self._changed.set()
        self._first.set()

    def dispatch(self, host: str, message: Mapping[str, object]) -> None:
        """Dispatch a node's message; answers to the head's requests are recorded."""
        if message["kind"] == "measured":
            self._survey.record_answer(host, message)
        elif message["kind"] == ANSWER:
            self._folder_test.record_answer(host, message)

    def record_loss(self, host: str, why: str) -> bool:
        """Record the loss of a node; return whether the cluster can run without it."""
        if self.used:
            if host in self._spares:
                self._spares.remove(host)
            return host not in self.used
        self._absent[host] = why
        self._fit.discard(host)
        self._changed.set()
        return len(self._facts.hosts) - len(self._absent) >= self._num_needed

    async def wait_for_first(self) -> None:
        """Wait until another node has joined or enough nodes are present."""
        enough = asyncio.create_task(self.wait())
        first = asyncio.create_task(self._first.wait())
        await first_of(enough, first)
        enough.cancel()
        first.cancel()

    async def is_own_host_fit(self) -> bool:
        """Whether Ray may start early on this host; ``choose`` reports why not."""
        assert self._own is not None
        return level_of(check_host(await self._own, self._wanted)) != "EXCLUDE_NODE"

    async def wait(self) -> None:
        """Wait for all nodes; with spares, for enough fit ones and ``spare_wait_s`` more."""
        if not self._options.spare_nodes:
            await self._reception.complete.wait()
        while not self._reception.complete.is_set():
            if len(self._fit) >= self._num_needed:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wait_for_the_rest(), self._options.spare_wait_s)
                return
            self._changed.clear()
            await self._changed.wait()

    async def report_missing(self) -> None:
        """Log which nodes have not joined, every REPORT_S until all have."""
        await asyncio.sleep(REPORT_S)
        while not self.used and (missing := self._reception.missing()):
            num_hosts = len(self._facts.hosts)
            joined, named = num_hosts - len(missing), first_names(missing)
            logger.info("waiting for %s (%d of %d joined)", named, joined, num_hosts)
            await asyncio.sleep(REPORT_S)

    async def _wait_for_the_rest(self) -> None:
        """Wait until every host has joined or is known to be lost."""
        while any(host not in self._absent for host in self._reception.missing()):
            self._changed.clear()
            await self._changed.wait()

    async def choose(self, head_ip: str) -> None:
        """Check every host that has joined and select ``used``.

        Raises:
            BringupError: too few hosts are fit, or no host can satisfy the request.
        """
        preflight = await self.judge(head_ip, ask_nodes=True)
        # In a thread: a stalled shared file system must not stop the heartbeats.
        await asyncio.to_thread(
            write_atomic, self._options.attempt_dir / PREFLIGHT_JSON, preflight.to_json()
        )
        logger.info("preflight\n%s", preflight.table())
        absent, can_requeue = self._absent_hosts(), self._facts.in_slurm
        hosts = await self._in_topology_order()
        self.used = choose_hosts(
            hosts, self._num_needed, preflight, absent, can_requeue=can_requeue
        )
        bad = {**preflight.unfit, **absent}
        self._spares = [host for host in hosts if host not in {*bad, *self.used}]
        for host, why in bad.items():
            logger.warning("%s is replaced by a spare node: %s", host, why)

    async def _in_topology_order(self) -> tuple[str, ...]:
        assert self._own is not None
        paths = {self._facts.host: (await self._own).topology}
        for report in self._reception.reports.values():
            paths[report.host] = _host_facts(report).topology
        return by_topology(self._facts.hosts, paths)

    @property
    def spares(self) -> tuple[str, ...]:
        """Hosts that joined, are fit and not used, in order of topology."""
        return tuple(self._spares)

    def take_spare(self, host: str) -> None:
        """Remove a spare from the list, whether or not it then joins Ray."""
        self._spares.remove(host)

    def replace(self, lost: str, host: str) -> None:
        """Put ``host`` in the place of ``lost`` in the cluster."""
        self.used = tuple(host if used == lost else used for used in self.used)

    async def judge(self, head_ip: str, *, ask_nodes: bool = False) -> Preflight:
        """Run every check on every host that has joined, and list the absent hosts.

        ``head_ip``: the address at which the others reached this host. ``ask_nodes``: include them
        in the test of the run folder.
        """
        facts, attempt_dir = self._facts, self._options.attempt_dir
        assert self._own is not None
        read = {facts.host: replace(await self._own, network_conflicts=self.own_conflicts)}
        reports = self._reception.reports
        read |= {reports[rank].host: _host_facts(reports[rank]) for rank in sorted(reports)}
        canaries = await asyncio.to_thread(
            _wait_for_canaries, attempt_dir, [host_facts.canary for host_facts in read.values()]
        )
        arrived_at = {reports[rank].host: at for rank, at in self._reception.joined_at.items()}
        via = {report.host: f"{report.ip} ({report.ifname})" for report in reports.values()}
        checks = {host: [*compared] for host, compared in compare_hosts(read).items()}
        for host, host_facts in read.items():
            skew = None
            if host in arrived_at and host_facts.clock is not None:
                skew = host_facts.clock - arrived_at[host]
            canary_seen = None if host_facts.canary is None else host_facts.canary in canaries
            seen = HeadObservations(skew, head_ip, canary_seen, via.get(host, ""))
            checks[host] = [*check_host(host_facts, self._wanted, seen), *checks.get(host, ())]
        absent = self._absent_hosts()
        fit = [
            host for host in read if level_of(checks[host]) != "EXCLUDE_NODE" and host not in absent
        ]
        if ask_nodes:
            for host, check in (await self._try_folder(fit)).items():
                checks[host].append(check)
        for host, check in (await self._measure(fit)).items():
            checks[host].append(check)
        return Preflight.of({host: checks[host] for host in read}, absent)

    def _absent_hosts(self) -> dict[str, str]:
        return {host: "it did not join" for host in self._reception.missing()} | self._absent

    async def _try_folder(self, hosts: Sequence[str]) -> dict[str, Check]:
        """Test the run folder on the hosts that are fit so far, concurrently."""
        reports = [report for report in self._reception.reports.values() if report.host in hosts]
        links = {report.host: self._reception.links[report.rank] for report in reports}
        if not links:
            return {}
        return await self._folder_test.run(self._options.attempt_dir, links, self._facts.host)

    async def _measure(self, hosts: Sequence[str]) -> dict[str, Check]:
        """Measure bandwidth between the hosts that are fit so far, if a threshold is set."""
        wanted = self._options.bandwidth_gbps
        if wanted is None or len(hosts) < 2 or hosts[0] != self._facts.host:
            return {}
        reports = self._reception.reports.values()
        links = {report.host: self._reception.links[report.rank] for report in reports}
        log = self._options.attempt_dir / f"bandwidth-{hosts[0]}.log"
        return check_bandwidth(
            await self._survey.run(hosts, links, self._options.num_gpus, log), wanted
        )


async def read_this_host(facts: Facts, options: Options) -> HostFacts:
    """Read the preflight facts of the host that this agent runs on."""
    # Cache the versions on a cold file system now: the report is due within 10 s of the hello.
    await asyncio.to_thread(installed_versions)
    ray_folder = Path(temp_dir(facts)).parent
    host_facts = await asyncio.to_thread(
        read_host,
        options.attempt_dir,
        ray_folder,
        facts.head_host,
        os.environ,
        options.needed_paths,
        sandboxes=options.sandboxes,
    )
    return replace(host_facts, topology=topology_path(os.environ))


def _host_facts(report: NodeReport) -> HostFacts:
    try:
        return HostFacts.from_json(report.host_facts)
    except TypeError as error:
        return HostFacts(problem=f"its agent uses another version of preflight ({error})")


def _wait_for_canaries(attempt_dir: Path, names: Sequence[str | None]) -> set[str]:
    """The ``names`` visible here, after at most ``_CANARY_S`` seconds."""
    folder, wanted = attempt_dir / CANARY_DIR, {name for name in names if name is not None}
    deadline = time.monotonic() + _CANARY_S
    while True:
        try:
            seen = set(os.listdir(folder)) & wanted
        except OSError:
            seen = set()
        if seen == wanted or time.monotonic() > deadline:
            shutil.rmtree(folder, ignore_errors=True)
            return seen
        time.sleep(_CANARY_POLL_S)


Levels = tuple[str, ...]
"""Names of the levels above a host, the outermost first: ``("s0", "s1")``, or ``("block1",)``."""


def topology_path(environ: Mapping[str, str]) -> Levels:
    """Levels above this host; empty where Slurm has no topology (man srun, SLURM_TOPOLOGY_ADDR).

    The address ends in the host's name, and its pattern (``switch.switch.node``) says how many
    levels come before it, because a host name may contain dots.
    """
    levels = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").count(".")
    return tuple(environ.get("SLURM_TOPOLOGY_ADDR", "").split(".", levels)[:levels])


def by_topology(hosts: Sequence[str], paths: Mapping[str, Levels]) -> tuple[str, ...]:
    """Order hosts so that those with a common prefix of their paths are neighbours.

    Ranks fill nodes in this order, so tensor and expert groups cross a block only where they must.
    The first host stays first, because the head cannot be replaced. Prefixes follow each other as
    in ``hosts``, and so do hosts of equal path. A host without a path has not joined: it is taken
    to be beside its predecessor in ``hosts``, where a spare then takes its place.
    """
    first_with: dict[Levels, int] = {(): 0}
    assumed: dict[str, Levels] = {}
    path: Levels = ()
    for index, host in enumerate(hosts):
        path = assumed[host] = paths.get(host) or path
        for level in range(1, len(path) + 1):
            first_with.setdefault(path[:level], index)

    def position(host: str) -> tuple[int, ...]:
        if host == hosts[0]:
            return (-1,)
        path = assumed[host]
        return tuple(first_with[path[:level]] for level in range(len(path) + 1))

    return tuple(sorted(hosts, key=position))


def choose_hosts(
    hosts: Sequence[str],
    num_needed: int,
    preflight: Preflight,
    absent: Mapping[str, str],
    *,
    can_requeue: bool,
) -> tuple[str, ...]:
    """Return the first ``num_needed`` hosts, with a later fit host in the place of each bad one.

    The fit hosts keep their places, as when a spare replaces a node in the middle of a run. Moving
    them up instead would shift every later rank, and groups of ranks across blocks.

    The head runs the driver, and all nodes connect to its address, so an attempt cannot replace it.

    Args:
        absent: hosts that did not join or were lost, each with the reason.
        can_requeue: false outside Slurm, where nothing restarts the attempt on other hosts.

    Raises:
        BringupError: no host can run the job (verdict config), or too few hosts are fit (verdict
            requeue, with the unfit hosts excluded).
    """
    if preflight.fatal is not None:
        raise BringupError(preflight.fatal, verdict="config")
    bad = {**preflight.unfit, **absent}
    fit = tuple(host for host in hosts if host not in bad)
    if hosts[0] not in bad and len(fit) >= num_needed:
        spares = iter([host for host in hosts[num_needed:] if host not in bad])
        return tuple(next(spares) if host in bad else host for host in hosts[:num_needed])
    verdict: Word = "requeue" if can_requeue else "failed"
    listed = "\n".join(f"{host}: {reason}" for host, reason in bad.items())
    cause = f"{len(fit)} of {len(hosts)} nodes are fit, {num_needed} are needed (the head among them):\n{listed}"
    raise BringupError(cause, verdict=verdict, exclude=tuple(bad))
