"""Run the agents' preflight alone: ``python -m bootstrap.doctor.node``.

Input: this host and, inside a job, Slurm's environment. Output: the preflight table or its JSON on
standard output, one for all nodes of a step (``srun --ntasks-per-node=1``). Exit code 0 if all
hosts are fit, else 1. Leaves no processes or files behind.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from bootstrap.agent.options import Options
from bootstrap.agent.ray_command import temp_dir
from bootstrap.doctor.examination import NoContactError, examine_all, meeting_folder
from bootstrap.links.identity import Facts, read_facts
from bootstrap.network.here import NetworkError
from bootstrap.preflight.checks import check_host
from bootstrap.preflight.probe import CANARY_DIR, raise_limits, read_host
from bootstrap.preflight.table import Preflight, Requirements
from common.port_blocks import PortError
from common.terminal import visible_output


def examine(
    host: str,
    folder: Path,
    requirements: Requirements,
    needed_paths: Sequence[Path] = (),
    *,
    sandboxes: bool = False,
) -> Preflight:
    """Preflight of this host; ``folder``: the folder for runs; ``sandboxes``: with their check."""
    ray_folder = Path(temp_dir(read_facts({}, host))).parent
    facts = read_host(folder, ray_folder, host, os.environ, needed_paths, sandboxes=sandboxes)
    if facts.canary is not None:
        with suppress(OSError):
            (folder / CANARY_DIR / facts.canary).unlink()
            (folder / CANARY_DIR).rmdir()  # fails if it has other content: a run may have this name
    return Preflight.of({host: check_host(facts, requirements)})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="rlpost doctor",
        description="Check whether this host is fit for a run; in a step, all of its hosts.",
        epilog="rlpost doctor --image checks an image instead; see rlpost doctor --image --help.",
    )
    parser.add_argument(
        "--num-gpus", type=int, default=0, metavar="N", help="GPUs that a run needs on this host"
    )
    parser.add_argument(
        "--object-store-memory", type=int, metavar="BYTES", help="bytes of Ray's object store"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="FOLDER",
        help="folder for runs (default: a temporary folder)",
    )
    parser.add_argument(
        "--needed-path",
        type=Path,
        metavar="PATH",
        action="append",
        default=[],
        help="path that must exist on this host",
    )
    parser.add_argument(
        "--wait-s",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds to wait for the other nodes of a step (default: 60)",
    )
    parser.add_argument(
        "--share-gpus",
        action="store_true",
        help="several processes of the run use one GPU (--colocate)",
    )
    parser.add_argument(
        "--sandboxes",
        action="store_true",
        help="the host must be able to run sandboxes of agents",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    raise_limits()
    host = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    if (
        "SLURM_STEP_NODELIST" in os.environ
        and len((step := read_facts(os.environ, host)).hosts) > 1
    ):
        return _with_others(step, options)
    return _alone(host, options)


def _alone(host: str, options: argparse.Namespace) -> int:
    wanted = Requirements(options.num_gpus, options.object_store_memory, options.share_gpus)
    with tempfile.TemporaryDirectory() as scratch:
        preflight = examine(
            host,
            options.folder or Path(scratch),
            wanted,
            options.needed_path,
            sandboxes=options.sandboxes,
        )
    print(preflight.to_json() if options.json else preflight.table(_columns()))
    return 1 if preflight.unfit else 0


def _columns() -> int | None:
    """The width of the terminal; None where standard output is not one."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _with_others(step: Facts, options: argparse.Namespace) -> int:
    """Check all nodes of the step; the first prints one table.

    A node that cannot reach the first one checks only itself.
    """
    if os.environ.get("SLURM_LOCALID", "0") != "0":
        return 0  # the first task of this node runs the checks
    meeting = meeting_folder(
        (options.folder or Path.cwd()).resolve(), step, os.environ.get("SLURM_STEP_ID", "0")
    )
    orders = Options(
        meeting,
        options.num_gpus,
        bringup_deadline_s=options.wait_s,
        object_store_memory=options.object_store_memory,
        needed_paths=tuple(options.needed_path),
        sandboxes=options.sandboxes,
        share_gpus=options.share_gpus,
    )
    try:
        examination = asyncio.run(examine_all(step, orders, options.wait_s))
    except (NoContactError, NetworkError, PortError, OSError) as error:
        print(f"{step.host}: {error}; checking this host only", file=sys.stderr)
        _alone(step.host, options)
        return 1
    if examination is None:
        return 0
    print(examination.to_json() if options.json else examination.table())
    return 1 if examination.preflight.unfit or examination.preflight.fatal else 0


if __name__ == "__main__":
    with visible_output():
        sys.exit(main())
