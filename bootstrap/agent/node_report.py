"""The report with which a node joins its head.

Input: the facts that the node has read before, the connection to the head. Output: the report, with
what depends on the connection: interface, network settings, ports in use, time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace

from bootstrap.agent.rendezvous import NodeReport, installed_versions
from bootstrap.links.identity import Facts
from bootstrap.links.link import Link
from bootstrap.network.detect import Detection
from bootstrap.network.here import NetworkError, ifname_of, local_addresses
from bootstrap.network.network_facts import NetworkFacts
from bootstrap.preflight.comparison import network_row
from bootstrap.preflight.table import HostFacts
from common.port_blocks import PortBlock, busy_ports

ReadNetwork = Callable[[str, str], tuple[NetworkFacts, Detection]]
"""Interface, address -> facts and settings of this node's network."""


def node_report(
    facts: Facts, num_gpus: int, link: Link, host_facts: HostFacts, read_network: ReadNetwork
) -> NodeReport:
    """Make the report for a connection just established.

    An address on no interface is the node's problem; its row in the comparison is then empty.
    """
    versions, ifname, row = installed_versions(), "", {}
    problem, conflicts = host_facts.problem, host_facts.network_conflicts
    try:
        ifname = ifname_of(link.local_ip, local_addresses())
        network, detection = read_network(ifname, link.local_ip)
        row, conflicts = network_row(network, detection, versions), detection.conflict_lines
    except NetworkError as error:
        problem = str(error)
    reported = replace(
        host_facts,
        # the head listens on the block's first port
        taken_ports=tuple(busy_ports(PortBlock(link.peer_port).service_ports)),
        problem=problem,
        network_conflicts=conflicts,
        clock=time.time(),
    )
    return NodeReport(
        facts.host, facts.rank, num_gpus, versions, link.local_ip, ifname, asdict(reported), row
    )
