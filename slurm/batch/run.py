"""One start of a run: attempt folder, image, agents, verdict, requeue. Python 3.6.

Invariant: a job that committed its state is requeued whatever fails here, unless it was cancelled,
its budgets are spent, or its end is final.
"""

import json
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import List, Mapping, NamedTuple, Optional, Sequence, Tuple

from common.attempt import CONTAINER_PREFIX, END_TIME_FILE, STOP_FILE, VERDICT_FILE
from common.exit_codes import EXIT_CONFIG, EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED
from common.files import is_there, text_or_empty
from common.ledger import Ledger
from common.stop_file import write_stop
from slurm import supervise
from slurm.batch.attempt import launch_log, start_attempt, stop_message
from slurm.batch.host import End, Host, shell_code
from slurm.batch.options import Options, expand
from slurm.batch.place import Place, find_run_folder
from slurm.batch.signals import ignore_term
from slurm.batch.steps import agents_step, command_prefix, page_step, watch_step
from slurm.causes import Finding
from slurm.evidence import leave_verdict
from slurm.job_id import (
    explain_submission,
    find_by_script,
    number_of,
    printed_ids,
    read_submission,
)
from slurm.submissions import (
    LOOKUP_S,
    Submission,
    announce,
    is_refused,
    look_up,
    may_be_queued,
    reject,
)
from slurm.supervise import Budgets, Ending, RestartDecision, exit_code
from slurm.variables import submission_environment

NO_REQUEUE = (
    "Slurm may not requeue this job (Requeue=0: set by the site or by --no-requeue); "
    "--requeue chain restarts a run by new jobs"
)
REFUSED = "the next job was refused"
FAILED = ("failed", "config", "none")
PAGE_S = 60


class Command(NamedTuple):
    """The words of a run: arguments of the agent and of the driver, flags after the file's name."""

    agent: List[str]
    driver: List[str]
    flags: List[str]


class Attempt(NamedTuple):
    """One start of the run."""

    number: int
    folder: Path
    run_folder: Path


def run(host: Host, options: Options, command: Command) -> End:
    """Run one attempt and decide what follows it.

    Raises:
        SpecError: a variable or a program is missing; nothing was created.
        OSError: the run folder cannot be written.
    """
    run_folder = find_run_folder(options, host.environ)
    place = host.find_place(options, command.agent, run_folder)
    end = _end_before_start(host, Path(place.run_folder))
    if end is not None:
        return end
    host.refuse_short_limit(options.signal_lead_s)
    if _is_requeue_forbidden(host, options):
        host.log(NO_REQUEUE if options.script else f"{NO_REQUEUE}; a restart will be a new job")
    folder = start_attempt(Path(place.run_folder))
    number = int(folder.name)
    attempt = Attempt(number, folder, Path(place.run_folder))
    nodes = host.environ.get("SLURM_JOB_NODELIST", "")
    host.log(f"job {host.job.name} attempt {number} on {nodes}: {folder}")
    host.note_end_time(options.signal_lead_s, folder / END_TIME_FILE)
    code, place = host.import_image(options, place, launch_log(folder), leaves_on_stop=True)
    if not _record_start(host, place, attempt):
        host.log("the job was cancelled (rlpost cancel); not starting again")
        return End(EXIT_PREEMPTED)
    has_steps = code == 0 and not host.signals.stopped
    if host.signals.stopped:
        _leave_early(host, options, attempt)
    if has_steps:
        code = _run_agents(host, options, command, place, attempt)
    verdict = text_or_empty(folder / VERDICT_FILE)
    if has_steps:
        host.log(f"agents ended (srun exit {code}), verdict: {verdict or 'none'}")
    no_restart = _why_no_restart(host, options)
    ending = Ending(verdict or "none", code, host.signals.terminated, no_restart)
    answer = _decide(host, options, attempt, ending)
    if ending.verdict in FAILED and not host.signals.stopped and not host.signals.terminated:
        _write_page(host, place, has_container=has_steps)
    if has_steps:
        host.remove_container(place, str(folder))
    if answer.code is not None:
        return End(answer.code, answer.is_final)
    return _restart(host, options, command, attempt, answer.exclude)


def _end_before_start(host: Host, run_folder: Path) -> Optional[End]:
    """How this start ends before it begins; None if it may begin.

    The job has ended for good before, or another job of the run has its nodes: two would take the
    checkpoint folder from each other.
    """
    try:
        entries = Ledger(run_folder / "ledger.jsonl").read()
    except OSError as error:
        host.log(f"the ledger cannot be read: {error}")
        return None
    code = supervise.final_code(entries, host.job.name)
    if code is not None:
        host.log(f"this job has ended with exit code {code}; not starting again")
        return End(code)
    other = supervise.open_job(entries, host.job.name)
    if other and host.job.runs(other):
        host.log(
            f"job {other} of this run has its nodes; this job ends. To run this one in its place: "
            f"scancel {other}, then rlpost submit RECIPE --resume --run-folder {run_folder}"
        )
        return End(EXIT_CONFIG)
    return None


def _is_requeue_forbidden(host: Host, options: Options) -> bool:
    return options.requeue == "requeue" and host.record.may_requeue is False


def _why_no_restart(host: Host, options: Options) -> str:
    """Why the policy, or Slurm's record of the job, excludes a restart; empty if neither does."""
    if options.requeue == "never":
        return "the policy is 'never'; submit the run again with --resume"
    if _is_requeue_forbidden(host, options) and options.script:
        return f"{NO_REQUEUE}; submit the run again with --resume"
    return ""


def _record_start(host: Host, place: Place, attempt: Attempt) -> bool:
    try:
        (attempt.folder / "container").write_text(place.container + "\n")
        if place.container == "command":
            prefix = json.dumps(command_prefix(place))
            (attempt.folder / CONTAINER_PREFIX).write_text(prefix + "\n")
        return supervise.record_start(
            attempt.run_folder, attempt.number, host.job.name, place.image, host.environ
        )
    except Exception:
        traceback.print_exc()
        host.log("the ledger cannot be written: this start is not counted")
        return True


def _leave_early(host: Host, options: Options, attempt: Attempt) -> None:
    """Leave the verdict ``requeue``: extracting an image could take all the time that is left."""
    _stop(host, options, attempt.folder)
    cause = f"the agents were not started: {host.signals.reason}"
    leave_verdict(attempt.folder, Finding("requeue", cause))


def _run_agents(
    host: Host, options: Options, command: Command, place: Place, attempt: Attempt
) -> int:
    """Start the agents and wait for them; return srun's exit code, 0 if it lingers."""
    folder = str(attempt.folder)
    host.environ["SLURM_SRUN_REDUCE_TASK_EXIT_MSG"] = "0"
    agent = [expand(word, host.environ) for word in command.agent]
    driver = [*command.driver, "--cluster-from-stdin", "--run-folder", place.run_folder]
    argv = agents_step(options, place, folder, agent=agent, driver=[*driver, *command.flags])
    host.prepare_nodes(place)
    try:
        step = host.start_step(argv, launch_log(attempt.folder))
    except OSError as error:
        host.log(f"srun cannot be started: {error}")
        return EXIT_FAILED
    if options.spare_nodes:
        try:
            host.start_step(watch_step(options, folder), attempt.folder / "watch.log")
        except OSError as error:
            host.log(f"a lost batch host will not be noticed: {error}")
    return _wait(host, options, step, attempt.folder)


def _write_page(host: Host, place: Place, *, has_container: bool) -> None:
    """Write the run's page with this end: the driver may have died, or may never have started."""
    if place.container != "none" and not has_container:
        host.log(f"where installed, rlpost report {place.run_folder} writes the page")
        return
    if not host.run_bounded(page_step(place), host.job.seconds_within(PAGE_S)):
        host.log(f"page not written; where installed, rlpost report {place.run_folder} writes it")


def _wait(host: Host, options: Options, step: "subprocess.Popen[bytes]", attempt_dir: Path) -> int:
    deadline: Optional[float] = None
    is_stopped = False
    while step.poll() is None:
        if host.signals.stopped and not is_stopped:
            is_stopped = _stop(host, options, attempt_dir)
        if deadline is None and is_there(attempt_dir / VERDICT_FILE):
            deadline = time.monotonic() + host.job.seconds_within(options.teardown_s)
        if deadline is not None and time.monotonic() >= deadline:
            return 0
        if deadline is None:
            host.refresh_end_time(options.signal_lead_s, attempt_dir / END_TIME_FILE)
        host.wait()
    return shell_code(step.returncode)


def _stop(host: Host, options: Options, attempt_dir: Path) -> bool:
    """Write the STOP file; whether it is written."""
    host.log(f"{host.signals.reason}; asking the run to stop")
    try:
        message = stop_message(host.signals.reason, host.job.end_time(), options.signal_lead_s)
        write_stop(attempt_dir / STOP_FILE, message)
    except OSError as error:
        host.log(f"the STOP file cannot be written, trying again: {error}")
        return False
    return True


def _decide(host: Host, options: Options, attempt: Attempt, ending: Ending) -> RestartDecision:
    budgets = Budgets(options.max_preemptions, options.max_failures, options.max_stalled_attempts)
    try:
        return supervise.record_end(
            attempt.run_folder,
            attempt.number,
            ending,
            budgets,
            static=options.exclude,
            environ=host.environ,
        )
    except Exception:  # a run is not lost because its ledger cannot be written
        traceback.print_exc()
        host.log("the budgets cannot be read: a preempted run is requeued, any other ends")
    if ending.verdict == "requeue" and not ending.terminated and not ending.no_restart:
        return RestartDecision(None, "requeue after a preemption")
    code = {"done": EXIT_DONE, "config": EXIT_CONFIG}.get(ending.verdict, exit_code(ending))
    is_final = code in (EXIT_DONE, EXIT_CONFIG) or not ending.terminated
    return RestartDecision(code, "not requeued", is_final)


def _restart(
    host: Host, options: Options, command: Command, attempt: Attempt, exclude: Sequence[str]
) -> End:
    """Requeue the job, or submit the next one of the chain.

    A run of ``rlpost submit``, whose batch file states everything, continues in a new job where
    Slurm refuses to requeue this one.
    """
    state = host.job.state()
    if not state:
        reason = (
            "not requeued: squeue does not say the state of the job; submit the run with --resume"
        )
        return _give_up(host, attempt, reason)
    if not host.may_requeue(state):
        return End(EXIT_PREEMPTED, is_final=False)
    ignore_term()
    if options.requeue == "chain" or _is_requeue_forbidden(host, options):
        return _chain(host, options, command, attempt, exclude)
    host.log(f"requeue: job {host.job.name}")
    refusal = host.job.requeue()
    if refusal is not None:
        if refusal.is_final and not options.script:
            host.log(f"Slurm refuses to requeue the job ({refusal.words}): submitting a new one")
            return _chain(host, options, command, attempt, exclude)
        remedy = "use --requeue chain" if refusal.is_final else "if it does not start again"
        reason = f"not requeued: {refusal.words}; {remedy}: submit the run with --resume"
        return _give_up(host, attempt, reason)
    values = [f"ExcNodeList={','.join(exclude)}"] if exclude else []
    if options.spare_nodes:
        values.append(f"NumNodes={options.nodes + options.spare_nodes}")
    if values:
        host.job.update(*values)
    return End(EXIT_DONE, is_final=False)


def _give_up(host: Host, attempt: Attempt, reason: str) -> End:
    """Correct the decision in the ledger: the run does not restart by itself."""
    host.log(reason)
    try:
        supervise.record_refusal(attempt.run_folder, attempt.number, EXIT_PREEMPTED, reason)
    except OSError as error:
        host.log(f"the ledger cannot be written: {error}")
    return End(EXIT_PREEMPTED, is_final=False)


def _chain(
    host: Host, options: Options, command: Command, attempt: Attempt, exclude: Sequence[str]
) -> End:
    """Submit the next job of the run, which starts after this one."""
    script = options.script or str(attempt.run_folder / "job.sbatch")
    stated = "" if options.script else text_or_empty(Path(script))
    environ = submission_environment({**host.environ, **host.chosen}, stated)
    environ["RLPOST_RUN_FOLDER"] = str(attempt.run_folder)
    added = [f"--exclude={','.join(exclude)}"] if exclude else []
    if options.requeue != "chain":  # whose file says it by the name of the job
        added.append(f"--dependency=afterany:{host.job.name}")
    known = [host.job.name.partition("_")[0]]
    if options.script:  # further runs may have jobs of this file
        known += map(number_of, find_by_script(script, environ) or [])
    ledger = Ledger(attempt.run_folder / "ledger.jsonl")
    submission = Submission(script, "chained", {"attempt": attempt.number}, known=known)
    try:
        announce(ledger, submission)
    except OSError as error:
        host.log(f"the ledger cannot be written: {error}")
    job, reason = _submit_next(host, [*added, script, *command.flags], submission, environ)
    if not job:
        if reason.startswith(REFUSED):
            with suppress(OSError):
                reject(ledger, submission, reason)
        return _give_up(host, attempt, f"chain: {reason}")
    host.log(f"chain: job {job} resumes the run")
    try:
        supervise.record_chained(attempt.run_folder, attempt.number, job, script)
    except OSError as error:
        host.log(f"the ledger cannot be written, rlpost cancel does not know job {job}: {error}")
    return End(EXIT_DONE)


def _submit_next(
    host: Host, words: Sequence[str], submission: Submission, environ: Mapping[str, str]
) -> Tuple[str, str]:
    """Call sbatch; return the job, or the reason why there is none or why it is not known."""
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            universal_newlines=True,
            errors="replace",
            env=dict(environ),
        )
    except OSError as error:
        return "", f"{REFUSED}: {error}; submit the run with --resume"
    print(done.stderr, end="", file=sys.stderr, flush=True)
    job = read_submission(done.stdout)
    if job and done.returncode == 0:
        return job, ""
    said = done.stderr if done.returncode else explain_submission(done.stdout, submission.file)
    printed = " or ".join(printed_ids(done.stdout))
    host.log(f"chain: sbatch ended with {done.returncode}: {said.strip()}")
    can_wait = done.returncode == 0 or may_be_queued(done.stderr, printed, done.returncode)
    seconds = host.job.seconds_within(int(LOOKUP_S)) if can_wait else 0
    jobs = look_up(submission.file, environ, seconds=seconds, but=submission.known)
    if jobs:
        return jobs[0], ""
    if done.returncode and is_refused(done.stderr, printed, done.returncode, jobs):
        return "", f"{REFUSED}: {' '.join(done.stderr.split())}; submit the run with --resume"
    return (
        "",
        "it is not known whether the next job is queued; the next rlpost command for the run looks it up",
    )
