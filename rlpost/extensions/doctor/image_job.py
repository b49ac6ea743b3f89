"""``rlpost doctor --image [RECIPE] --cluster PROFILE``: check a profile's image from inside it.

Input: a cluster profile, whose container a one-node job starts after the setup commands; optionally
a recipe, whose settings may have additional requirements. Output: the table and exit code of
``bootstrap.image.doctor``. Without a profile, that check runs in the current image instead.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlpost.cli.job import job_spec
from rlpost.cli.submit import PROJECT
from rlpost.config.arguments import add_switch
from rlpost.config.keys import without_keys
from rlpost.config.load import files_of, load
from rlpost.config.transformer_engine import needs_transformer_engine
from rlpost.config.tree import Config
from rlpost.errors import ConfigError
from slurm.client import cancel
from slurm.errors import SlurmError
from slurm.job_id import read_submission
from slurm.render import render_look
from slurm.variables import submission_environment


def main(arguments: Sequence[str]) -> int:
    """Run ``rlpost doctor --image`` and return its exit code. Raises ConfigError."""
    parser = argparse.ArgumentParser(
        prog="rlpost doctor --image", description="Check what an image lacks."
    )
    parser.add_argument(
        "--cluster", metavar="PROFILE", required=True, help="FILE.toml, or a name in jobs/clusters"
    )
    parser.add_argument(
        "recipe", nargs="?", type=Path, metavar="RECIPE.toml", help="check for this recipe"
    )
    add_switch(parser, "--cpu", "for nodes without a GPU")
    add_switch(parser, "--json", "print JSON")
    add_switch(parser, "--dry-run", "print the job and submit nothing")
    options = parser.parse_args(arguments)
    words = [f"--{name}" for name in ("cpu", "json") if getattr(options, name)]
    config = load(files_of(options.recipe, options.cluster), {}).config
    if options.recipe is not None:
        words += _needs_of(config)
    try:
        spec = job_spec(config, driver_args=tuple(words)).with_python(sys.executable)
        runs_dir = Path(config.cluster.runs_dir)  # on the file system that nodes share
        runs_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=runs_dir, prefix=".image-") as folder:
            spec = replace(
                spec,
                job_name="rlpost-image",
                nodes=1,
                spare_nodes=0,
                segment=None,
                requeue="never",
                time="30",
                signal_lead_s=60,
                home=str(PROJECT),
                run_folder=folder,
                output=folder.replace("%", "%%") + "/job.out",
            )
            if options.dry_run:
                print(render_look(spec), end="")
                return 0
            return _submit(render_look(spec), Path(folder))
    except SlurmError as error:
        raise ConfigError(str(error)) from error


def words_of_recipes(words: Sequence[str]) -> list[str]:
    """Return arguments for ``bootstrap.image.doctor``: each recipe is replaced by its requirements.

    Raises ConfigError.
    """
    found: list[str] = []
    for word in words:
        if word.endswith(".toml"):
            found += _needs_of(load(files_of(Path(word)), {}).config)
        else:
            found.append(word)
    return found


def _needs_of(config: Config) -> list[str]:
    reasons = [need.setting for need in needs_transformer_engine(config) if need.is_required]
    return [f"--te-for={','.join(reasons)}"] if reasons else []


def _submit(script: str, folder: Path) -> int:
    """Submit the job, wait for its end, print its findings and return its exit code."""
    path = folder / "job.sbatch"
    path.write_text(script)
    command = ["sbatch", "--wait", "--parsable", str(path)]
    try:
        # without keys: sbatch sends its environment to Slurm, which stores it
        environ = submission_environment(without_keys(os.environ), script)
        waiting = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
    except FileNotFoundError:
        raise ConfigError(
            "no sbatch on this host; run rlpost doctor --image inside the image instead"
        ) from None
    with waiting:
        assert waiting.stdout is not None
        # before the job ends, and after whatever a site's script prints
        job = next(filter(None, map(read_submission, waiting.stdout)), "")
        if job:
            print(f"waiting for job {job}, one node", file=sys.stderr)
        try:
            code = waiting.wait()
        except KeyboardInterrupt:
            if job:
                cancel(job)
            raise
    return _show(folder, code)


def _show(folder: Path, code: int) -> int:
    """Print the findings on standard output; without any, the logs of the job on standard error."""
    try:
        print((folder / "findings").read_text(), end="")
        return code
    except FileNotFoundError:
        paths = (*folder.glob("job.out"), *folder.glob("*.log"))
        logs = "".join(path.read_text(errors="replace") for path in paths)
        print(logs or f"the job wrote nothing (sbatch: exit {code})", file=sys.stderr)
        return code or 1
