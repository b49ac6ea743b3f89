"""``python -m rlpost.submit RECIPE``: from a recipe to a submitted job, or to a run on this machine without Slurm.

Everything that can be known wrong is checked first; then a run folder is made, the code copied into it, and the job
handed to submitit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from rlpost.check import check
from rlpost.cli.follow import follow
from rlpost.cli.settings import parser, run_command, settings
from rlpost.config.load import dump
from rlpost.config.tree import Config
from rlpost.errors import ConfigError
from slurm.client import is_available
from slurm.errors import SlurmError
from slurm.executor import completed, submit
from slurm.render import render_sbatch
from slurm.run_folder import RunFolder, create_run_folder
from slurm.snapshot import snapshot_code
from slurm.spec import JobSpec

PROJECT = Path(__file__).parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of ``python -m rlpost.submit``."""
    return run_command(_submit, arguments)


def job_spec(config: Config, *, driver_args: tuple[str, ...] = ()) -> JobSpec:
    """What the settings ask of Slurm. ``driver_args`` are those of ``rlpost.train`` beyond the run folder."""
    cluster = config.cluster
    agent_args = ["--bringup-deadline-s", str(cluster.bringup_deadline_s)]
    if cluster.socket_ifname is not None:
        agent_args += ["--socket-ifname", cluster.socket_ifname]
    if cluster.ray_object_store_memory is not None:
        agent_args += ["--object-store-memory", str(cluster.ray_object_store_memory)]
    return JobSpec(
        job_name=cluster.job_name,
        nodes=cluster.nodes,
        num_gpus_per_node=cluster.num_gpus_per_node,
        gpu_request=cluster.gpu_request,
        time=cluster.time,
        partition=cluster.partition,
        account=cluster.account,
        signal_lead_s=cluster.signal_lead_s,
        agent_args=tuple(agent_args),
        driver_args=driver_args,
    )


def _submit(arguments: Sequence[str]) -> int:
    made = parser("python -m rlpost.submit", "Check a recipe, make its run folder and submit it.")
    _add_options(made)
    options, loaded = settings(made, arguments)
    config = loaded.config
    if options.recipe is None:
        raise ConfigError("which recipe? the first word is a TOML file, for instance jobs/recipes/tiny.toml")
    check(config)
    local = options.local or not is_available()
    try:
        spec = job_spec(config)
        root = options.run_folder or _new_run_folder(config)
        if options.dry_run:
            run = RunFolder(root.absolute())
            print(render_sbatch(completed(spec, run, home=run.code)), end="")
            return 0
        run = create_run_folder(root, dump(config), resume=options.resume)
        snapshot_code(PROJECT, run.code)
        job_id = submit(spec, run, home=run.code, local=local)
    except SlurmError as error:
        raise ConfigError(str(error)) from error
    print(f"submitted {job_id}\nrun folder {run.root}")
    wait = local if options.wait is None else options.wait
    return follow(run, job_id) if wait else 0


def _add_options(made: argparse.ArgumentParser) -> None:
    made.add_argument("--local", action="store_true", help="run on this machine; the default where there is no Slurm")
    made.add_argument("--dry-run", action="store_true", help="print the batch script and submit nothing")
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
