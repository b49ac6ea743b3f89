"""Bring-up time of the agents without Ray, which is replaced by a stub (``bootstrap/simulated/ray_stub``).

Output: rows for docs/benchmarks.md. Two setups: one agent per node on 64 real Slurm nodes, and one
real head with simulated nodes (``bootstrap/simulated/nodes.py``) for sizes that do not fit the
lab.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psutil

from benchmarks.page import table
from bootstrap.simulated.nodes import host_names
from common.attempt import SECRET_FILE, STOP_FILE
from tests.cluster.attempts import IDLE_DRIVER, STUB_RAY, Attempt
from tests.cluster.lab import REPOSITORY, Lab
from tests.cluster.lab_config import LabOptions
from tests.cluster.lab_host import wait_until

HEADING = "## Agents alone"
INTRODUCTION = (
    "`python -m benchmarks.bringup --agents --write`: rendezvous, preflight, comparison, readiness; Ray is replaced",
    "by a stub that is up at once. *joining*: from the first node that joins to the last; *ready*: from the first that",
    "joins to a cluster for the driver. Simulated nodes speak the real protocol, from one process, to a real",
    "head; Slurm nodes are real, and all of them start their agents on the same 2 cores, for which they wait.",
    "Messages are those of all nodes together without signs of life; descriptors are the head's open ones when ready.",
)
REAL_NODES = 64
SIMULATED = (64, 256, 1024)
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
    simulator = [python, "-m", "benchmarks.simulated_nodes", *words]
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


def on_slurm(num_nodes: int) -> Result:
    """One agent a node on real Slurm nodes."""
    with Lab(num_nodes, options=LabOptions(num_gpus_per_node=2)) as lab:
        attempt = Attempt(lab, "agents", nodes=",".join(lab.nodes), stub_ray=True)
        attempt.wait_until_it_works()
        log = attempt.log(f"agent-{lab.nodes[0]}.log")
        (attempt.folder / STOP_FILE).write_text('{"reason": "measured"}')
        attempt.wait()
        attempt.end()
    first, last, up = times(log)
    return Result(last - first, up - first, up - last)


def measure(sizes: Sequence[int] = SIMULATED, num_real: int = REAL_NODES) -> list[str]:
    """The table."""
    rows = []
    for num_nodes in sizes:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(_row(f"{num_nodes} simulated", simulate(num_nodes, Path(folder))))
    if num_real:
        rows.append(_row(f"{num_real} on Slurm", on_slurm(num_real)))
    header = (
        *("nodes", "joining s", "ready s", "last joined to ready s", "head's processor s"),
        *("messages", "KiB to the head", "head's descriptors"),
    )
    return table(header, rows)


def _row(name: str, found: Result) -> list[str]:
    seconds = [f"{value:.2f}" for value in (found.joining_s, found.ready_s, found.last_to_ready_s)]
    seconds.append("-" if found.processor_s is None else f"{found.processor_s:.2f}")
    num_kib = None if found.num_bytes is None else found.num_bytes // 1024
    counts = (
        "-" if value is None else str(value)
        for value in (found.num_messages, num_kib, found.num_descriptors)
    )
    return [name, *seconds, *counts]
