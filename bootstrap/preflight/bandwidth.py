"""Measure all-reduce bandwidth between the nodes before the run, if a profile sets a threshold.

Input: the head's order to every node. Output: each node's best bandwidth with either of its two
neighbours. Neighbours are measured in pairs, because a ring of all nodes cannot locate the slow
node. Each node runs ``bandwidth_probe`` (which may import torch) under a keeper, so that no process
outlives the measurement.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bootstrap.links.link import Link, LinkLost
from bootstrap.links.monitor import Kept
from bootstrap.network.here import ifname_of, local_addresses, network_here
from common.attempt import SECRET_FILE, SECRET_VARIABLE
from common.files import tail
from common.port_blocks import PortBlock

DEADLINE_S = 120.0  # mostly for the import of torch from a shared file system
_PROBE = "bootstrap.preflight.bandwidth_probe"
_ANSWER_S = 10.0
_END_GRACE_S = 1.0


def rounds_of(num_nodes: int) -> list[list[tuple[int, int]]]:
    """Pairs of ring neighbours in as few rounds as possible; a node once per round."""
    if num_nodes < 2:
        return []
    if num_nodes == 2:
        return [[(0, 1)]]
    ring = [(node, (node + 1) % num_nodes) for node in range(num_nodes)]
    rounds = [ring[0 : num_nodes - num_nodes % 2 : 2], ring[1::2]]
    return [*rounds, [ring[-1]]] if num_nodes % 2 else rounds


async def measure_here(
    order: Mapping[str, Any], ip: str, num_gpus: int, log: Path
) -> dict[str, object]:
    """Measure on this node; return the answer to ``order``: bandwidth in GB/s, or an error.

    Args:
        order: ``rank`` and ``num_nodes`` of the measurement, ``head_ip``, ``port_base`` of the job.
        ip: this node's address in the cluster.
        log: file for the probe's output.
    """
    ifname = ifname_of(ip, local_addresses())
    _, detection = network_here(ifname, ip)
    port = PortBlock(int(order["port_base"])).job_ports[-1]  # not in use before Ray starts
    where = [f"--address={order['head_ip']}", f"--port={port}", f"--rank={order['rank']}"]
    size = [
        f"--num-nodes={order['num_nodes']}",
        f"--num-gpus={num_gpus}",
        f"--deadline-s={DEADLINE_S}",
    ]
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        kept = await Kept.start(
            "the bandwidth probe",
            [sys.executable, "-u", "-m", _PROBE, *where, *size],
            environ={
                **os.environ,
                **detection.env,
                SECRET_VARIABLE: str(log.with_name(SECRET_FILE)),
            },
            stdio=(nothing, output),
        )
    finally:
        os.close(nothing)
        os.close(output)
    await asyncio.wait([kept.exited], timeout=DEADLINE_S)
    in_time = kept.exited.done()
    await kept.end(_END_GRACE_S)
    kept.release()
    output_tail = await asyncio.to_thread(tail, log)
    result = _result(output_tail)
    if not in_time:
        result = {"error": f"the probe did not end within {DEADLINE_S:g} s; see {log.name}"}
    return {"kind": "measured", **result}


class Survey:
    """The head's side: sends the order to all nodes at once and collects their answers."""

    def __init__(self) -> None:
        self._answers: dict[str, asyncio.Future[Mapping[str, Any]]] = {}

    def record_answer(self, host: str, message: Mapping[str, object]) -> None:
        """Record a node's answer."""
        answer = self._answers.get(host)
        if answer is not None and not answer.done():
            answer.set_result(message)

    async def run(
        self, hosts: Sequence[str], links: Mapping[str, Link], num_gpus: int, log: Path
    ) -> dict[str, float | str]:
        """Bandwidth in GB/s, or an error, by host.

        ``hosts[0]`` is this host, ``links`` are to the others.
        """
        some = links[hosts[1]]
        order = {
            "kind": "measure",
            "head_ip": some.local_ip,
            "port_base": some.local_port,
            "num_nodes": len(hosts),
        }
        loop = asyncio.get_running_loop()
        self._answers = {host: loop.create_future() for host in hosts[1:]}
        for rank, host in enumerate(hosts[1:], start=1):
            try:
                await links[host].send({**order, "rank": rank})
            except LinkLost as error:
                self.record_answer(host, {"error": str(error)})
        measured = await measure_here({**order, "rank": 0}, some.local_ip, num_gpus, log)
        # The measurement is collective: the other nodes end at the same time.
        await asyncio.wait(self._answers.values(), timeout=_ANSWER_S)
        answers: dict[str, Mapping[str, Any]] = {hosts[0]: measured}
        for host, answer in self._answers.items():
            answers[host] = answer.result() if answer.done() else {"error": "no answer in time"}
        return {host: answers[host].get("gbps") or answers[host]["error"] for host in hosts}


def _result(output: str) -> dict[str, object]:
    """Parse the last line of a probe's output."""
    last = output.strip().rpartition("\n")[2]
    try:
        return {"gbps": float(json.loads(last)["gbps"])}
    except (ValueError, TypeError, KeyError):
        return {"error": last[:500]}
