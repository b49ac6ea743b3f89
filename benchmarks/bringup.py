"""Cost of the Ray bring-up: seconds from the batch script's first line to a driver that sees every
node and GPU.

    python -m benchmarks.bringup [--nodes 2 4 8] [--repeat 3] [--ways agents floor symmetric-run
    docs] [--write] python -m benchmarks.bringup --timeline --nodes 2 --ways agents --repeat 1
    python -m benchmarks.bringup --agents [--write]

Runs on a real Slurm (the tests' lab, as root). Rounds are interleaved, and the median is shown. The
methods are in ``benchmarks/bringup_peers.py``. --timeline prints the agents' log in seconds from
the same start. --agents measures the agents without Ray (``benchmarks/bringup_agents.py``). --write
puts the table into docs/benchmarks.md, sections "Bring-up" and "Agents alone".
"""

from __future__ import annotations

import math
import os
import re
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from benchmarks import bringup_agents
from benchmarks.bringup_peers import DRIVER, NUM_GPUS, READY_FILE, STARTED_FILE, WAYS, Job
from benchmarks.page import make_parser, show, table
from tests.cluster.lab import REPOSITORY, Lab
from tests.cluster.lab_config import LabOptions
from tests.cluster.lab_host import wait_until

DEADLINE_S = 120.0


class Runs:
    """Bring-ups on one cluster."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.count = 0

    def seconds(self, way: str, num_nodes: int, *, timeline: bool = False) -> float:
        """Run one bring-up and clean up after it.

        Raises:
            TimeoutError: not ready in time; its message has the ends of the logs.
        """
        self.count += 1
        folder = self.lab.shared / f"{self.count:03d}-{way}-{num_nodes}"
        folder.mkdir()
        (folder / "driver.py").write_text(DRIVER)
        (folder / "job.sh").write_text(WAYS[way](Job(folder, num_nodes, sys.executable)))
        options = [f"-N{num_nodes}", "--ntasks-per-node=1", "--cpus-per-task=2", "--exclusive"]
        options += [f"--gres=gpu:{NUM_GPUS}", "--parsable", f"--output={folder}/job.log"]
        token = self.lab.shared / "token"
        token.write_text("6" * 64)
        environ = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        # Agents replace this token by the attempt's secret.
        environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        command = ["sbatch", *options, str(folder / "job.sh")]
        job = self.lab.run("ctl", command, env=environ).stdout.strip()
        ready, started = folder / READY_FILE, folder / STARTED_FILE
        try:
            if not wait_until(
                lambda: ready.exists() and bool(ready.read_text()), deadline_s=DEADLINE_S
            ):
                raise TimeoutError(
                    f"{way} on {num_nodes} nodes is not ready in {DEADLINE_S:g} s\n{_said(folder)}"
                )
            started_at, ready_at = float(started.read_text()), float(ready.read_text())
            if timeline:
                print("\n".join(_timeline(folder, started_at, ready_at)))
            return ready_at - started_at
        finally:
            self._end(job)

    def _end(self, job: str) -> None:
        self.lab.run("ctl", ["scancel", job], check=False)
        for node in self.lab.nodes:  # remaining processes must not disturb the next measurement
            self.lab.run(node, ["pkill", "-KILL", "-f", "ray|driver.py"], check=False)
        self.lab.wait_idle(self.lab.nodes, deadline_s=DEADLINE_S)


def _said(folder: Path) -> str:
    return "\n".join(
        f"== {path.name}\n{path.read_text()[-1500:]}" for path in sorted(folder.rglob("*.log"))
    )


def _timeline(folder: Path, started: float, ready: float) -> list[str]:
    """The agents' log lines, by time; the last line is the driver's."""
    lines = []
    for path in (folder / "attempt").glob("agent-*.log"):
        for found in re.finditer(
            r"^(\d\d:\d\d:\d\d)\.(\d{3}) \w+ (.*)$", path.read_text(), re.MULTILINE
        ):
            day = datetime.fromtimestamp(started).date()
            at = datetime.combine(day, datetime.strptime(found[1], "%H:%M:%S").time()).timestamp()
            lines.append((at + int(found[2]) / 1000 - started, found[3]))
    lines.append((ready - started, "the driver sees every node"))
    return [f"{at:8.3f} {text}" for at, text in sorted(lines)]


def measure(sizes: Sequence[int], ways: Sequence[str], repeat: int, *, timeline: bool) -> list[str]:
    """The table."""
    times: dict[tuple[str, int], list[float]] = {}
    with Lab(max(sizes), options=LabOptions(num_gpus_per_node=NUM_GPUS)) as lab:
        runs = Runs(lab)
        for round_number in range(repeat):
            for num_nodes in sizes:
                for way in ways:
                    try:
                        seconds = runs.seconds(way, num_nodes, timeline=timeline)
                    except TimeoutError as error:  # a failed bring-up of a peer is a result
                        print(error, file=sys.stderr)
                        seconds = math.inf
                    times.setdefault((way, num_nodes), []).append(seconds)
                    print(
                        f"round {round_number + 1}: {way} on {num_nodes} nodes: {seconds:.2f} s",
                        file=sys.stderr,
                    )
    rows = []
    for num_nodes in sizes:
        least = statistics.median(times[("floor", num_nodes)]) if "floor" in ways else None
        for way in ways:
            seen = times[(way, num_nodes)]
            share = f"{statistics.median(seen) / least:.2f}" if least else "-"
            cells = (statistics.median(seen), min(seen), max(seen))
            rows.append([way, str(num_nodes), *(f"{cell:.2f}" for cell in cells), share])
    return table(["way", "nodes", "median s", "least", "most", "of the floor"], rows)


def main() -> int:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4, 8], help="sizes of the job")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--repeat", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument(
        "--timeline", action="store_true", help="print the agents' log lines by time"
    )
    parser.add_argument(
        "--agents", action="store_true", help="the agents alone, Ray replaced by a stub"
    )
    options = parser.parse_args()
    load = os.getloadavg()[0]
    began = time.monotonic()
    if options.agents:
        heading, introduction = bringup_agents.HEADING, bringup_agents.INTRODUCTION
        lines = bringup_agents.measure()
    else:
        heading, introduction = "## Bring-up", _INTRODUCTION
        lines = measure(options.nodes, options.ways, options.repeat, timeline=options.timeline)
    end = f"Load of the machine at the start: {load:.1f}; the whole took {time.monotonic() - began:.0f} s."
    show(heading, [*introduction, end, "", *lines], write=options.write)
    return 0


_INTRODUCTION = (
    "`python -m benchmarks.bringup --write`, on Slurm 22.05 of the tests' lab and Ray 2.60 (2 cores for all nodes",
    "together, which is what more nodes wait for here). Seconds from the batch script's first line to a driver that is",
    "connected and sees every node with every GPU. *floor*: `ray start`, imported beforehand, on all nodes, gated on",
    "the registration of the head's raylet and nothing else, with the options that the agents use; *docs*: the script",
    "in Ray's documentation on Slurm.",
)

if __name__ == "__main__":
    sys.exit(main())
