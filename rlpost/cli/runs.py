"""Find the run that a command names.

That is a folder, a name in the runs folder, a job id, or by default the newest run.

Input: a name, or none, and the runs folder. Output: a ``RunFolder`` and its job id. Slurm is
queried by ``running_job``, and while the outcome of a submission is unknown
(``slurm.submissions``).
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from common.files import read_object
from common.ledger import Entry
from common.run_folder import RunFolder
from common.run_identity import original_of
from common.units import counted
from rlpost.errors import ConfigError, suggestion
from slurm import submissions
from slurm.job_id import cluster_of, number_of, on_cluster
from slurm.queue import QueueEntry, queue
from slurm.states import JobState
from slurm.submissions import Submission, explain, unknown_submissions
from slurm.variables import submission_environment

LOCAL = "local-"  # begins the job id of a run on this machine
KTHREADD = 2  # parent of the threads of the kernel, which have no command line either
RUNS_DIR = Path("runs")  # the default of the settings' runs_dir, without loading them
RUNS_DIR_VARIABLE = "RLPOST_RUNS_DIR"
NAMES_SHOWN = 8
AGAIN = "again"  # the answer to a verdict after which the job restarts
_ENDS: dict[str, JobState | None] = {
    "done": JobState.COMPLETED,
    "cancelled": JobState.CANCELLED,
    "verdict": None,  # by the verdict
    "submitted": None,
    "attempt": None,
    "started": None,
}
"""Events that begin or end a run or an attempt, and the state of a run whose ledger ends so."""
_VERDICT_STATES = {"done": JobState.COMPLETED, "requeue": JobState.PREEMPTED}


def add_run_options(made: argparse.ArgumentParser, *, positional: bool = True) -> None:
    """Add the options that name one run: RUN, or ``--run RUN`` if not ``positional``."""
    text = "folder, name or job id; the newest run if not given"
    if positional:
        made.add_argument("run", nargs="?", metavar="RUN", help=text)
    else:
        made.add_argument("--run", metavar="RUN", help=text)
    add_runs_dir(made)


def add_runs_dir(made: argparse.ArgumentParser) -> None:
    """Add ``--runs-dir``, which has the name of the setting."""
    made.add_argument(
        "--runs-dir",
        type=Path,
        metavar="FOLDER",
        default=Path(os.environ.get(RUNS_DIR_VARIABLE) or RUNS_DIR),
        help=f"folder of the runs (default: ${RUNS_DIR_VARIABLE}, else {RUNS_DIR})",
    )


def find_run(word: str | None, runs_dir: Path) -> RunFolder:
    """Return the run that ``word`` names, after a look for jobs of unanswered submissions.

    Raises ConfigError with the existing names.
    """
    run = _find_folder(word, runs_dir)
    settle(run)
    return run


def _find_folder(word: str | None, runs_dir: Path) -> RunFolder:
    if word is not None and _is_run(Path(word)):
        return RunFolder(Path(word).absolute())
    listing = list_runs(runs_dir)
    runs = listing.runs
    hidden = f"; {listing.hidden_words}" if listing.num_hidden else ""
    if word is None:
        if not runs:
            raise ConfigError(
                f"no run in {runs_dir.absolute()}; name one, or its folder with --runs-dir{hidden}"
            )
        return next((run for run in runs if _is_own(run)), runs[0])
    named = [run for run in runs if run.root.name == word] or [
        run for run in runs if any(_is_id_of(word, job) for job in job_ids(run))
    ]
    if named:
        return named[0]
    names = [run.root.name for run in runs]
    known = f"; there are {', '.join(names[:NAMES_SHOWN])}" if names else ""
    raise ConfigError(
        f"{word}: neither a run folder nor the name or job id of a run in {runs_dir.absolute()}"
        f"{suggestion(word, names)}{known}{hidden}"
    )


def settle(run: RunFolder, *, gives_up: bool = False) -> list[Submission]:
    """``slurm.submissions.settle`` for a run; asks Slurm only if an outcome is unknown."""
    return submissions.settle(run.ledger, submission_environment(os.environ), gives_up=gives_up)


@dataclass(frozen=True, slots=True)
class RunsListing:
    """The runs of a folder, the one submitted last first.

    ``num_hidden`` counts folders that this user may not enter: a colleague's runs in a shared
    folder.
    """

    runs: Sequence[RunFolder]
    num_hidden: int = 0

    @property
    def hidden_words(self) -> str:
        """``1 folder that you may not enter is not shown``."""
        verb = "is" if self.num_hidden == 1 else "are"
        return f"{counted(self.num_hidden, 'folder')} that you may not enter {verb} not shown"


def list_runs(runs_dir: Path) -> RunsListing:
    """List a folder of runs. Raises OSError when the folder itself cannot be read."""
    folders, num_hidden = [], 0
    for path in runs_dir.iterdir() if runs_dir.is_dir() else ():
        try:
            if _is_run(path):
                folders.append(path)
        except OSError:  # Path.is_file raises EACCES, ESTALE and EIO
            num_hidden += 1
    # run.json is written when a run is submitted, and again when it is resumed.
    newest_first = sorted(folders, key=lambda path: (_when(path), path.name), reverse=True)
    return RunsListing([RunFolder(path.absolute()) for path in newest_first], num_hidden)


def job_ids(run: RunFolder) -> list[str]:
    """The jobs of a run in order, see ``slurm.job_id``. A run of plain sbatch is NAME-JOBID.

    A copy of a run has none before it is resumed: its ledger names those of the original. Empty for
    a ledger that cannot be read.
    """
    with suppress(OSError):
        if original_of(run.root) is not None:
            return []
    try:
        events = run.ledger.read()
    except OSError:
        return []
    ids = (entry.get("job_id") for entry in events)
    entries = [entry for entry, one in zip(events, ids, strict=True) if one and type(one) is str]
    if entries:
        return _with_clusters(entries)
    name = run.root.name
    if (
        not run.root.is_dir()
    ):  # a new folder, which `rlpost submit --run-folder` may name like a job
        return []
    # NAME-YYYYMMDD-HHMMSS, the folder of rlpost submit, holds no job id.
    named = re.search(r"-(\d+(?:_\d+)?)$", name)
    return [named[1]] if named and not re.search(r"-\d{8}-\d{6}$", name) else []


def _with_clusters(entries: Sequence[Entry]) -> list[str]:
    """Ids of the ledger with the cluster to which the run was submitted; jobs write numbers alone.

    A job may write before its submission is recorded.
    """
    submitted = {
        number_of(entry["job_id"]): cluster_of(entry["job_id"])
        for entry in entries
        if entry["event"] == "submitted"
    }
    ids, cluster = [], ""
    for entry in entries:
        number = number_of(entry["job_id"])
        cluster = cluster_of(entry["job_id"]) or submitted.get(number, cluster)
        ids.append(on_cluster(number, cluster))
    return list(dict.fromkeys(ids))


def _is_id_of(word: str, job: str) -> bool:
    return word == job or word == number_of(job)


def newest_job(run: RunFolder) -> str | None:
    """Return the job that runs it, or ran it last; None if it was never submitted."""
    return next(reversed(job_ids(run)), None)


def current_job(run: RunFolder) -> str:
    """Return the newest job of a run. Raises ConfigError if none is known."""
    if (job_id := newest_job(run)) is None:
        for unknown in unknown_submissions(run.ledger.read()):
            raise ConfigError(f"{run.root}: {explain(unknown)}")
        raise ConfigError(
            f"{run.root}: its ledger names no job, so it was never submitted; use rlpost submit RECIPE "
            f"--resume --run-folder {run.root}"
        )
    return job_id


def running_job(run: RunFolder, *, what_for: str) -> QueueEntry:
    """Return Slurm's entry of the newest job. Raises ConfigError unless it is running.

    ``what_for``: the remedy for a run without Slurm.
    """
    job_id = current_job(run)
    if job_id.startswith(LOCAL):
        raise ConfigError(f"{run.root.name} runs on this machine, not under Slurm; {what_for}")
    entry = queue([job_id])[job_id]
    if entry.state is not JobState.RUNNING:
        why = f" ({entry.reason})" if entry.reason else ""
        raise ConfigError(
            f"{run.root.name}: job {job_id} is {entry.state}{why}; this needs one that runs"
        )
    return entry


def of_ledger(entry: QueueEntry, events: Sequence[Entry]) -> QueueEntry:
    """The entry, with the state in which the ledger ends where Slurm's record does not hold it.

    That is a job that Slurm does not know, or one PREEMPTED: since Slurm 24.05 this is the final
    state of a job that was preempted once and restarted, however it ended.
    """
    if entry.state not in (JobState.UNKNOWN, JobState.PREEMPTED):
        return entry
    ends = (one for one in reversed(events) if one.get("event") in _ENDS)
    ended: Entry = next(ends, {})
    state = _ENDS.get(str(ended.get("event")))
    if ended.get("event") == "verdict" and ended.get("answer") != AGAIN:
        state = _VERDICT_STATES.get(str(ended.get("verdict")), JobState.FAILED)
    return entry if state is None else replace(entry, state=state, reason="")


def local_is_alive(job_id: str) -> bool:
    """Whether a local run's process is alive; its number may have been reused."""
    try:
        process = psutil.Process(int(job_id.removeprefix(LOCAL)))
        words = process.cmdline()
        # Linux closes the pipe that Popen waits for before the new program has its command line.
        # submitit: the controller of a run that an earlier version started
        is_local_run = any(name in word for word in words for name in ("slurm.local", "submitit"))
        is_starting = not words and process.ppid() != KTHREADD
        return process.status() != psutil.STATUS_ZOMBIE and (is_local_run or is_starting)
    except psutil.NoSuchProcess:
        return False


def is_evaluation(settings: Mapping[str, Any]) -> bool:
    """Return whether a run with these settings is one of ``rlpost evaluate``, which trains nothing."""
    return bool(settings.get("debug", {}).get("debug_eval_only"))


def settings_of(run: RunFolder) -> dict[str, Any]:
    """Return the tables of run.json; empty if it is broken, so that a status never fails."""
    tables = read_object(run.run_json).items()
    return {name: table for name, table in tables if isinstance(table, dict)}


def last(entries: Iterable[Entry], event: str) -> Entry:
    """The last entry of a ledger for an event; empty when there is none."""
    return next((entry for entry in reversed(list(entries)) if entry.get("event") == event), {})


def _is_run(path: Path) -> bool:
    return (path / "run.json").is_file() or (path / "attempts").is_dir()


def _is_own(run: RunFolder) -> bool:
    """Whether this user made a run; commands without RUN do not take a colleague's."""
    try:
        return run.root.stat().st_uid == os.geteuid()
    except OSError:
        return False


def _when(path: Path) -> float:
    marker = path / "run.json"
    try:
        return (marker if marker.exists() else path).stat().st_mtime
    except OSError:
        return 0.0


def cause_in(path: Path) -> str:
    """The cause in a verdict.json; empty if it cannot be read."""
    return str(read_object(path).get("cause", ""))
