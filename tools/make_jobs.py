"""Write jobs/NAME.sbatch from each recipe jobs/recipes/NAME.toml: ``python tools/make_jobs.py [--check]``.

The scripts are for ``sbatch`` on a login node without Python. They carry the layout of ``JOBS``; everything else stays
in the recipe. With --check nothing is written; the exit code is 1 when a file differs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rlpost.cli.submit import job_spec
from rlpost.config.load import load
from slurm.render import render_sbatch

PROJECT = Path(__file__).parents[1]
JOBS = {"tiny": {"nodes": 2}}  # settings of [cluster] in which the script differs from its recipe


def rendered(name: str) -> str:
    """The text of jobs/NAME.sbatch."""
    recipe = f"jobs/recipes/{name}.toml"
    overrides = JOBS[name]
    config = load([PROJECT / recipe], {"cluster": dict(overrides)}).config
    flags = [word for key, value in overrides.items() for word in ("--" + key.replace("_", "-"), str(value))]
    return render_sbatch(job_spec(config, driver_args=(recipe, *flags)))


def main() -> int:
    """Write or check every script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    check = parser.parse_args().check
    stale = 0
    for name in JOBS:
        path = PROJECT / "jobs" / f"{name}.sbatch"
        if check:
            stale += not path.exists() or path.read_text() != rendered(name)
        else:
            path.write_text(rendered(name))
            path.chmod(0o755)
            print(path.relative_to(PROJECT))
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
