"""One run folder, one live job: which folder a submission uses, and who may use it.

Input: the options of ``rlpost submit``. Output: a folder that this submission holds alone, or a
ConfigError with the job that has it. A rejected submission leaves no folder that it made.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from common.run_folder import LOCK_FILE, RunFolder, claim_folder
from rlpost.cli.runs import LOCAL, list_runs, local_is_alive, newest_job, settle
from rlpost.config.tree import Config
from rlpost.errors import ConfigError, suggestion
from slurm.errors import SubmitError, UnknownJobError
from slurm.queue import queue
from slurm.states import JobState
from slurm.submissions import explain

ANOTHER_SUBMISSION_S = 60.0
POLL_S = 0.2
COMPLETING_S = 30.0
"""How long a job may end (KillWait is 30 s by default) before its folder is refused."""
LIVE = (
    JobState.PENDING,
    JobState.CONFIGURING,
    JobState.EXPEDITING,
    JobState.RUNNING,
    JobState.SUSPENDED,
)


def choose_folder(run_folder: Path | None, config: Config, *, resume: bool) -> Path:
    """The folder of ``--run-folder``; else a new one, or the newest run of the recipe to resume.

    Raises:
        ConfigError: ``--resume`` of a run that does not exist; names the nearest ones.
    """
    runs_dir = Path(config.cluster.runs_dir)
    if run_folder is None and not resume:
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        return runs_dir / f"{config.cluster.job_name}-{stamp}"
    listing = list_runs(runs_dir if run_folder is None else run_folder.parent)
    names = [run.root.name for run in listing.runs]
    if run_folder is not None:
        if resume and not run_folder.exists():
            raise ConfigError(
                f"--resume --run-folder {run_folder}: no such folder{suggestion(run_folder.name, names)}; "
                "leave out --resume to start a new run there"
            )
        return run_folder
    # NAME-DATE-TIME of rlpost submit, NAME-JOBID of sbatch; not those of a recipe "NAME-large"
    pattern = re.escape(config.cluster.job_name) + r"-[\d_-]+"
    recipe_runs = [name for name in names if re.fullmatch(pattern, name)]
    if not recipe_runs:
        raise ConfigError(
            f"--resume: no run of {config.cluster.job_name} in {runs_dir.absolute()}; give its folder "
            "with --run-folder, or leave out --resume to start a new run"
        )
    return runs_dir / recipe_runs[0]


@contextmanager
def claim(root: Path, *, is_given: bool) -> Iterator[Path]:
    """Hold a run folder while its job is submitted; yield the folder.

    Of two submissions at the same moment, the second finds the job of the first. If Slurm rejects
    the job, or the folder cannot be completed, a folder that this call made is removed.

    Args:
        is_given: whether to use this very folder; otherwise the first unused name is taken.

    Raises:
        ConfigError: a job of this folder is queued or runs, or Slurm does not answer.
    """
    is_new = True
    if is_given:
        is_new = _make(root)
    else:
        root = claim_folder(root)
    with _hold_lock(root):
        refuse_live_job(RunFolder(root.absolute()))
        try:
            yield root
        except BaseException as error:
            is_rejected = isinstance(error, SubmitError) and not isinstance(error, UnknownJobError)
            if is_new and (is_rejected or not _may_have_a_job(RunFolder(root.absolute()))):
                shutil.rmtree(root, ignore_errors=True)
            raise


def _may_have_a_job(run: RunFolder) -> bool:
    """Whether the submission of a run has begun: the files of its job exist."""
    return run.script.exists() or (run.submitit.is_dir() and any(run.submitit.iterdir()))


def _make(root: Path) -> bool:
    """Create a folder unless it exists; whether this call created it."""
    root.parent.mkdir(parents=True, exist_ok=True)
    try:
        root.mkdir(mode=0o700)
    except FileExistsError:
        if not root.is_dir():
            raise ConfigError(f"--run-folder {root}: a file; choose another name") from None
        return False
    return True


def refuse_live_job(run: RunFolder) -> None:
    """Raise ConfigError if a job of the run is queued or runs: two would fence each other off.

    Also while Slurm does not answer: the job may be on a cluster whose controller is down. And
    while the outcome of an earlier submission is unknown, unless this host has no Slurm.
    """
    for unknown in settle(run, gives_up=True):
        if unknown.is_of_the_run and shutil.which("squeue"):
            raise ConfigError(f"--run-folder {run.root}: {explain(unknown)}")
    job_id = newest_job(run)
    if job_id is None:
        return
    if job_id.startswith(LOCAL):
        if local_is_alive(job_id):
            raise ConfigError(
                f"--run-folder {run.root}: {run.root.name} runs on this machine; end it with rlpost "
                f"cancel {run.root.name}, or use another folder"
            )
        return
    state = _state_of(run, job_id)
    if state is JobState.COMPLETING:
        raise ConfigError(
            f"--run-folder {run.root}: job {job_id} of {run.root.name} is ending, or is being "
            "requeued; submit when squeue does not show it any more"
        )
    if state in LIVE:
        raise ConfigError(
            f"--run-folder {run.root}: job {job_id} of {run.root.name} is {state} and restarts "
            f"automatically; to change its settings, rlpost cancel {run.root.name} first"
        )


def _state_of(run: RunFolder, job_id: str) -> JobState:
    """State of a job, after a short wait for the end of one that is completing.

    Raises:
        ConfigError: Slurm does not say whether the job is live.
    """
    deadline = time.monotonic() + COMPLETING_S
    entry = queue([job_id])[job_id]
    while entry.state is JobState.COMPLETING and time.monotonic() < deadline:
        time.sleep(POLL_S)
        entry = queue([job_id])[job_id]
    # A host without Slurm's commands may have a copy of the folder.
    if entry.state is JobState.UNKNOWN and not entry.is_over and shutil.which("squeue"):
        raise ConfigError(
            f"--run-folder {run.root}: job {job_id} of {run.root.name} may be queued or run: "
            f"{entry.reason or 'squeue shows a state that is not known'}; submit again when squeue "
            "answers, or use another folder"
        )
    return entry.state


@contextmanager
def _hold_lock(root: Path) -> Iterator[None]:
    """Hold the lock of a run folder; without one where the file system has no locks."""
    descriptor = os.open(root / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _lock(descriptor, root)
        yield
    finally:
        os.close(descriptor)  # releases the lock


def _lock(descriptor: int, root: Path) -> None:
    deadline = time.monotonic() + ANOTHER_SUBMISSION_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"--run-folder {root}: another rlpost submit has been using it for "
                    f"{ANOTHER_SUBMISSION_S:.0f} s; wait for it, or end it"
                ) from None
        except OSError:
            return
        time.sleep(POLL_S)
