"""Write jobs/NAME.sbatch from each recipe: ``python -m tools.make_jobs [--check]``.

Also writes jobs/convert_NAME.sbatch for weights that recipes name as NAME_torch_dist (one per
conversion). The only dependency is pydantic.

The scripts are for ``sbatch`` on a login node without Python. They contain the layout of ``JOBS``
and the site's profile (``jobs/clusters/site.toml``, except for tiny); everything else stays in the
recipe. Variables such as $RLPOST_ASSETS are not expanded. With --check nothing is written; the exit
code is 1 if a file is out of date.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

from rlpost.cli.job import job_spec
from rlpost.config.flags import flag
from rlpost.config.load import SITE, files_of, load, read_toml
from rlpost.config.tree import Config
from rlpost.extensions.converting.convert_job import (
    CONVERSION_NODES,
    CONVERTED,
    TIME,
    conversion_spec,
    target_of,
)
from slurm.render import render_conversion, render_sbatch
from slurm.spec import JobSpec

PROJECT = Path(__file__).parents[1]
JOBS = {"tiny": {"nodes": 2}}  # settings of [cluster] that override the recipe
VARIABLES = ("RLPOST_ASSETS", "RLPOST_IMAGE", "RLPOST_CONTAINER", "RLPOST_IMAGE_CACHE")


def rendered(name: str) -> str:
    """The text of jobs/NAME.sbatch."""
    recipe = f"jobs/recipes/{name}.toml"
    overrides = JOBS.get(name, {})
    profile = None if overrides else SITE
    config = load(files_of(PROJECT / recipe, profile), {"cluster": dict(overrides)}).config
    flags = ["--cluster", profile] if profile else []
    for key, value in overrides.items():
        flags += [flag(key), str(value)]
    spec = job_spec(config, driver_args=(recipe, *flags), is_for_any_site=True)
    return render_sbatch(for_any_home(spec, config))


def conversions() -> dict[str, str]:
    """The recipe of each conversion, by target folder: the first recipe that names it."""
    found: dict[str, str] = {}
    for path in sorted((PROJECT / "jobs/recipes").glob("*.toml")):
        wanted = read_toml(path).get("checkpoint", {}).get("ref_load", "")
        if wanted.endswith(CONVERTED):
            found.setdefault(wanted, path.stem)
    return found


def rendered_conversion(name: str) -> str:
    """The text of jobs/convert_NAME.sbatch."""
    recipe = PROJECT / f"jobs/recipes/{name}.toml"
    job = {
        "job_name": f"convert_{name}",
        "nodes": CONVERSION_NODES.get(name, 1),
        "time": TIME,
    }
    config = load(files_of(recipe, SITE), {"cluster": job}).config
    target = target_of(config)
    spec = conversion_spec(config, target)
    return render_conversion(for_any_home(spec, config), target.folder)


def for_any_home(spec: JobSpec, config: Config) -> JobSpec:
    """The same job with the image cache in the job's RLPOST_HOME, unless the profile sets one."""
    if (
        spec.container is None
        or config.cluster.image_cache is not None
        or spec.container.is_imported
    ):
        return spec
    return replace(spec, container=replace(spec.container, cache=None))


def scripts() -> dict[str, str]:
    """The text of every script of jobs/, by its name."""
    recipes = sorted(recipe.stem for recipe in (PROJECT / "jobs/recipes").glob("*.toml"))
    made = {name: rendered(name) for name in recipes}
    return made | {f"convert_{name}": rendered_conversion(name) for name in conversions().values()}


def main() -> int:
    """Write or check every script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    check = parser.parse_args().check
    for name in VARIABLES:
        os.environ.pop(name, None)
    stale = 0
    texts = {PROJECT / "jobs" / f"{name}.sbatch": text for name, text in scripts().items()}
    for path, text in texts.items():
        if check:
            stale += not path.exists() or path.read_text() != text
        else:
            path.write_text(text)
            path.chmod(0o755)
            print(path.relative_to(PROJECT))
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
