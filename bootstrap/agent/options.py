"""Command line of an agent."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.attempt import DRIVER_RESTARTS
from common.log_format import FORMATS, VARIABLE


@dataclass(frozen=True, slots=True)
class Options:
    """Options of one agent; ``driver`` is the command that the head runs."""

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
    num_nodes: int | None = None
    driver_restarts: int = DRIVER_RESTARTS
    sandboxes: bool = False
    log_format: str | None = None


def parse_options(argv: Sequence[str]) -> Options:
    """Parse the command line; exits with usage and code 2 on an error."""
    parser = argparse.ArgumentParser(
        prog="python -m bootstrap.agent", description="Run the agent of one node."
    )
    parser.add_argument(
        "--attempt-dir",
        type=Path,
        required=True,
        help="folder of this attempt, shared by all nodes",
    )
    parser.add_argument(
        "--num-gpus", type=int, required=True, help="GPUs of this node that Ray may allocate"
    )
    parser.add_argument("--socket-ifname", help="network interface to use (default: detected)")
    parser.add_argument(
        "--bringup-deadline-s",
        type=float,
        default=600.0,
        help="time limit until Ray is up on all nodes",
    )
    parser.add_argument(
        "--stop-grace-s",
        type=float,
        default=600.0,
        help="time for the driver to end after a stop request",
    )
    parser.add_argument(
        "--signal-lead-s",
        type=float,
        default=120.0,
        help="time before the end of the job at which the driver is stopped",
    )
    parser.add_argument(
        "--loss-grace-s",
        type=float,
        default=10.0,
        help="time for the driver to end after a node is lost",
    )
    parser.add_argument(
        "--driver-restarts",
        type=int,
        default=DRIVER_RESTARTS,
        help="times that a driver that crashed is started again",
    )
    _add_ray_options(parser)
    _add_spare_nodes(parser)
    parser.add_argument(
        "--needed-path",
        type=Path,
        action="append",
        default=[],
        dest="needed_paths",
        help="path that must exist on every node",
    )
    parser.add_argument(
        "--bandwidth-gbps",
        type=float,
        help="minimum all-reduce bandwidth in GB/s; measured if given",
    )
    parser.add_argument(
        "--sandboxes",
        action="store_true",
        help="the host must be able to run sandboxes of agents",
    )
    parser.add_argument(
        "--log-format",
        choices=FORMATS,
        help=f"format of all logs (default: ${VARIABLE}, else text)",
    )
    parser.add_argument(
        "driver", nargs="+", metavar="DRIVER", help="after --: command that the head runs"
    )
    options = vars(parser.parse_args(argv))
    options["attempt_dir"] = options["attempt_dir"].resolve()
    options["driver"] = tuple(options["driver"])
    options["needed_paths"] = tuple(options["needed_paths"])
    return Options(**options)


def _add_spare_nodes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--spare-nodes", type=int, default=0, help="nodes beyond those that the run needs"
    )
    parser.add_argument(
        "--num-nodes",
        type=int,
        help="nodes that the run needs (default: those of the step without --spare-nodes); Slurm "
        "takes a lost node out of a job, also for its next start",
    )
    parser.add_argument(
        "--spare-wait-s",
        type=float,
        default=10.0,
        help="time to wait for late nodes when enough have joined",
    )


def _add_ray_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--object-store-memory", type=int, help="bytes of Ray's object store on each node"
    )
    parser.add_argument(
        "--ray-dashboard", action="store_true", help="run Ray's dashboard on the head"
    )
    parser.add_argument(
        "--ray-dashboard-host",
        default="127.0.0.1",
        help="address that the dashboard listens on (default: loopback)",
    )
