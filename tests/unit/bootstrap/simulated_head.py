"""The head of a job with simulated nodes and a stub of Ray (``tests/fakes/ray_stub``), measured.

    python -m tests.unit.bootstrap.simulated_head NUM_NODES ATTEMPT_DIR OUT

runs the nodes, for ``simulate``. Input: the attempt's folder, with the secret and later the port of
the head; every node has its own loopback address. Output, after the head has ended all nodes: a JSON
file with the messages and bytes of all connections by kind and direction.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from unittest import mock

import psutil

from bootstrap.agent.options import parse_options
from bootstrap.links.identity import Facts
from bootstrap.preflight.probe import raise_limits
from common.attempt import SECRET_FILE, STOP_FILE
from common.message_codec import Message, MessageCodec
from tests.cluster.attempts import IDLE_DRIVER, STUB_RAY
from tests.cluster.lab import REPOSITORY
from tests.cluster.lab_host import wait_until
from tests.unit.bootstrap.simulated_nodes import (
    SimulatedNode,
    head_port,
    host_facts,
    host_names,
    template_of,
)

DEADLINE_S = 60.0
_JOINED, _UP = re.compile(r"joined from"), re.compile(r"the cluster is up")


@dataclass(frozen=True, slots=True)
class Result:
    """One bring-up; seconds after the first node joined."""

    joining_s: float
    ready_s: float
    last_to_ready_s: float
    num_messages: int | None = None
    num_bytes: int | None = None
    num_descriptors: int | None = None
    processor_s: float | None = None


def times(log: str) -> tuple[float, float, float]:
    """Seconds of the day of the first join, the last join and the ready cluster, from the head's
    log.
    """
    joined = [_at(line) for line in log.splitlines() if _JOINED.search(line)]
    (up,) = [_at(line) for line in log.splitlines() if _UP.search(line)]
    return joined[0], joined[-1], up


def _at(line: str) -> float:
    at = datetime.strptime(line.split()[1], "%H:%M:%S.%f")
    return at.hour * 3600 + at.minute * 60 + at.second + at.microsecond / 1e6


def simulate(num_nodes: int, folder: Path) -> Result:
    """One real head and ``num_nodes - 1`` simulated nodes."""
    attempt = folder / "attempt"
    attempt.mkdir(mode=0o700)
    (attempt / SECRET_FILE).write_text(secrets.token_hex(32))
    job = str(os.getpid() * 10 + num_nodes)
    names = host_names(num_nodes)
    environ = {
        **os.environ,
        "SLURM_JOB_ID": job,
        "SLURM_NODEID": "0",
        "SLURM_STEP_NODELIST": f"s[{names[0][1:]}-{names[-1][1:]}]",
        "SLURMD_NODENAME": names[0],
        "PYTHONPATH": f"{STUB_RAY}:{REPOSITORY}",
    }
    python = sys.executable
    command = [python, "-u", "-m", "bootstrap.agent", f"--attempt-dir={attempt}", "--num-gpus=8"]
    log, counts = folder / "head.log", folder / "counts.json"
    words = [str(num_nodes), str(attempt), str(counts)]
    simulator = [python, "-m", "tests.unit.bootstrap.simulated_head", *words]
    with log.open("w") as stream:
        head = subprocess.Popen(
            [*command, "--", sys.executable, "-c", IDLE_DRIVER],
            env=environ,
            stderr=stream,
            cwd=folder,
        )
    nodes = subprocess.Popen(simulator, env=environ, cwd=REPOSITORY)
    try:
        is_up = wait_until(
            lambda: bool(_UP.search(log.read_text())) or head.poll() is not None,
            deadline_s=DEADLINE_S,
        )
        if not is_up or head.poll() is not None:
            raise RuntimeError(
                f"{num_nodes} simulated nodes: no cluster\n{log.read_text()[-3000:]}"
            )
        process = psutil.Process(head.pid)
        num_descriptors, spent = process.num_fds(), process.cpu_times()
        (attempt / STOP_FILE).write_text('{"reason": "measured"}')
        head.wait(DEADLINE_S)
        nodes.wait(DEADLINE_S)
    finally:
        for child in (head, nodes):
            child.kill()
            child.wait()
    first, last, up = times(log.read_text())
    counted = {
        kind: number
        for kind, number in json.loads(counts.read_text()).items()
        if "alive" not in kind
    }
    num_bytes = counted.pop("bytes sent")
    num_messages, processor_s = sum(counted.values()), spent.user + spent.system
    return Result(
        last - first, up - first, up - last, num_messages, num_bytes, num_descriptors, processor_s
    )


def counting(counts: Counter[str]) -> mock._patch_default_new:
    """Return a patch of ``MessageCodec`` that counts messages by kind and direction, and bytes sent."""

    class Counting(MessageCodec):
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

    return mock.patch("bootstrap.agent.rendezvous.MessageCodec", Counting)


async def _simulate(num_nodes: int, attempt_dir: Path, out: Path) -> None:
    secret = (attempt_dir / SECRET_FILE).read_text().strip().encode()
    options = parse_options([f"--attempt-dir={out.parent}", "--num-gpus=8", "--", "true"])
    facts = Facts("localhost", 1, ("localhost",) * num_nodes, "1", 0, in_slurm=False)
    template = template_of(await host_facts(facts, options), 8)
    head = ("127.0.0.1", await head_port(attempt_dir))
    counts: Counter[str] = Counter()
    with counting(counts):
        nodes = [
            SimulatedNode(rank, template, secret, head, attempt_dir) for rank in range(1, num_nodes)
        ]
        await asyncio.gather(*(node.run() for node in nodes))
    out.write_text(json.dumps(counts))


if __name__ == "__main__":
    raise_limits()
    asyncio.run(_simulate(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])))
