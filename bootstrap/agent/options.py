"""Command line of an agent."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.attempt import BRINGUP_DEADLINE_S, DRIVER_RESTARTS, SIGNAL_LEAD_S
from common.log_format import FORMATS, VARIABLE


@dataclass(frozen=True, slots=True)
class Options:
    """Options of one agent; ``driver`` is the command that the head runs."""

    attempt_dir: Path
    num_gpus: int
    driver: tuple[str, ...] = ()
    socket_ifname: str | None = None
    bringup_deadline_s: float = BRINGUP_DEADLINE_S
    stop_grace_s: float = 600.0
    signal_lead_s: float = SIGNAL_LEAD_S
    loss_grace_s: float = 10.0
    driver_restarts: int = DRIVER_RESTARTS
    object_store_memory: int | None = None
    ray_dashboard_host: str | None = None
    spare_nodes: int = 0
    num_nodes: int | None = None
    spare_wait_s: float = 10.0
    needed_paths: tuple[Path, ...] = ()
    bandwidth_gbps: float | None = None
    sandboxes: bool = False
    share_gpus: bool = False
    log_format: str | None = None


def parse_options(argv: Sequence[str]) -> Options:
    """Parse the command line; exits with usage and code 2 on an error."""
    # An option that is not given is not in the result, so the defaults of Options apply.
    parser = argparse.ArgumentParser(
        prog="python -m bootstrap.agent",
        description="Run the agent of one node.",
        argument_default=argparse.SUPPRESS,
    )

    def add(flag: str, kind: Callable[[str], object], text: str, *, required: bool = False) -> None:
        parser.add_argument(flag, type=kind, help=text, required=required)

    add("--attempt-dir", Path, "folder of this attempt, shared by all nodes", required=True)
    add("--num-gpus", int, "GPUs of this node that Ray may allocate", required=True)
    add("--socket-ifname", str, "network interface to use (default: detected)")
    add("--bringup-deadline-s", float, "time limit until Ray is up on all nodes")
    add("--stop-grace-s", float, "time for the driver to end after a stop request")
    add("--signal-lead-s", float, "time before the end of the job at which the driver is stopped")
    add("--loss-grace-s", float, "time for the driver to end after a node is lost")
    add("--driver-restarts", int, "times that a driver that crashed is started again")
    add("--object-store-memory", int, "bytes of Ray's object store on each node")
    add("--ray-dashboard-host", str, "run Ray's dashboard on the head, at this address")
    add("--spare-nodes", int, "nodes beyond those that the run needs")
    add(
        "--num-nodes",
        int,
        "nodes that the run needs (default: those of the step without --spare-nodes); Slurm "
        "takes a lost node out of a job, also for its next start",
    )
    add("--spare-wait-s", float, "time to wait for late nodes when enough have joined")
    add("--bandwidth-gbps", float, "minimum all-reduce bandwidth in GB/s; measured if given")
    parser.add_argument(
        "--needed-path",
        type=Path,
        action="append",
        dest="needed_paths",
        help="path that must exist on every node",
    )
    parser.add_argument(
        "--sandboxes", action="store_true", help="the host must be able to run sandboxes of agents"
    )
    parser.add_argument(
        "--share-gpus",
        action="store_true",
        help="several processes of the run use one GPU (--colocate)",
    )
    parser.add_argument(
        "--log-format",
        choices=FORMATS,
        help=f"format of all logs (default: ${VARIABLE}, else text)",
    )
    parser.add_argument(
        "driver", nargs="+", metavar="DRIVER", help="after --: command that the head runs"
    )
    values = vars(parser.parse_args(argv))
    values["attempt_dir"] = values["attempt_dir"].resolve()
    for name in values.keys() & {"driver", "needed_paths"}:
        values[name] = tuple(values[name])
    return Options(**values)
