"""Looks at this host as the agents do before a run: ``python -m bootstrap.doctor [--num-gpus N] [--json]``

Comes in: this host and, inside a job, Slurm's environment. Goes out: the preflight table or its JSON on standard
output; exit code 0 when the host is fit, 1 when it is not. Starts nothing and leaves nothing behind.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bootstrap.facts import read_facts
from bootstrap.preflight import Preflight, Wanted
from bootstrap.preflight_checks import check_host
from bootstrap.preflight_probe import CANARY_DIR, raise_limits, read_host
from bootstrap.ray_command import temp_dir


def examine(host: str, folder: Path, wanted: Wanted, needed_paths: Sequence[Path] = ()) -> Preflight:
    """Preflight of this one host; ``folder`` is where runs would be kept."""
    ray_folder = Path(temp_dir(read_facts({}, host))).parent
    facts = read_host(folder, ray_folder, host, os.environ, needed_paths)
    if facts.canary is not None:
        shutil.rmtree(folder / CANARY_DIR, ignore_errors=True)
    return Preflight.of({host: check_host(facts, wanted)})


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m bootstrap.doctor", description="Is this host fit for a run?")
    parser.add_argument("--num-gpus", type=int, default=0, help="GPUs that a run would want here")
    parser.add_argument("--object-store-memory", type=int, help="bytes of Ray's object store")
    parser.add_argument("--folder", type=Path, help="where runs are kept; a temporary folder unless given")
    parser.add_argument("--needed-path", type=Path, action="append", default=[], help="what a run has to see here")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(argv)
    raise_limits()
    host = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    wanted = Wanted(options.num_gpus, options.object_store_memory)
    with tempfile.TemporaryDirectory() as scratch:
        preflight = examine(host, options.folder or Path(scratch), wanted, options.needed_path)
    print(preflight.to_json() if options.json else preflight.table())
    return 1 if preflight.unfit else 0


if __name__ == "__main__":
    sys.exit(main())
