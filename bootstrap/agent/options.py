"""What an agent is told on its command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Options:
    """One agent's orders; ``driver`` is the command that the head runs."""

    attempt_dir: Path
    num_gpus: int
    socket_ifname: str | None
    bringup_deadline_s: float
    stop_grace_s: float
    loss_grace_s: float
    object_store_memory: int | None
    spare_nodes: int
    driver: tuple[str, ...]
    ray_dashboard: bool = False
    ray_dashboard_host: str = "127.0.0.1"
    spare_wait_s: float = 10.0
    needed_paths: tuple[Path, ...] = ()
    bandwidth_gbps: float | None = None
    signal_lead_s: float = 120.0


def parse_options(argv: Sequence[str]) -> Options:
    """Read the command line; leaves with usage and exit code 2 when it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m bootstrap.agent", description="One agent a node.")
    parser.add_argument("--attempt-dir", type=Path, required=True, help="folder of this attempt, shared by all nodes")
    parser.add_argument("--num-gpus", type=int, required=True, help="GPUs of this node that Ray may give away")
    parser.add_argument("--socket-ifname", help="network interface to use; found by itself unless given")
    parser.add_argument("--bringup-deadline-s", type=float, default=600.0, help="until every node's Ray is up")
    parser.add_argument("--stop-grace-s", type=float, default=600.0, help="for the driver after a stop request")
    parser.add_argument("--signal-lead-s", type=float, default=120.0, help="before the job's end, to stop the driver")
    parser.add_argument("--loss-grace-s", type=float, default=10.0, help="for the driver after a node was lost")
    parser.add_argument("--object-store-memory", type=int, help="bytes of Ray's object store on each node")
    parser.add_argument("--ray-dashboard", action="store_true", help="run Ray's dashboard on the head")
    parser.add_argument(
        "--ray-dashboard-host", default="127.0.0.1", help="address of the head for it (default: loopback)"
    )
    parser.add_argument("--spare-nodes", type=int, default=0, help="nodes beyond those that the run needs")
    parser.add_argument("--spare-wait-s", type=float, default=10.0, help="for late nodes when enough are here already")
    parser.add_argument(
        "--needed-path", type=Path, action="append", default=[], dest="needed_paths", help="what every node has to see"
    )
    parser.add_argument("--bandwidth-gbps", type=float, help="all-reduce in GB/s that a node needs; measured if given")
    parser.add_argument("driver", nargs="+", metavar="DRIVER", help="after --: command that the head runs")
    options = vars(parser.parse_args(argv))
    options["attempt_dir"] = options["attempt_dir"].resolve()
    options["driver"] = tuple(options["driver"])
    options["needed_paths"] = tuple(options["needed_paths"])
    return Options(**options)
