"""``python -m rlpost.submit RECIPE``: submit a recipe, or run it on this machine without Slurm.

Validates everything first, then creates the run folder, copies the code into it and submits the
job through submitit.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from common.files import read_object, text_or_empty
from common.local_gpus import read_local_gpus
from common.run_folder import RunFolder, RunFolderError, create_run_folder
from common.run_identity import copy_words, original_of, settle_identity
from rlpost.cli.check_settings import absent, check, notes
from rlpost.cli.command_line import make_parser, no_recipe, settings
from rlpost.cli.entry import run_command
from rlpost.cli.job import as_the_job_would, job_spec, local_disk_notes, time_notes
from rlpost.cli.outcome import conclude, latest_attempt, wait_for_end
from rlpost.cli.planned_gpus import GPU_MEMORY
from rlpost.cli.resume_changes import change_notes
from rlpost.cli.run_claim import choose_folder, claim
from rlpost.cli.secret_file import store_keys, take_keys
from rlpost.cli.stack_check import StackCheck
from rlpost.cli.waiting_notes import CHECKS, explained
from rlpost.config import extensions
from rlpost.config.arguments import add_switch
from rlpost.config.checks.batch import batch_problems
from rlpost.config.checks.context_length import with_pool
from rlpost.config.checks.layout import layout_problems
from rlpost.config.keys import without_keys
from rlpost.config.load import Loaded, dump
from rlpost.config.masking import masked_words, restored
from rlpost.config.tree import Config
from rlpost.config.wording import spelled, with_values
from rlpost.errors import ConfigError
from slurm.client import expected_start, is_available
from slurm.errors import SlurmError
from slurm.render import render_sbatch
from slurm.snapshot import snapshot_code
from slurm.spec import JobSpec, completed
from slurm.variables import submission_environment, unknown_variables

if TYPE_CHECKING:
    from slurm.executor import Where

PROJECT = Path(__file__).parents[2]
NO_GPU = (
    "this machine has no GPU: each GPU of the settings and of the report is a process on its CPUs"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of ``python -m rlpost.submit``."""
    return run_command(submit_main, arguments)


def submit_main(arguments: Sequence[str], *, told: Collection[str] = ()) -> int:
    """``rlpost submit RECIPE``; ``told``: notes that were printed before. Raises ConfigError."""
    # first: a misspelled variable may be the cause of the problems below
    print_notes(unknown_variables(os.environ), told)
    parser = submit_parser("rlpost submit", "Check a recipe, create its run folder and submit it.")
    options, loaded = settings(parser, arguments)
    if options.recipe is None and not loaded.origins:
        raise no_recipe("rlpost submit tiny")
    root = choose_folder(options.run_folder, loaded.config, resume=options.resume)
    if options.resume and options.run_folder is None:
        print(f"resuming {root}")
    if options.resume:
        earlier = read_object(RunFolder(root.absolute()).run_json)
        loaded = replace(loaded, config=restored(loaded.config, earlier))
        if (original := original_of(root)) is not None:
            print_notes([copy_words(root, original)])
    with explained(CHECKS):
        config, local, said = check_run(options, loaded, root)
    planned = RunFolder(root.absolute())
    if options.resume:
        said = [*change_notes(text_or_empty(planned.run_json), config), *said]
    print_notes(said, told)
    if options.rehearse is not None:
        extensions.rehearsal()(config, options.rehearse)
    try:
        spec = job_spec(config)
        for part in extensions.job_parts():  # a problem is found before the run is submitted
            part.check(config, planned)
        if options.dry_run:
            print(render_sbatch(completed(spec, planned, home=planned.code)), end="")
            for part in extensions.job_parts():
                print_notes([f"{line} with it" for line in part.planned(config, planned)])
            return 0
        if options.test_only:
            print(_query_start(completed(spec, planned, home=PROJECT)))
            return 0
        has_no_gpu = local and not read_local_gpus()
        if has_no_gpu:
            extensions.check_trainer_without_gpus()
        extensions.check_mirrors(config, planned)
        follow = extensions.follow()
        from slurm.executor import submit  # loads submitit

        where: Where = "local" if local else "slurm"
        if options.debug:
            where = "debug"
        with claim(root, is_given=options.resume or options.run_folder is not None) as root:
            run = create_run_folder(root, dump(config), resume=options.resume)
            settle_identity(run.root)
            with explained("the copy of the code (usually 1 s, a minute on a slow file system)"):
                snapshot_code(PROJECT, run.code, without_keys(os.environ))
            store_keys(run, os.environ)  # before sbatch, whose environment Slurm keeps
            attempt_before = latest_attempt(run)
            with explained("the submission (usually 1 s, longer while slurmctld is busy)"):
                job_id = submit(spec, run, home=run.code, where=where)
        for part in extensions.job_parts() if where == "slurm" else ():
            if line := part.submit(config, run, job_id):
                print(line)
    except (SlurmError, RunFolderError) as error:
        raise ConfigError(str(error)) from error
    if has_no_gpu:
        print_notes([NO_GPU])
    print(f"submitted {job_id}\nrun folder {run.root}")
    for part in extensions.job_parts() if where == "slurm" else ():
        part.submit_optional(config, run, job_id)
    resume = resume_command(arguments, run.root, program_words())
    if options.debug:
        return conclude(run, resume=resume, earlier=attempt_before)
    wait = local if options.wait is None else options.wait
    if wait and not local:
        print(f"job {job_id} continues if this command ends; rlpost cancel {run.root} ends it")
    if not wait:
        return 0
    if follow is None:
        return wait_for_end(run, job_id, started_it=local, resume=resume, earlier=attempt_before)
    return follow(
        run, job_id, started_it=local, resume=resume, earlier=attempt_before, explains=True
    )


def program_words() -> list[str]:
    """The words that call this rlpost in the user's shell, also where no environment is active."""
    script, beside = shutil.which("rlpost"), Path(sys.executable).parent / "rlpost"
    if script is not None and beside.exists() and os.path.samefile(script, beside):
        return ["rlpost"]
    return [sys.executable, "-m", "rlpost"]


def resume_command(
    arguments: Sequence[str], root: Path, program: Sequence[str] = ("rlpost",)
) -> str:
    """The command that resumes the run of a submission; without keys and other secrets.

    >>> resume_command(["tiny", "--local"], Path("/runs/tiny-1"))
    'rlpost submit tiny --local --resume --run-folder /runs/tiny-1'
    """
    words = masked_words(take_keys(arguments, {}))
    added = [] if "--resume" in words else ["--resume"]
    if not any(word.partition("=")[0] == "--run-folder" for word in words):
        added += ["--run-folder", str(root)]
    return shlex.join([*program, "submit", *words, *added])


def print_notes(notes: Sequence[str], told: Collection[str] = ()) -> None:
    """Print each note once, on standard error; not those in ``told``."""
    for note in dict.fromkeys(notes):
        if note not in told:
            print(f"note: {note}", file=sys.stderr)


def check_run(
    options: argparse.Namespace, loaded: Loaded, root: Path
) -> tuple[Config, bool, list[str]]:
    """Check the settings of a run in ``root``, before anything is created.

    Returns: the settings as they are submitted, whether the run is on this machine, and notes for
        the user. Raises ConfigError.
    """
    config = loaded.config
    local_flag = next((f"--{name}" for name in ("local", "debug") if getattr(options, name)), None)
    local = local_flag is not None or not is_available()
    starts_here = local and not (options.dry_run or options.test_only)
    if starts_here:
        _check_local(
            config,
            "there is no Slurm on this machine"
            if local_flag is None
            else f"{local_flag} excludes Slurm",
        )
    if local and not options.dry_run and config.cluster.container == "auto":
        config = with_values(config, container="none")
    seen, why = (config, "") if options.dry_run else as_the_job_would(config)
    stack = None if options.dry_run else StackCheck(config)
    has_gpus = not starts_here or bool(read_local_gpus())
    seen = with_pool(seen, has_gpus=has_gpus)
    try:
        check(seen, run=root, recipe=options.recipe, origins=loaded.origins, is_dry=options.dry_run)
    except ConfigError:
        if stack is not None:
            stack.cancel()
        raise
    said = list(absent(config, options.recipe)) if options.dry_run else []
    if stack is not None:
        problems, stack_notes = stack.finish()
        if problems:
            raise ConfigError("\n".join(problems))
        said += stack_notes
    if why:
        said.append(f"container {why}")
    said += notes(with_pool(config, has_gpus=has_gpus))
    said += [*time_notes(config), *([] if local else local_disk_notes(config))]
    return config, local, said


def _check_local(config: Config, why: str) -> None:
    """Raise ConfigError for settings that a run on this machine does not support."""
    problems = []
    if config.num_nodes > 1:
        one_node = with_values(config, nodes=1, actor_num_nodes=None)
        fits = not layout_problems(one_node) and not batch_problems(one_node)
        one = "use --nodes 1" + (" --actor-num-nodes 1" if config.cluster.actor_num_nodes else "")
        problems.append(
            f"--nodes {config.num_nodes}: {why}, so the run has only this machine; "
            f"{one + ', or ' if fits else ''}submit where there is Slurm"
        )
    if config.cluster.container not in ("none", "auto"):
        problems.append(
            f"{spelled(config, 'container')}: {why}, so the run has no container; use --container none, or submit "
            "where there is Slurm"
        )
    for part in extensions.job_parts():
        problems += part.problems(config, why)
    if problems:
        raise ConfigError("\n".join(problems))


def _query_start(spec: JobSpec) -> str:
    """Slurm's estimate for a job that is not submitted (sbatch --test-only)."""
    if not is_available():
        raise ConfigError(
            "--test-only: there is no Slurm on this machine; use --dry-run to see the script"
        )
    text = render_sbatch(spec)
    with tempfile.NamedTemporaryFile("w", suffix=".sbatch") as script:
        script.write(text)
        script.flush()
        return expected_start(
            Path(script.name), submission_environment(without_keys(os.environ), text)
        )


def submit_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """A parser with the options of a submission and a flag for every setting."""
    parser = make_parser(prog, description)
    add_switch(parser, "--local", "run on this machine; the default where there is no Slurm")
    add_switch(
        parser, "--debug", "run on this machine in this process; a failure enters the debugger"
    )
    add_switch(parser, "--dry-run", "print the batch script and submit nothing")
    add_switch(
        parser, "--test-only", "ask Slurm when and where the job would start, without submitting it"
    )
    parser.add_argument(
        "--run-folder", type=Path, metavar="FOLDER", help="run folder (default: RUNS_DIR/NAME-TIME)"
    )
    parser.add_argument(
        "--rehearse",
        nargs="?",
        const=GPU_MEMORY,
        metavar="SIZE",
        help="rehearse it first, for GPUs of this memory, and submit only if it finds no fault "
        f"(default: {GPU_MEMORY})",
    )
    add_switch(parser, "--resume", "resume the run in the folder")
    parser.add_argument(
        "--wait",
        action=argparse.BooleanOptionalAction,
        help="follow the run to its end and exit with its result (default with --local)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
