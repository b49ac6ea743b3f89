"""Many agents in one process, for one real head: the real handshake, report and messages, without
host or Ray.

    python -m benchmarks.simulated_nodes NUM_NODES ATTEMPT_DIR OUT

Input: the attempt's folder, with the secret and later the port of a head on this machine; every
simulated node has its own loopback address. Output, after the head has ended all nodes: a JSON file
with the messages and bytes of all connections by kind and direction. Instead of Ray, a simulated
node sends one line to the head of ``tests/fakes/ray_stub``.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

from bootstrap.agent.identity import Facts
from bootstrap.agent.link import Link, LinkLost
from bootstrap.agent.messages import Codec, Message
from bootstrap.agent.options import parse_options
from bootstrap.agent.rendezvous import HEAD_FILE, NodeReport, installed_versions, join
from bootstrap.network.here import network_here
from bootstrap.preflight.probe import raise_limits
from bootstrap.preflight.shared_folder import ORDER, take_part
from common.attempt import SECRET_FILE

HEAD_S = 60.0


def host_names(num_nodes: int) -> tuple[str, ...]:
    """``s0000``, the head, and the others."""
    return tuple(f"s{rank:04d}" for rank in range(num_nodes))


def address(rank: int) -> str:
    """The loopback address of a node; each node has a different one."""
    return "127.0.0.1" if rank == 0 else f"127.1.{rank // 250}.{rank % 250 + 1}"


class Node:
    """One agent's side of the conversation."""

    def __init__(
        self, rank: int, template: NodeReport, secret: bytes, port: int, attempt_dir: Path
    ) -> None:
        self._rank = rank
        self._host = host_names(rank + 1)[-1]
        self._attempt_dir = attempt_dir
        self._template = template
        self._secret = secret
        self._head = ("127.0.0.1", port)

    async def live(self) -> None:
        """From joining to the end."""
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


def counting(counts: Counter[str]) -> mock._patch_default_new:
    """A patch of ``Codec`` that counts what is sent and what arrives, by kind; keepalives apart."""

    class Counting(Codec):
        def pack(self, message: Message) -> bytes:
            frame = super().pack(message)
            counts[f"sent {message['kind']}"] += 1
            counts["bytes sent"] += len(frame)
            return frame

        def unpack(self) -> Message | None:
            message = super().unpack()
            if message is not None:
                counts[f"received {message.get('kind', 'welcome')}"] += 1
            return message

    return mock.patch("bootstrap.agent.rendezvous.Codec", Counting)


async def template_of_this_host(folder: Path, num_gpus: int, num_nodes: int) -> NodeReport:
    """What every simulated node says of itself: the truth about this host, but no canary."""
    from bootstrap.agent.gathering import read_this_host
    from bootstrap.preflight.comparison import network_row

    options = parse_options([f"--attempt-dir={folder}", f"--num-gpus={num_gpus}", "--", "true"])
    facts = Facts("localhost", 1, ("localhost",) * num_nodes, "1", 0, in_slurm=False)
    host = replace(await read_this_host(facts, options), canary=None, clock=None)
    row = network_row(*network_here("lo", "127.0.0.1"), installed_versions())
    return NodeReport("", 0, num_gpus, installed_versions(), "", "lo", asdict(host), row)


async def head_port(attempt_dir: Path) -> int:
    """Where the head listens; raises TimeoutError when it does not say so within ``HEAD_S``."""
    async with asyncio.timeout(HEAD_S):
        while not (attempt_dir / HEAD_FILE).exists():
            await asyncio.sleep(0.01)
    return int(json.loads((attempt_dir / HEAD_FILE).read_text())["port"])


async def _simulate(num_nodes: int, attempt_dir: Path, out: Path) -> None:
    secret = (attempt_dir / SECRET_FILE).read_text().strip().encode()
    template = await template_of_this_host(out.parent, 8, num_nodes)
    port = await head_port(attempt_dir)
    counts: Counter[str] = Counter()
    with counting(counts):
        nodes = [Node(rank, template, secret, port, attempt_dir) for rank in range(1, num_nodes)]
        await asyncio.gather(*(node.live() for node in nodes))
    out.write_text(json.dumps(counts))


if __name__ == "__main__":
    raise_limits()
    asyncio.run(_simulate(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])))
