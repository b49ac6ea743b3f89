"""One start of a run: attempt folder, image, agents, verdict, requeue. Python 3.6.

Invariant: a job that committed its state is requeued whatever fails here, unless it was cancelled,
its budgets are spent, or its end is final.
"""

import json
import subprocess
import time
import traceback
from pathlib import Path
from typing import List, NamedTuple, Optional, Sequence

from common.attempt import CONTAINER_PREFIX, STOP_FILE, VERDICT_FILE
from common.exit_codes import EXIT_CONFIG, EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED
from common.files import is_there, text_or_empty
from common.stop_file import write_stop
from slurm import supervise
from slurm.batch.attempt import launch_log, start_attempt, stop_message
from slurm.batch.host import End, Host, shell_code
from slurm.batch.options import Options, expand
from slurm.batch.place import Place, find_run_folder
from slurm.batch.signals import ignore_term
from slurm.batch.steps import agents_step, command_prefix, watch_step
from slurm.causes import Finding
from slurm.evidence import leave_verdict
from slurm.job_id import explain_submission, find_by_script, read_submission
from slurm.supervise import Budgets, Ending, RestartDecision, exit_code
from slurm.variables import submission_environment


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
    folder = start_attempt(Path(place.run_folder), host.environ)
    number = int(folder.name)
    attempt = Attempt(number, folder, Path(place.run_folder))
    nodes = host.environ.get("SLURM_JOB_NODELIST", "")
    host.log(f"job {host.job.name} attempt {number} on {nodes}: {folder}")
    host.note_end_time(options.signal_lead_s)
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
        host.remove_container(place, str(folder))
    ending = Ending(verdict or "none", code, host.signals.terminated, options.requeue != "never")
    answer = _decide(host, options, attempt, ending)
    if answer.code is not None:
        # After TERM Slurm itself may have preempted the job, and requeues it.
        is_over = answer.code in (EXIT_DONE, EXIT_CONFIG) or not ending.terminated
        return End(answer.code, is_over)
    return _restart(host, options, command, attempt, answer.exclude)


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
    leave_verdict(attempt.folder, Finding("requeue", "USR2 came before the agents were started"))


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
        host.wait()
    return shell_code(step.returncode)


def _stop(host: Host, options: Options, attempt_dir: Path) -> bool:
    """Write the STOP file; whether it is written."""
    host.log("USR2: preemption, or the time limit is near; asking the run to stop")
    try:
        message = stop_message(host.job.end_time(), options.signal_lead_s)
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
    if ending.verdict == "requeue" and not ending.terminated and ending.may_restart:
        return RestartDecision(None, "requeue after a preemption")
    code = {"done": EXIT_DONE, "config": EXIT_CONFIG}.get(ending.verdict, exit_code(ending))
    return RestartDecision(code, "not requeued")


def _restart(
    host: Host, options: Options, command: Command, attempt: Attempt, exclude: Sequence[str]
) -> End:
    """Requeue the job, or submit the next one of the chain."""
    if not host.may_requeue():
        return End(EXIT_PREEMPTED, is_final=False)
    ignore_term()
    if options.requeue == "chain":
        return _chain(host, options, command, attempt, exclude)
    host.log(f"requeue: job {host.job.name}")
    if not host.job.requeue():
        return End(EXIT_PREEMPTED, is_final=False)
    values = [f"ExcNodeList={','.join(exclude)}"] if exclude else []
    if options.spare_nodes:
        values.append(f"NumNodes={options.nodes + options.spare_nodes}")
    if values:
        host.job.update(*values)
    return End(EXIT_DONE, is_final=False)


def _chain(
    host: Host, options: Options, command: Command, attempt: Attempt, exclude: Sequence[str]
) -> End:
    script = options.script or str(attempt.run_folder / "job.sbatch")
    excluded = [f"--exclude={','.join(exclude)}"] if exclude else []
    stated = "" if options.script else text_or_empty(Path(script))
    environ = submission_environment({**host.environ, **host.chosen}, stated)
    environ["RLPOST_RUN_FOLDER"] = str(attempt.run_folder)
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", *excluded, script, *command.flags],
            stdout=subprocess.PIPE,
            universal_newlines=True,
            errors="replace",
            env=environ,
        )
    except OSError as error:
        host.log(f"chain: {error}")
        return End(EXIT_PREEMPTED)
    if done.returncode:
        return End(EXIT_PREEMPTED)
    job = read_submission(done.stdout)
    if not job:
        jobs = find_by_script(script, environ, but=host.job.name)
        host.log(f"chain: {explain_submission(done.stdout, script, jobs)}")
        if len(jobs) != 1:
            return End(EXIT_PREEMPTED)
        job = jobs[0]
    host.log(f"chain: job {job} resumes the run")
    try:
        supervise.record_chained(attempt.run_folder, attempt.number, job)
    except OSError as error:
        host.log(f"the ledger cannot be written, rlpost cancel does not know job {job}: {error}")
    return End(EXIT_DONE)
