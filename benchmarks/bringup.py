"""Cost of the agents' bring-up, without Ray's: seconds from the first node to a cluster for the driver.

    python -m benchmarks.bringup [--write]

Rendezvous, preflight, comparison and readiness, with Ray replaced by a stub
(``tests/fakes/ray_stub``): one agent per node on real Slurm nodes (the tests' lab, as root),
and one real head with simulated nodes (``tests/unit/bootstrap``) for sizes that do not fit the
lab. --write puts the table into docs/benchmarks.md, section "Agents alone".
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.page import machine, make_parser, show, table
from common.attempt import STOP_FILE
from tests.cluster.attempts import Attempt
from tests.cluster.lab import Lab
from tests.cluster.lab_config import LabOptions
from tests.unit.bootstrap.simulated_head import Result, simulate, times

HEADING = "## Agents alone"
REAL_NODES, SIMULATED = 64, (64, 256, 1024)

INTRODUCTION: tuple[str, ...] = (
    "`python -m benchmarks.bringup --write`: rendezvous, preflight, comparison, readiness; Ray is replaced",
    "by a stub that is up at once. *joining*: from the first node that joins to the last; *ready*: from the first that",
    "joins to a cluster for the driver. Simulated nodes speak the real protocol, from one process, to a real",
    "head; Slurm nodes are real, and all of them start their agents on the same 2 cores, for which they wait.",
    "Messages are those of all nodes together without signs of life; descriptors are the head's open ones when ready.",
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


def measure() -> list[str]:
    """Return the table of the agents alone."""
    rows = []
    for num_nodes in SIMULATED:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(_row(f"{num_nodes} simulated", simulate(num_nodes, Path(folder))))
    rows.append(_row(f"{REAL_NODES} on Slurm", on_slurm(REAL_NODES)))
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


def main() -> int:
    """Measure and print."""
    options = make_parser(__doc__).parse_args()
    where = machine()
    show(HEADING, [*INTRODUCTION, f"{where}.", "", *measure()], write=options.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
