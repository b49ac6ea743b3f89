"""Write jobs/NAME.sbatch from each recipe jobs/recipes/NAME.toml: ``python tools/make_jobs.py [--check]``.

The scripts are for ``sbatch`` on a login node without Python. They carry the layout of ``JOBS`` and what the site's
profile says (``jobs/clusters/site.toml``; tiny's go without); everything else stays in the recipe. Variables such as
$RLPOST_ASSETS stay variables. With --check nothing is written; the exit code is 1 when a file differs.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rlpost.cli.submit import job_spec
from rlpost.config.load import files_of, load
from slurm.render import render_sbatch

PROJECT = Path(__file__).parents[1]
SITE = "site"
JOBS = {"tiny": {"nodes": 2}}  # settings of [cluster] in which the script differs from its recipe
VARIABLES = ("RLPOST_ASSETS", "RLPOST_IMAGE")


def rendered(name: str) -> str:
    """The text of jobs/NAME.sbatch."""
    recipe = f"jobs/recipes/{name}.toml"
    overrides = JOBS.get(name, {})
    profile = None if overrides else SITE
    config = load(files_of(PROJECT / recipe, {"cluster": profile}), {"cluster": dict(overrides)}).config
    flags = ["--cluster", profile] if profile else []
    flags += [word for key, value in overrides.items() for word in ("--" + key.replace("_", "-"), str(value))]
    return render_sbatch(job_spec(config, driver_args=(recipe, *flags)))


def main() -> int:
    """Write or check every script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    check = parser.parse_args().check
    for name in VARIABLES:
        os.environ.pop(name, None)
    stale = 0
    for name in sorted(recipe.stem for recipe in (PROJECT / "jobs/recipes").glob("*.toml")):
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
