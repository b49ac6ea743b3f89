"""Run the doctor on several nodes at once, with the rendezvous of a run, and compare them in one table.

Input: facts of the step, the run's requirements, a folder that all nodes share. Output: on the first node, the
preflight of all hosts and a comparison of their networks; the others print only if the first node cannot. Ray is not
started, and no file stays in the folder. Every wait has a deadline, and missing hosts are named.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import starmap
from pathlib import Path

from bootstrap.agent.gathering import Gathering, read_this_host
from bootstrap.agent.identity import Facts
from bootstrap.agent.link import Link, LinkLost
from bootstrap.agent.options import Options
from bootstrap.agent.ports import PortBlock, busy_ports, candidate_blocks, claim_block, ephemeral_floor, host_port
from bootstrap.agent.rendezvous import (
    HEAD_FILE,
    NodeReport,
    Reception,
    head_candidates,
    head_document,
    installed_versions,
    join,
    odd_versions,
)
from bootstrap.check import Check
from bootstrap.network.here import NetworkError, ifname_of, local_addresses, network_here, reachable_addresses
from bootstrap.preflight.comparison import comparison_table, network_row
from bootstrap.preflight.table import HostFacts, Preflight
from common.attempt import SECRET_FILE
from common.files import write_atomic, write_first

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_SECRET_CHARS = 64


class NobodyCame(Exception):
    """This node and the first one did not find each other; says what was waited for."""


@dataclass(frozen=True, slots=True)
class Examination:
    """What the first node found out."""

    preflight: Preflight
    networks: Mapping[str, Mapping[str, str]]  # rows of the comparison, by host

    def table(self) -> str:
        """For people: hosts by checks, what is not OK, and the networks and versions with the odd ones marked."""
        return f"{self.preflight.table()}\n\n{comparison_table(self.networks)}"

    def to_json(self) -> str:
        """The preflight's document with the rows of the comparison as ``network``."""
        rows = {host: dict(row) for host, row in self.networks.items()}
        return json.dumps({**json.loads(self.preflight.to_json()), "network": rows}, indent=1) + "\n"


def meeting_folder(folder: Path, facts: Facts, step: str) -> Path:
    """Where the nodes of one step meet; another step of the same job has another folder."""
    return folder / f".doctor-{facts.job_id}.{step}"


async def examine_all(facts: Facts, options: Options, wait_s: float) -> Examination | None:
    """Look at all nodes of this step; None on every node but the first, which speaks for them.

    ``options.attempt_dir`` is the meeting folder.

    Raises:
        NobodyCame: on a node that the first one did not meet within ``wait_s``.
    """
    return await (_as_first if facts.is_head else _as_other)(facts, options, wait_s)


async def _as_first(facts: Facts, options: Options, wait_s: float) -> Examination:
    folder = options.attempt_dir
    folder.mkdir(parents=True, mode=0o700, exist_ok=True)
    try:
        write_first(folder / SECRET_FILE, secrets.token_hex(_SECRET_CHARS // 2) + "\n")
        secret = (folder / SECRET_FILE).read_text().strip().encode()
        reception = Reception(secret, facts.hosts, lambda report, link: gathering.joined(report))
        gathering = Gathering(facts, options, reception)
        ports, claim = claim_block(facts.job_id, ephemeral_floor(), "")
        with claim:
            gathering.begin()
            await reception.open(claim)
            published = reachable_addresses(local_addresses())
            write_atomic(folder / HEAD_FILE, head_document(ports.rendezvous, published))
            try:
                await asyncio.wait_for(reception.complete.wait(), wait_s)
            except TimeoutError:
                logger.warning("%s did not come within %.0f s", ", ".join(reception.missing()), wait_s)
            own, gathering.own_conflicts = _own_report(facts, options, reception)
            reports = [own, *(report for _, report in sorted(reception.reports.items()))]
            preflight = with_versions(await gathering.judge(own.ip if reception.links else ""), reports)
            for link in reception.links.values():
                await _say_goodbye(link)
            reception.close()
        return Examination(preflight, {report.host: report.network for report in reports})
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _as_other(facts: Facts, options: Options, wait_s: float) -> None:
    folder = options.attempt_dir
    deadline = time.monotonic() + wait_s
    while len(secret := _read(folder / SECRET_FILE)) < _SECRET_CHARS:
        if time.monotonic() > deadline:
            raise NobodyCame(f"{folder}, made by {facts.head_host}, is not seen from {facts.host}: is it shared?")
        await asyncio.sleep(_POLL_S)
    host_facts = await read_this_host(facts, options)
    port = next(candidate_blocks(facts.job_id, ephemeral_floor())).rendezvous
    joining = join(
        lambda link: _report(facts, options, link, host_facts),
        secret=secret.encode(),
        candidates=lambda: head_candidates(facts.head_host, port, folder / HEAD_FILE),
    )
    try:
        link = await asyncio.wait_for(joining, max(1.0, deadline - time.monotonic()))
    except TimeoutError:
        tried = ", ".join(starmap(host_port, head_candidates(facts.head_host, port, folder / HEAD_FILE)))
        raise NobodyCame(f"{facts.host} did not reach {facts.head_host} within {wait_s:.0f} s ({tried})") from None
    try:
        await link.receive()  # the link itself notices a silence
    except LinkLost as error:
        raise NobodyCame(f"{facts.head_host} went without a word: {error}") from error
    finally:
        link.close()


def with_versions(preflight: Preflight, reports: Sequence[NodeReport]) -> Preflight:
    """The same with one more check: whether each host has what most have installed. A run would not start otherwise."""
    odd = odd_versions(reports)
    checks = {
        report.host: (
            *preflight.checks[report.host],
            Check("versions", "EXCLUDE_NODE", "; ".join(odd[report.host]) + ": use one environment or image everywhere")
            if report.host in odd
            else Check("versions", "OK", "as elsewhere"),
        )
        for report in reports
    }
    return Preflight({host: checks.get(host, found) for host, found in preflight.checks.items()})


def _own_report(facts: Facts, options: Options, reception: Reception) -> tuple[NodeReport, tuple[str, ...] | None]:
    """Contradictions of the first node, seen from where the others reached it; None if none did."""
    links: Sequence[Link] = tuple(reception.links.values())
    ip, ifname = (links[0].local_ip, ifname_of(links[0].local_ip, local_addresses())) if links else ("", "")
    network, found = network_here(ifname, ip) if links else (None, None)
    row = {} if network is None or found is None else network_row(network, found, installed_versions())
    report = NodeReport(facts.host, 0, options.num_gpus, installed_versions(), ip, ifname, network=row)
    return report, None if found is None else found.conflict_lines


def _report(facts: Facts, options: Options, link: Link, host_facts: HostFacts) -> NodeReport:
    versions, ifname, problem, row = installed_versions(), "", host_facts.problem, {}
    conflicts: tuple[str, ...] | None = None
    try:
        ifname = ifname_of(link.local_ip, local_addresses())
        network, found = network_here(ifname, link.local_ip)
        row, conflicts = network_row(network, found, versions), found.conflict_lines
    except NetworkError as error:
        problem = str(error)
    taken = tuple(busy_ports(PortBlock(link.peer_port).service_ports))
    said = replace(host_facts, taken_ports=taken, problem=problem, network_conflicts=conflicts, clock=time.time())
    return NodeReport(
        facts.host, facts.rank, options.num_gpus, versions, link.local_ip, ifname, asdict(said), network=row
    )


async def _say_goodbye(link: Link) -> None:
    try:
        await link.send({"kind": "end"})
    except LinkLost as error:
        logger.warning("%s", error)
    link.close()


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
