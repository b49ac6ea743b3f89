"""``rlpost cancel`` and ``rlpost requeue``: cancel or requeue a run."""

from __future__ import annotations

from collections.abc import Sequence

from common.attempt import VERDICT_FILE
from common.run_folder import RunFolder
from common.stop_file import request_stop
from rlpost.cli.runs import (
    LOCAL,
    add_run_options,
    current_job,
    find_run,
    job_ids,
    local_is_alive,
    newest_job,
    of_ledger,
    running_job,
    settings_of,
    settle,
)
from rlpost.config import extensions
from rlpost.config.arguments import Parser
from rlpost.errors import ConfigError
from rlpost.observe.reporter import try_to_write_report
from slurm.arrays import engine_tasks
from slurm.client import ask_to_requeue, cancel
from slurm.job_id import cluster_of, on_cluster
from slurm.queue import queue
from slurm.states import JobState
from slurm.submissions import explain


def cancel_main(arguments: Sequence[str]) -> int:
    """End a run permanently: a cancelled job is never requeued. Its folder stays."""
    parser = Parser(prog="rlpost cancel", description="End a run without a restart.")
    add_run_options(parser)
    options = parser.parse_args(arguments)
    run = find_run(options.run, options.runs_dir)
    job_id = current_job(run)
    if job_id.startswith(LOCAL):
        if not local_is_alive(job_id):
            raise ConfigError(f"{run.root.name}: {job_id} has already ended; nothing to cancel")
        latest = run.attempts / "latest"
        # there is no attempt yet, or only an earlier one
        if not latest.exists() or (latest / VERDICT_FILE).exists():
            raise ConfigError(
                f"{run.root.name}: {job_id} is starting or ending; try again in a moment"
            )
        run.ledger.append("cancelled", job_id=job_id)
        request_stop(latest.resolve(), "rlpost cancel")
    else:
        _cancel_all(run, job_id)
        if run.report_page.exists():  # the job may never have started, and writes it no more
            try_to_write_report(run)
    print(
        f"cancelled {run.root.name} ({job_id}); resume it later with its recipe: rlpost submit RECIPE "
        f"--resume --run-folder {run.root}"
    )
    return 0


def _cancel_all(run: RunFolder, job_id: str) -> None:
    """Cancel all unfinished jobs: in a chain the next may be pending while the last one ends.

    Raises ConfigError also if a job may be queued that is not known yet, after the others are
    cancelled.
    """
    unknown = settle(run, gives_up=True)
    job_id = newest_job(run) or job_id
    entry = queue([job_id])[job_id]
    if entry.is_over and not unknown:
        entry = of_ledger(entry, run.ledger.read())
        raise ConfigError(
            f"{run.root.name}: job {job_id} has already ended ({entry.state}); nothing to cancel"
        )
    if entry.state is JobState.UNKNOWN and not entry.is_over:
        raise ConfigError(f"{run.root.name}: {entry.reason}; nothing was cancelled: try again")
    # First: the batch script reads the ledger before it requeues or chains a job.
    run.ledger.append("cancelled", job_id=job_id)
    for one in queue(job_ids(run)).values():
        if not one.is_over:
            cancel(one.job_id)
    for part in extensions.job_parts():
        part.cancel(run)
    for array in _engine_arrays(run):
        cancel(array)
    for submission in unknown:
        raise ConfigError(f"{run.root.name}: the known jobs are cancelled; {explain(submission)}")


def _engine_arrays(run: RunFolder) -> list[str]:
    """Ids of the arrays of engine jobs in the queue, by the ledger: no extension may be here."""
    tasks = engine_tasks(run.ledger.read())
    entries = queue(tasks).values() if tasks else ()
    return sorted(
        {
            on_cluster(entry.job_id.partition("_")[0], cluster_of(entry.job_id))
            for entry in entries
            if not entry.is_over
        }
    )


def requeue_main(arguments: Sequence[str]) -> int:
    """Request a checkpoint, a requeue and a resume, as at a preemption."""
    parser = Parser(
        prog="rlpost requeue", description="Save, requeue and resume, as at a preemption."
    )
    add_run_options(parser)
    options = parser.parse_args(arguments)
    run = find_run(options.run, options.runs_dir)
    otherwise = "it would not restart: use rlpost cancel, then submit --resume"
    job_id = running_job(run, what_for=otherwise).job_id
    if settings_of(run).get("cluster", {}).get("requeue") == "never":
        raise ConfigError(f"{run.root.name}: --requeue never, so {otherwise}")
    ask_to_requeue(job_id)
    print(
        f"asked {run.root.name} (job {job_id}) to save and requeue; see "
        + extensions.command(f"logs -f {run.root.name}")
    )
    return 0
