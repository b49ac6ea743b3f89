"""``rlpost doctor --image [RECIPE] --cluster PROFILE``: what the image of a profile lacks, seen from inside it.

Input: a cluster profile, whose container is started by a job of one node, after its setup commands; a recipe, whose
settings may need more than every run does. Output: the table of
``bootstrap.image.doctor``, which without a profile is called for the image that one is in, and its exit code.
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
from rlpost.config.keys import without_keys
from rlpost.config.load import files_of, load
from rlpost.config.transformer_engine import needs_transformer_engine
from rlpost.config.tree import Config
from rlpost.errors import ConfigError
from slurm.environment import for_script
from slurm.errors import SlurmError
from slurm.render_once import render_look
from slurm.spec import JobSpec


def main(arguments: Sequence[str]) -> int:
    """Entry of the command. Raises ConfigError."""
    made = argparse.ArgumentParser(prog="rlpost doctor --image", description="What does an image lack?")
    made.add_argument("--cluster", metavar="PROFILE", required=True, help="FILE.toml, or a name in jobs/clusters")
    made.add_argument("recipe", nargs="?", type=Path, metavar="RECIPE.toml", help="the image must suffice for this one")
    made.add_argument("--cpu", action="store_true", help="for nodes without a GPU")
    made.add_argument("--json", action="store_true", help="for programs")
    made.add_argument("--dry-run", action="store_true", help="print the job and submit nothing")
    options = made.parse_args(arguments)
    words: list[str] = [flag for flag, given in (("--cpu", options.cpu), ("--json", options.json)) if given]
    config = load(files_of(options.recipe, {"cluster": options.cluster}), {}).config
    if options.recipe is not None:
        words += _needs_of(config)
    try:
        spec = look_spec(job_spec(config, driver_args=tuple(words)))
        with tempfile.TemporaryDirectory(dir=_shared(config.cluster.runs_dir), prefix=".image-") as folder:
            spec = replace(spec, run_folder=folder, output=folder.replace("%", "%%") + "/job.out")
            if options.dry_run:
                print(render_look(spec), end="")
                return 0
            return _submitted(render_look(spec), Path(folder))
    except SlurmError as error:
        raise ConfigError(str(error)) from error


def words_of_recipes(words: Sequence[str]) -> list[str]:
    """Words for ``bootstrap.image.doctor``: what a recipe among them needs in its place. Raises ConfigError."""
    found: list[str] = []
    for word in words:
        found += _needs_of(load(files_of(Path(word), {}), {}).config) if word.endswith(".toml") else [word]
    return found


def _needs_of(config: Config) -> list[str]:
    reasons = [need.setting for need in needs_transformer_engine(config) if need.is_required]
    return [f"--te-for={','.join(reasons)}"] if reasons else []


def look_spec(spec: JobSpec) -> JobSpec:
    """The same job with one node and half an hour, which never comes back."""
    once = replace(spec.with_python(sys.executable), job_name="rlpost-image", nodes=1, spare_nodes=0, requeue="never")
    return replace(once, time="30", signal_lead_s=60, home=str(PROJECT))


def _shared(runs_dir: str) -> Path:
    folder = Path(runs_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _submitted(script: str, folder: Path) -> int:
    """Submit, wait, show what was said."""
    path = folder / "job.sbatch"
    path.write_text(script)
    command = ["sbatch", "--wait", "--parsable", str(path)]
    try:
        # sbatch sends its environment to Slurm, which keeps it
        environ = for_script(without_keys(os.environ), script)
        waiting = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
    except FileNotFoundError:
        raise ConfigError("no sbatch on this host; run rlpost doctor --image inside the image instead") from None
    with waiting:
        assert waiting.stdout is not None
        job = waiting.stdout.readline().strip().partition(";")[0]
        if job:
            print(f"waiting for job {job}, one node", file=sys.stderr)
        try:
            code = waiting.wait()
        except KeyboardInterrupt:
            if job:
                subprocess.run(["scancel", job])
            raise
    return _show(folder, code)


def _show(folder: Path, code: int) -> int:
    """The findings, alone, on standard output; where the job made none, what Slurm and the container said on the
    other."""
    try:
        print((folder / "findings").read_text(), end="")
        return code
    except FileNotFoundError:
        logs = (path.read_text(errors="replace") for path in (*folder.glob("job.out"), *folder.glob("*.log")))
        print("".join(logs) or f"the job wrote nothing (sbatch: exit {code})", end="\n", file=sys.stderr)
        return code or 1
