"""A task of a fleet or of the sandbox servers: one process on its node, restarted independently.

- The engine's name is that of its task, ``ARRAY_TASK``, also after a requeue. SLURM_JOB_ID is
  another number for each task, so containers of two tasks on a node have different names.
- USR2 (the time limit, or a preemption where the site sends it) and ``signals.STOPS`` reach this
  process alone, which announces the end in FLEET/stop/NAME (``common.fleet_name``); TERM to the
  step reaches the agent itself.
- The agent's exit code determines what follows. 0: the engine is not needed any more (the run has
  ended, or the user drained it). 75: it was preempted and is requeued. 78: a setting is wrong, or no
  retry makes the image available. Anything else is a failure; ``max_failures`` bounds the restarts.

A sandbox server belongs to a run: it ends (exit 0) when the run's driver closes its lease or is
gone. When it is preempted, the driver repeats its work elsewhere at once. It runs on the node
itself, not in a container: it makes the namespaces of its sandboxes. Python 3.6.
"""

import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import List, Optional, Sequence

from common.exit_codes import EXIT_CONFIG, EXIT_DONE, EXIT_PREEMPTED
from common.files import discard, is_there, text_or_empty, write_atomic
from common.fleet_name import fleet_name, group_of
from common.stop_file import stop_text
from slurm.batch.attempt import stop_message
from slurm.batch.host import End, Host
from slurm.batch.options import Options, expand
from slurm.batch.place import Place
from slurm.batch.signals import ignore_term
from slurm.batch.steps import (
    KEEP_OTHER_TASKS,
    ONE_TASK_PER_NODE,
    in_container,
    output_pattern,
    prepared,
)


def run_engine(host: Host, options: Options, agent: Sequence[str]) -> End:
    """Run one start of the engine and decide what follows it.

    Raises:
        SpecError: a variable or a program is missing.
        OSError: the run folder cannot be written.
    """
    name = host.job.name
    place = host.find_place(options, agent, options.run_folder)
    fleet = Path(place.run_folder) / fleet_name(group_of(agent))
    logs, state, stop_file = fleet / "logs", fleet / f"logs/{name}.d", fleet / "stop" / name
    state.mkdir(parents=True, exist_ok=True)
    discard(stop_file)  # of an earlier start
    host.log_start()
    end = ended_before(host, state / "end")
    if end is not None:
        return end
    host.refuse_short_limit(options.signal_lead_s)
    (state / "container").write_text(place.container + "\n")
    launch = logs / f"{name}.launch"
    host.note_end_time(options.signal_lead_s)
    code, place = host.import_image(options, place, launch, leaves_on_stop=True)
    if code == 0 and host.signals.stopped:
        code = EXIT_PREEMPTED  # the rest of the time is for the requeue
    if code == 0:
        words = [expand(word, host.environ) for word in agent]
        argv = engine_step(options, place, name, logs=str(logs), stop_file=str(stop_file))
        host.prepare_nodes(place)
        step = host.start_step([*argv, *words], launch)
        code = host.wait_for(step, lambda: _announce(host, options, stop_file))
        host.log(f"the agent ended (srun exit {code})")
        host.remove_container(place)
    discard(stop_file)
    return restart_task(host, options, code, failures=state / "failures", end=state / "end")


def engine_step(
    options: Options, place: Place, name: str, *, logs: str, stop_file: str
) -> List[str]:
    """The step of the engine's agent, to which the agent's words are added. Pure."""
    return [
        *["srun", *ONE_TASK_PER_NODE, *KEEP_OTHER_TASKS],
        output_pattern(logs, f"{name}.log"),
        "--open-mode=append",
        *in_container(place),
        *prepared(options.environment, options.setup_command, place.home),
        *[place.python, "-u", "-m", "rlpost.engines.engine_job", "--run-folder", place.run_folder],
        *["--engine", name, "--stop-file", stop_file],
    ]


def ended_before(host: Host, file: Path) -> Optional[End]:
    """The final end of an earlier start of this task; None without one.

    Slurm may start a task again although its end is final, where users may not change their jobs.
    """
    text = text_or_empty(file).strip()
    if not text.isdecimal():
        return None
    host.log(f"this task has ended with exit code {text}; not starting again")
    return End(int(text))


def restart_task(host: Host, options: Options, code: int, *, failures: Path, end: Path) -> End:
    """Requeue a task of an array after a preemption or a failure.

    Args:
        code: exit code of the agent; 0: not needed any more, 75: preempted, 78: a restart would fail
            in the same way.
        failures: file with the number of failures so far.
        end: file for ``ended_before``.
    """
    if code in (EXIT_DONE, EXIT_CONFIG):
        return _end_finally(code, end)
    if options.requeue == "never":
        host.log(f"not requeued{' after TERM' if host.signals.terminated else ''}: --requeue never")
        return _end_finally(code, end)
    if code != EXIT_PREEMPTED:
        earlier = text_or_empty(failures)
        count = 1 + (int(earlier) if earlier.isdecimal() else 0)
        try:
            write_atomic(failures, f"{count}\n")
        except OSError as error:
            count = 1 + int(host.environ.get("SLURM_RESTART_COUNT") or 0)
            host.log(f"{failures} cannot be written, each start counts: {error}")
        if count > options.max_failures:
            host.log(f"not requeued: {count} failures")
            return _end_finally(code, end)
    if not host.may_requeue(host.job.state()):
        return End(code, is_final=False)
    host.log(f"requeue: task {host.job.name}")
    ignore_term()
    refusal = host.job.requeue()
    if refusal is not None:
        host.log(
            f"not requeued ({refusal.words}): engines and sandbox servers need a cluster on which "
            "jobs may be requeued; rlpost fleet RUN --engines N, where installed, submits engines again"
        )
    return End(EXIT_DONE if refusal is None else code, is_final=False)


def _end_finally(code: int, file: Path) -> End:
    with suppress(OSError):  # then the record of Slurm alone forbids another start
        write_atomic(file, f"{code}\n")
    return End(code)


def _announce(host: Host, options: Options, stop_file: Path) -> bool:
    """Announce the end of this start to the agent and to the run; whether it is written."""
    host.log(f"{host.signals.reason}; the engine leaves")
    message = stop_message(host.signals.reason, host.job.end_time(), options.signal_lead_s)
    try:
        stop_file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(stop_file, stop_text(message))
    except OSError as error:
        host.log(f"{stop_file} cannot be written, trying again: {error}")
        return False
    return True


def run_sandbox_server(host: Host, options: Options, server: Sequence[str]) -> End:
    """Run one start of the server and decide what follows it.

    Raises:
        SpecError: a variable or a program is missing.
        OSError: the run folder cannot be written.
    """
    name = host.job.name
    place = host.find_place(options, server, options.run_folder)
    folder = Path(place.run_folder) / "sandboxes"
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    record = folder / "nodes" / f"{name}.json"
    discard(record)  # of an earlier start
    host.log_start()
    end = ended_before(host, logs / f"{name}.end")
    if end is not None:
        return end
    words = [expand(word, host.environ) for word in server]
    argv = server_step(options, place, name, words)
    step = host.start_step(argv, logs / f"{name}.launch")
    code = host.wait_for(step, lambda: _pass_on(step, record))
    host.log(f"the server ended (srun exit {code})")
    discard(record)
    failures, end_file = logs / f"{name}.failures", logs / f"{name}.end"
    return restart_task(host, options, code, failures=failures, end=end_file)


def server_step(options: Options, place: Place, name: str, server: Sequence[str]) -> List[str]:
    """The step of the server; ``server``: its module and its arguments. Pure."""
    logs = f"{place.run_folder}/sandboxes/logs"
    return [
        *["srun", "--ntasks-per-node=1", "--mpi=none", *KEEP_OTHER_TASKS],
        f"--cpus-per-task={options.cores}",
        output_pattern(logs, f"{name}.log"),
        "--open-mode=append",
        *[place.python, "-u", "-m", *server[:1]],
        *["--run-folder", place.run_folder, "--name", name, *server[1:]],
    ]


def _pass_on(step: "subprocess.Popen[bytes]", record: Path) -> bool:
    """Send USR2 to srun, which passes it on to the server; whether the server can handle it.

    Before the server has written its record, the signal would kill it or srun, as a failure.
    """
    if not is_there(record):
        return False
    step.send_signal(signal.SIGUSR2)
    return True
