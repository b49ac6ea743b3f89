"""``python -m rlpost.submit RECIPE``: from a recipe to a submitted job, or to a run on this machine without Slurm.

Everything that can be known wrong is checked first; then a run folder is made, the code copied into it, and the job
handed to submitit.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from rlpost.check import check, notes
from rlpost.cli.entry import run_command
from rlpost.cli.follow import conclude, follow
from rlpost.cli.job import as_the_job_would, job_spec, with_container
from rlpost.cli.runs import LOCAL, local_is_alive, newest_job
from rlpost.cli.scaled import add_scale_down, require_model
from rlpost.cli.secret_file import has_wandb_key, put_away
from rlpost.cli.settings import parser, settings
from rlpost.config.keys import without_keys
from rlpost.config.load import dump
from rlpost.config.tree import Config
from rlpost.errors import ConfigError
from slurm.client import expected_start, is_available
from slurm.environment import for_script
from slurm.errors import SlurmError
from slurm.executor import Where, completed, submit
from slurm.queue import queue
from slurm.render import render_sbatch
from slurm.run_folder import RunFolder, create_run_folder
from slurm.snapshot import snapshot_code
from slurm.spec import JobSpec
from slurm.states import JobState

PROJECT = Path(__file__).parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of ``python -m rlpost.submit``."""
    return run_command(submit_main, arguments)


def submit_main(arguments: Sequence[str]) -> int:
    """``rlpost submit RECIPE``. Raises ConfigError."""
    made = parser("python -m rlpost.submit", "Check a recipe, make its run folder and submit it.")
    _add_options(made)
    options, loaded = settings(made, arguments)
    config = loaded.config
    if options.recipe is None and not loaded.origins:
        raise ConfigError("which recipe? the first word is a TOML file, for instance jobs/recipes/tiny.toml")
    require_model(options.recipe, config)
    root = options.run_folder or _new_run_folder(config)
    local = options.local or options.debug or not is_available()
    if local and not options.dry_run:
        config = _without_slurm(config)
    seen, why = (config, "") if options.dry_run else as_the_job_would(config)
    check(seen, run=root)
    if why:
        print(f"note: container {why}", file=sys.stderr)
    for note in notes(config):
        print(f"note: {note}", file=sys.stderr)
    try:
        spec = job_spec(config)
        if options.dry_run:
            run = RunFolder(root.absolute())
            print(render_sbatch(completed(spec, run, home=run.code)), end="")
            return 0
        if options.test_only:
            print(_tested(completed(spec, RunFolder(root.absolute()), home=PROJECT)))
            return 0
        if local and config.num_nodes > 1:
            raise ConfigError(f"cluster.nodes = {config.num_nodes}: without Slurm there is only this machine; use 1")
        _check_wandb_key(config, RunFolder(root))
        if options.resume:
            _check_it_has_ended(RunFolder(root.absolute()))
        run = create_run_folder(root, dump(config), resume=options.resume)
        snapshot_code(PROJECT, run.code)
        put_away(run, os.environ)  # sbatch sends its environment to Slurm, which keeps it
        where: Where = "debug" if options.debug else "local" if local else "slurm"
        job_id = submit(spec, run, home=run.code, where=where)
    except SlurmError as error:
        raise ConfigError(str(error)) from error
    print(f"submitted {job_id}\nrun folder {run.root}")
    if options.debug:
        return conclude(run)
    wait = local if options.wait is None else options.wait
    return follow(run, job_id, started_it=local) if wait else 0


def _without_slurm(config: Config) -> Config:
    """The settings of a run on this machine, where ``auto`` is no container. Raises ConfigError."""
    backend = config.cluster.container
    if backend not in ("none", "auto"):
        raise ConfigError(
            f"cluster.container (--container) = {backend!r}: a run without Slurm (none found, or --local) has no "
            "container; use --container none"
        )
    return with_container(config, "none")


def _check_it_has_ended(run: RunFolder) -> None:
    """Raises ConfigError when a job of the run is there: two would drive each other out."""
    if (job_id := newest_job(run)) is None:
        return
    if job_id.startswith(LOCAL):
        state = JobState.RUNNING if local_is_alive(job_id) else JobState.UNKNOWN
    else:
        state = queue([job_id])[job_id].state
    if state in (JobState.PENDING, JobState.CONFIGURING, JobState.RUNNING, JobState.SUSPENDED):
        raise ConfigError(
            f"--resume: job {job_id} of {run.root.name} is {state} and goes on by itself; for other settings "
            f"rlpost cancel {run.root.name} first"
        )


def _check_wandb_key(config: Config, run: RunFolder) -> None:
    if config.wandb.is_on and config.wandb.wandb_mode == "online" and not has_wandb_key(run, os.environ):
        raise ConfigError(
            "wandb.use_wandb = true (--use-wandb): no key for Weights & Biases; give --wandb-key, set WANDB_API_KEY, "
            "or use --wandb-mode offline"
        )


def _tested(spec: JobSpec) -> str:
    """What Slurm says about a job that it is not given."""
    if not is_available():
        raise ConfigError("--test-only asks Slurm, and there is none here")
    text = render_sbatch(spec)
    with tempfile.NamedTemporaryFile("w", suffix=".sbatch") as script:
        script.write(text)
        script.flush()
        return expected_start(Path(script.name), for_script(without_keys(os.environ), text))


def _add_options(made: argparse.ArgumentParser) -> None:
    add_scale_down(made)
    made.add_argument("--local", action="store_true", help="run on this machine; the default where there is no Slurm")
    made.add_argument(
        "--debug", action="store_true", help="run on this machine in this very process; a failure enters the debugger"
    )
    made.add_argument("--dry-run", action="store_true", help="print the batch script and submit nothing")
    made.add_argument(
        "--test-only", action="store_true", help="ask Slurm when and where the job would start and submit nothing"
    )
    made.add_argument(
        "--run-folder", type=Path, metavar="FOLDER", help="where the run lives; RUNS_DIR/NAME-TIME if not given"
    )
    made.add_argument("--resume", action="store_true", help="go on with the run that the folder holds")
    made.add_argument(
        "--wait",
        action=argparse.BooleanOptionalAction,
        help="follow the run to its end and leave with its result (with --local: the default)",
    )


def _new_run_folder(config: Config) -> Path:
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path(config.cluster.runs_dir) / f"{config.cluster.job_name}-{stamp}"


if __name__ == "__main__":
    sys.exit(main())
