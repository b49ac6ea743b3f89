"""The network side of many agents in one process: real messages, no host or Ray.

Input: the address of a head, the attempt's folder and secret. Output: messages to the head until it
ends each node. Instead of starting Ray, a simulated node sends one line to the head of
``tests/fakes/ray_stub``.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from bootstrap.agent.gathering import read_this_host
from bootstrap.agent.options import Options
from bootstrap.agent.rendezvous import HEAD_FILE, NodeReport, installed_versions, join
from bootstrap.links.identity import Facts
from bootstrap.links.link import Link, LinkLost
from bootstrap.network.here import LOOPBACK_IFNAME, LOOPBACK_IP, network_here
from bootstrap.preflight.comparison import network_row
from bootstrap.preflight.gpus import GpuReading
from bootstrap.preflight.shared_folder import ORDER, take_part
from bootstrap.preflight.table import HostFacts

HEAD_S = 60.0


def host_names(num_nodes: int) -> tuple[str, ...]:
    """``s0000``, the head, and the others."""
    return tuple(f"s{rank:04d}" for rank in range(num_nodes))


def address(rank: int) -> str:
    """The loopback address of a node; each node has a different one."""
    return "127.0.0.1" if rank == 0 else f"127.1.{rank // 250}.{rank % 250 + 1}"


class SimulatedNode:
    """One agent's side of the conversation."""

    def __init__(
        self,
        rank: int,
        template: NodeReport,
        secret: bytes,
        head: tuple[str, int],
        attempt_dir: Path,
    ) -> None:
        """``template``: the report of all nodes, without name, rank and address."""
        self._rank = rank
        self._host = host_names(rank + 1)[-1]
        self._attempt_dir = attempt_dir
        self._template = template
        self._secret = secret
        self._head = head

    async def run(self) -> None:
        """Join the head and follow its orders to the end."""
        link = await join(
            self._report,
            secret=self._secret,
            candidates=lambda: [self._head],
            source_ip=address(self._rank),
        )
        with suppress(LinkLost):
            while (order := await link.receive())["kind"] != "end":
                if order["kind"] == ORDER:
                    await link.send(
                        await asyncio.to_thread(take_part, self._attempt_dir, order, self._host)
                    )
                if order["kind"] == "start_ray":
                    _, writer = await asyncio.open_connection(
                        order["head_ip"], order["port_base"] + 1
                    )
                    writer.write(f"{address(self._rank)} {self._template.num_gpus}\n".encode())
                    await writer.drain()
                    writer.close()
        link.close()

    def _report(self, link: Link) -> NodeReport:
        return replace(self._template, host=self._host, rank=self._rank, ip=link.local_ip)


async def host_facts(facts: Facts, options: Options) -> HostFacts:
    """Facts of this host without its GPUs, which are not those of a node of the job."""
    found = await read_this_host(facts, options)
    return replace(found, gpu_reading=GpuReading(), num_gpus_by_slurm=None)


def template_of(found: HostFacts, num_gpus: int) -> NodeReport:
    """Report of every simulated node: the facts of this host without a canary file."""
    row = network_row(*network_here(LOOPBACK_IFNAME, LOOPBACK_IP), installed_versions())
    reported = asdict(replace(found, canary=None, clock=None))
    return NodeReport("", 0, num_gpus, installed_versions(), "", LOOPBACK_IFNAME, reported, row)


async def head_port(attempt_dir: Path) -> int:
    """The head's published port. Raises TimeoutError after ``HEAD_S`` seconds without one."""
    async with asyncio.timeout(HEAD_S):
        while not (attempt_dir / HEAD_FILE).exists():
            await asyncio.sleep(0.01)
    return int(json.loads((attempt_dir / HEAD_FILE).read_text())["port"])
