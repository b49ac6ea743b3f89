"""Run the doctor on several nodes, with the rendezvous of a run, and compare them.

Input: facts of the step, the run's requirements, a folder that all nodes share. Output: on the
first node, the preflight of all hosts and a comparison of their networks; the others print only if
the first node cannot. Ray is not started, and no file stays in the folder. Every wait has a
deadline, and missing hosts are named.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path

from bootstrap.agent.gathering import Gathering, read_this_host
from bootstrap.agent.node_report import node_report
from bootstrap.agent.options import Options
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
from bootstrap.check_result import Check
from bootstrap.links.identity import Facts
from bootstrap.links.link import Link, LinkLost
from bootstrap.network.here import ifname_of, local_addresses, network_here
from bootstrap.network.host import read_host
from bootstrap.network.sockets import published_addresses
from bootstrap.preflight.comparison import comparison_table, network_row
from bootstrap.preflight.table import Preflight
from common.addresses import host_port
from common.attempt import SECRET_FILE
from common.files import text_or_empty, write_atomic, write_first
from common.port_blocks import candidate_blocks, claim_block, ephemeral_floor

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_SECRET_CHARS = 64


class NoContactError(Exception):
    """This node and the first node of the step could not connect."""


@dataclass(frozen=True, slots=True)
class Examination:
    """Results of all nodes, on the first node."""

    preflight: Preflight
    networks: Mapping[str, Mapping[str, str]]  # rows of the comparison, by host

    def table(self) -> str:
        """Table of checks with details, and the comparison of networks and versions."""
        return f"{self.preflight.table()}\n\n{comparison_table(self.networks)}"

    def to_json(self) -> str:
        """The preflight's document with the rows of the comparison as ``network``."""
        rows = {host: dict(row) for host, row in self.networks.items()}
        return (
            json.dumps({**json.loads(self.preflight.to_json()), "network": rows}, indent=1) + "\n"
        )


def meeting_folder(folder: Path, facts: Facts, step: str) -> Path:
    """Shared folder of the nodes of one step; each step of a job has its own."""
    return folder / f".doctor-{facts.job_id}.{step}"


async def examine_all(facts: Facts, options: Options, wait_s: float) -> Examination | None:
    """Check all nodes of this step; the first node returns the result, the others None.

    ``options.attempt_dir`` is the meeting folder.

    Raises:
        NoContactError: this node could not connect to the first one within ``wait_s``.
    """
    return await (_as_first if facts.is_head else _as_other)(facts, options, wait_s)


async def _as_first(facts: Facts, options: Options, wait_s: float) -> Examination:
    folder = options.attempt_dir
    folder.mkdir(parents=True, mode=0o700, exist_ok=True)
    try:
        write_first(folder / SECRET_FILE, secrets.token_hex(_SECRET_CHARS // 2) + "\n")
        secret = (folder / SECRET_FILE).read_text().strip().encode()
        # Each needs the other: nodes are received after both exist.
        reception = Reception(
            secret, facts.hosts, lambda report, link: gathering.record_node(report)
        )
        gathering = Gathering(facts, options, reception)
        ports, claim = claim_block(facts.job_id, ephemeral_floor(), "")
        with claim:
            gathering.begin()
            await reception.open(claim)
            published = published_addresses(read_host(), local_addresses(), options.socket_ifname)
            write_atomic(folder / HEAD_FILE, head_document(ports.rendezvous, published))
            try:
                await asyncio.wait_for(reception.complete.wait(), wait_s)
            except TimeoutError:
                logger.warning(
                    "%s did not connect within %.0f s", ", ".join(reception.missing()), wait_s
                )
            own_report, gathering.own_conflicts = _own_report(facts, options, reception)
            reports = [own_report, *(report for _, report in sorted(reception.reports.items()))]
            preflight = with_versions(
                await gathering.judge(own_report.ip if reception.links else ""), reports
            )
            for link in reception.links.values():
                await _end_link(link)
            reception.close()
        return Examination(preflight, {report.host: report.network for report in reports})
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _as_other(facts: Facts, options: Options, wait_s: float) -> None:
    folder = options.attempt_dir
    deadline = time.monotonic() + wait_s
    while len(secret := text_or_empty(folder / SECRET_FILE)) < _SECRET_CHARS:
        if time.monotonic() > deadline:
            raise NoContactError(
                f"{folder}, made by {facts.head_host}, is not seen from {facts.host}: is it shared?"
            )
        await asyncio.sleep(_POLL_S)
    host_facts = await read_this_host(facts, options)
    port = next(candidate_blocks(facts.job_id, ephemeral_floor())).rendezvous
    joining = join(
        lambda link: node_report(facts, options.num_gpus, link, host_facts, network_here),
        secret=secret.encode(),
        candidates=lambda: head_candidates(facts.head_host, port, folder / HEAD_FILE),
    )
    try:
        link = await asyncio.wait_for(joining, max(1.0, deadline - time.monotonic()))
    except TimeoutError:
        tried = ", ".join(
            starmap(host_port, head_candidates(facts.head_host, port, folder / HEAD_FILE))
        )
        raise NoContactError(
            f"{facts.host} did not reach {facts.head_host} within {wait_s:.0f} s ({tried})"
        ) from None
    try:
        await link.receive()  # raises LinkLost after a silence
    except LinkLost as error:
        raise NoContactError(f"lost the connection to {facts.head_host}: {error}") from error
    finally:
        link.close()


def with_versions(preflight: Preflight, reports: Sequence[NodeReport]) -> Preflight:
    """Add a check that each host has the package versions of the majority."""
    odd = odd_versions(reports)
    checks = dict(preflight.checks)
    for report in reports:
        if report.host in odd:
            found = "; ".join(odd[report.host]) + ": use one environment or image everywhere"
            check = Check("versions", "EXCLUDE_NODE", found)
        else:
            check = Check("versions", "OK", "same as on the other hosts")
        checks[report.host] = (*checks[report.host], check)
    return Preflight(checks)


def _own_report(
    facts: Facts, options: Options, reception: Reception
) -> tuple[NodeReport, tuple[str, ...] | None]:
    """Report and network conflicts of the first node; None without a connection."""
    versions = installed_versions()
    links: Sequence[Link] = tuple(reception.links.values())
    if not links:
        return NodeReport(facts.host, 0, options.num_gpus, versions), None
    ip = links[0].local_ip
    ifname = ifname_of(ip, local_addresses())
    network, found = network_here(ifname, ip)
    row = network_row(network, found, versions)
    report = NodeReport(facts.host, 0, options.num_gpus, versions, ip, ifname, network=row)
    return report, found.conflict_lines


async def _end_link(link: Link) -> None:
    try:
        await link.send({"kind": "end"})
    except LinkLost as error:
        logger.warning("%s", error)
    link.close()
