"""The outcome of a run: whether it is over, its results, or what failed, and the exit code.

Input: the run folder, and the job id for a run that has not ended. Output: lines on standard output
and an exit code.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from common.attempt import DRIVER_LOG, VERDICT_FILE, VERDICT_JSON
from common.error_lines import with_remedy
from common.exit_codes import EXIT_DONE, EXIT_PREEMPTED
from common.files import text_or_empty
from common.run_folder import RunFolder
from common.stop_file import request_stop
from rlpost.cli.runs import LOCAL, cause_in, is_evaluation, local_is_alive, newest_job, settings_of
from rlpost.config.extensions import command
from rlpost.observe.writer import eval_rewards, read_metrics
from slurm.client import POLL_S
from slurm.queue import queue

SHOWN_EVERY_S = 0.5
ENDING_POLL_S = 3.0
STOPPING = "stopping: the run saves its state and ends, usually within seconds (Ctrl-C again: leave it running)"
EXIT_CODES = {"done": EXIT_DONE, "requeue": EXIT_PREEMPTED, "config": 2}


def wait_for_end(
    run: RunFolder, job_id: str, *, started_it: bool = False, resume: str = "", earlier: str = ""
) -> int:
    """Wait until the job is over, then ``conclude``, where no extension follows the log.

    An interrupt is handled as in ``show_until_over``.
    """
    show_until_over(run, job_id, started_it=started_it)
    return conclude(run, resume=resume, earlier=earlier)


def show_until_over(
    run: RunFolder, job_id: str, show: Callable[[], None] = lambda: None, *, started_it: bool
) -> None:
    """Call ``show`` until the job is over, and once after it.

    Ctrl-C, or USR2 as to a job, detaches and the run continues. At a local run that this process has
    started (``started_it``) the first Ctrl-C requests a stop, at which the run saves, and the second
    detaches.

    Raises KeyboardInterrupt when it detaches.
    """
    with suppress(ValueError):  # another thread than the main one has no handlers
        signal.signal(signal.SIGUSR2, _interrupt)
    is_over = end_check(run, job_id)
    reason = ""  # of a request to stop
    asked = False
    while True:
        try:
            over = is_over()
            if reason:
                _leave_closed_pipe()
                asked = asked or _request_stop(run, reason)
            try:
                show()
            except BrokenPipeError:
                if not reason:
                    raise
                _leave_closed_pipe()  # the reader ended between the look above and the write
            if over:
                return
            time.sleep(SHOWN_EVERY_S)
        except KeyboardInterrupt as interrupt:
            if reason or not started_it:
                print(f"left running; see {command(f'status {run.root}')}", file=sys.stderr)
                raise
            reason = str(interrupt) or "Ctrl-C"
            print(STOPPING, file=sys.stderr)


def _interrupt(number: int, _: object) -> None:
    """Do at a signal what Python does at Ctrl-C."""
    raise KeyboardInterrupt(signal.Signals(number).name)


def _request_stop(run: RunFolder, reason: str) -> bool:
    """Write the STOP file of the attempt that this job has started; whether there is one yet."""
    latest = run.attempts / "latest"
    if not latest.exists() or (latest / VERDICT_FILE).exists():
        return False
    request_stop(latest.resolve(), reason)
    return True


def _leave_closed_pipe() -> None:
    """Print to standard error from now on if standard output is a pipe without a reader.

    Ctrl-C signals the whole pipeline, and so ends ``tee``, but a run saves before it ends.
    """
    with suppress(OSError):  # no file, as in a notebook
        poll = select.poll()
        poll.register(sys.stdout, 0)  # POLLERR is always reported
        if any(event & select.POLLERR for _, event in poll.poll(0)):
            os.dup2(sys.stderr.fileno(), sys.stdout.fileno())


def end_check(run: RunFolder, job_id: str) -> Callable[[], bool]:
    """Return a function whose result is whether the run is over.

    Slurm is polled more often once the attempt has written its verdict. The job then ends, is
    requeued, or is followed by another (``requeue = "chain"``).
    """
    if job_id.startswith(LOCAL):
        return lambda: not local_is_alive(job_id)
    polled_at = -POLL_S
    over = False

    def is_over() -> bool:
        nonlocal polled_at, over
        poll_s = ENDING_POLL_S if (run.attempts / "latest" / VERDICT_FILE).exists() else POLL_S
        if time.monotonic() - polled_at >= poll_s:
            newest = newest_job(run) or job_id
            polled_at = time.monotonic()
            over = queue([newest])[newest].is_over
        return over

    return is_over


def latest_attempt(run: RunFolder) -> str:
    """Return the name of the newest attempt; empty without one."""
    latest = run.attempts / "latest"
    return latest.resolve().name if latest.exists() else ""


def conclude(run: RunFolder, *, resume: str = "", earlier: str = "") -> int:
    """Print the outcome of a run that ended: its results, or what failed; return its exit code.

    ``resume`` is the command that resumes it, for a run that is not done. The verdict of the
    attempt ``earlier`` is not that of this run.
    """
    verdict = text_or_empty(run.attempts / "latest" / VERDICT_FILE).strip()
    if earlier and latest_attempt(run) == earlier:
        verdict = ""
    if verdict == "done":
        if not is_evaluation(settings_of(run)):  # whose table follows
            print("\n".join(summary(run)))
        return 0
    lines = _failure(run, verdict)
    if resume:
        lines.append(f"resume: {resume}")
    print("\n".join(lines))
    return EXIT_CODES.get(verdict, 1)


def _failure(run: RunFolder, verdict: str) -> list[str]:
    """What ended a run that is not done, and where its log is."""
    latest = run.attempts / "latest"
    if not verdict:
        logs = (
            run.submitit if (newest_job(run) or "").startswith(LOCAL) else run.root / "slurm-*.out"
        )
        return [f"ended: failed, and the agents left no verdict; see {logs} and {latest}"]
    cause = with_remedy(cause_in(latest / VERDICT_JSON)) or "unknown"
    log = latest.resolve() / DRIVER_LOG
    if not log.exists() or not log.stat().st_size:  # the agents' and Ray's logs explain it
        log = log.parent
    ended = (
        f"{verdict} (its state is saved, it can be resumed)" if verdict == "requeue" else verdict
    )
    return [f"ended: {ended}", f"cause: {cause}", f"log: {log}"]


def summary(run: RunFolder) -> list[str]:
    """Lines with the first and last reward of each evaluation set, and the files of a run."""
    lines = read_metrics(run.metrics)
    rewards = []
    for name in eval_rewards(*lines):
        points = [(line["step"], line[name]) for line in lines if name in line]
        (first_step, first), (last_step, last) = points[0], points[-1]
        change = f"{first:.3f} at step {first_step:.0f}"
        if last_step != first_step:
            change += f" -> {last:.3f} at step {last_step:.0f}"
        rewards.append(f"reward on {name.split('/')[1]}: {change}")
    files = [
        ("report", run.report_page),
        ("metrics", run.metrics),
    ]
    return [*rewards, *(f"{name} {path}" for name, path in files if path.exists())]
