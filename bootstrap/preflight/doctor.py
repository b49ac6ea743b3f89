"""Run the agents' preflight on its own: ``python -m bootstrap.preflight.doctor [--num-gpus N] [--json]``

Input: this host and, inside a job, Slurm's environment. Output: the preflight table or its JSON on standard output,
one for all nodes of a step (``srun --ntasks-per-node=1``). Exit code 0 if all hosts are fit, else 1. Leaves no
processes or files behind.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from bootstrap.agent.identity import Facts, read_facts
from bootstrap.agent.options import Options
from bootstrap.agent.ports import PortError
from bootstrap.agent.ray_command import temp_dir
from bootstrap.network.here import NetworkError
from bootstrap.preflight.checks import check_host
from bootstrap.preflight.examination import NobodyCame, examine_all, meeting_folder
from bootstrap.preflight.probe import CANARY_DIR, raise_limits, read_host
from bootstrap.preflight.table import Preflight, Wanted


def examine(host: str, folder: Path, wanted: Wanted, needed_paths: Sequence[Path] = ()) -> Preflight:
    """Preflight of this one host; ``folder`` is where runs would be kept."""
    ray_folder = Path(temp_dir(read_facts({}, host))).parent
    facts = read_host(folder, ray_folder, host, os.environ, needed_paths)
    if facts.canary is not None:
        with suppress(OSError):
            (folder / CANARY_DIR / facts.canary).unlink()
            (folder / CANARY_DIR).rmdir()  # stays when it holds anything else: a run may have that name
    return Preflight.of({host: check_host(facts, wanted)})


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bootstrap.preflight.doctor", description="Is this host fit for a run?"
    )
    parser.add_argument("--num-gpus", type=int, default=0, help="GPUs that a run would want here")
    parser.add_argument("--object-store-memory", type=int, help="bytes of Ray's object store")
    parser.add_argument("--folder", type=Path, help="where runs are kept; a temporary folder unless given")
    parser.add_argument("--needed-path", type=Path, action="append", default=[], help="what a run has to see here")
    parser.add_argument("--wait-s", type=float, default=60.0, help="for the other nodes of a step to come")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(argv)
    raise_limits()
    host = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    if "SLURM_STEP_NODELIST" in os.environ and len((step := read_facts(os.environ, host)).hosts) > 1:
        return _with_others(step, options)
    return _alone(host, options)


def _alone(host: str, options: argparse.Namespace) -> int:
    wanted = Wanted(options.num_gpus, options.object_store_memory)
    with tempfile.TemporaryDirectory() as scratch:
        preflight = examine(host, options.folder or Path(scratch), wanted, options.needed_path)
    print(preflight.to_json() if options.json else preflight.table())
    return 1 if preflight.unfit else 0


def _with_others(step: Facts, options: argparse.Namespace) -> int:
    """One table for all nodes of the step, from the first; a node that it does not hear of speaks for itself."""
    if os.environ.get("SLURM_LOCALID", "0") != "0":
        return 0  # another task of this node looks
    meeting = meeting_folder((options.folder or Path.cwd()).resolve(), step, os.environ.get("SLURM_STEP_ID", "0"))
    orders = Options(
        meeting,
        options.num_gpus,
        socket_ifname=None,
        bringup_deadline_s=options.wait_s,
        stop_grace_s=0.0,
        loss_grace_s=0.0,
        object_store_memory=options.object_store_memory,
        spare_nodes=0,
        driver=(),
        needed_paths=tuple(options.needed_path),
    )
    try:
        found = asyncio.run(examine_all(step, orders, options.wait_s))
    except (NobodyCame, NetworkError, PortError, OSError) as error:
        print(f"{step.host}: {error}; what follows is of this host alone", file=sys.stderr)
        _alone(step.host, options)
        return 1
    if found is None:
        return 0
    print(found.to_json() if options.json else found.table())
    return 1 if found.preflight.unfit or found.preflight.fatal else 0


if __name__ == "__main__":
    sys.exit(main())
