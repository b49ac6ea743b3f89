"""Run an attempt on this machine without Slurm, in a detached process: ``python -m slurm.local``.

Input: the commands of an attempt, pickled on standard input. Output: the verdict. For one agent,
this replaces the batch script: signals become the STOP file, the verdict becomes an exit code, and
the ledger has the same events. There is no requeue: submit again to resume.
"""

from __future__ import annotations

import ctypes
import io
import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path

from common.attempt import VERDICT_FILE
from common.files import text_or_empty
from common.run_folder import RunFolder
from common.stop_file import request_stop
from slurm.batch.steps import prepared
from slurm.errors import SlurmError, SubmitError
from slurm.spec import JobSpec
from slurm.supervise import Budgets, Ending, record_end, record_start

logger = logging.getLogger(__name__)

NO_RESTART = "the run is on this machine; submit it again with --resume"
NO_BUDGETS = Budgets(0, 0, max_stalled_attempts=1 << 30)  # ``NO_RESTART`` decides
REPORT_S = 60.0
LOG = "local.log"
MODULE = "slurm.local"

STOPS = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
"""Signals that ask a local run to save and stop."""
_PR_SET_PDEATHSIG = 1
SCHEDULER_PREFIXES = ("SLURM_", "SBATCH_", "SUBMITIT_")


def start_detached(spec: JobSpec, folder: Path) -> int:
    """Start an attempt in a process that outlives the terminal; return its pid.

    It has a separate session, so neither Ctrl-C nor a hang-up reaches it, and its output is
    ``folder``/local.log: a pipe that reads the caller's output does not stay open. To stop the run,
    write its STOP file, or send TERM, INT or USR2. Before its handlers exist these wait, as they would
    end the process otherwise.

    Raises:
        OSError: the process cannot be started.
        SubmitError: it ended at once; names its log.
    """
    assert spec.home and spec.python
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOG).open("ab") as log, _held(STOPS):
        process = subprocess.Popen(
            [spec.python, "-u", "-m", MODULE],
            cwd=spec.home,
            env={**os.environ, "PYTHONPATH": spec.home},
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    assert process.stdin is not None
    content = pickle.dumps(spec)
    try:
        with process.stdin as pipe:
            pipe.write(content)
    except OSError as error:
        raise SubmitError(
            f"{spec.python} -m {MODULE} ended before it read its job ({error}); see {folder / LOG}"
        ) from error
    process.returncode = 0  # nobody waits for it: no ResourceWarning when the object goes
    return process.pid


@contextmanager
def _held(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Block signals in this thread; a process that it starts meanwhile starts with them blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(frozen=True, slots=True)
class LocalAttempt:
    """Callable that runs one attempt to its end. Picklable; all paths of the spec must be set."""

    spec: JobSpec

    def __call__(self) -> str:
        """Start the agent, wait for it, return the verdict: ``done`` or ``requeue`` (can resume).

        Raises:
            SlurmError: the attempt failed or left no verdict; names the attempt's folder.
        """
        assert self.spec.home and self.spec.run_folder
        job_id = f"local-{os.getpid()}"
        run = RunFolder(Path(self.spec.run_folder))
        attempt_dir = run.new_attempt()
        _record(run, record_start, int(attempt_dir.name), job_id, "", self._environment())
        ends = time.time() + self.spec.time_limit_s
        for number in (signal.SIGALRM, *STOPS):
            signal.signal(number, lambda received, _: _on_signal(attempt_dir, received, ends))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        signal.alarm(max(1, self.spec.time_limit_s - self.spec.signal_lead_s))
        code = self._run_agent(attempt_dir)
        signal.alarm(0)
        late = "" if code is not None else f"; its time limit {self.spec.time} was reached"
        ending = Ending("none", 1 if code is None else code, no_restart=NO_RESTART + late)
        environ = self._environment()
        attempt = int(attempt_dir.name)
        _record(run, record_end, attempt, ending, NO_BUDGETS, static=(), environ=environ)
        self._write_report(run)
        verdict = text_or_empty(attempt_dir / VERDICT_FILE) or "none"
        logger.info("agent ended (exit %s), verdict: %s", code, verdict)
        if verdict in ("done", "requeue"):
            return verdict
        raise SlurmError(
            f"attempt {attempt_dir.name} ended with verdict {verdict!r}{late}; see {attempt_dir}"
        )

    def _environment(self) -> dict[str, str]:
        """What Slurm's environment says of a job, as far as the ledger has it."""
        return {"SLURM_JOB_NUM_NODES": "1", "RLPOST_HOME": str(self.spec.home)}

    def _run_agent(self, attempt_dir: Path) -> int | None:
        """Run the agent; return its exit code, None if the time limit ended it."""
        assert self.spec.home
        with (attempt_dir / "agent-local.log").open("wb") as log:
            agent = subprocess.Popen(
                agent_command(self.spec, attempt_dir),
                cwd=self.spec.home,
                env=local_environment(dict(os.environ), self.spec.home),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the agent sees STOP, not the signals, as on a cluster
                preexec_fn=_end_with(os.getpid()),
            )
        try:
            return agent.wait(timeout=self.spec.time_limit_s)
        except subprocess.TimeoutExpired:
            agent.kill()  # its child processes end with it
            return None

    def _write_report(self, run: RunFolder) -> None:
        """Write the pages again, with the end: the driver may never have started."""
        assert self.spec.home and self.spec.python
        words = [self.spec.python, "-m", "rlpost", "report", str(run.root)]
        env = local_environment(dict(os.environ), self.spec.home)
        try:
            subprocess.run(
                words,
                cwd=self.spec.home,
                env=env,
                timeout=REPORT_S,
                check=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        except (OSError, subprocess.SubprocessError) as error:
            logger.warning("the report was not written: %s", error)


def _record(run: RunFolder, write: Callable[..., object], *words: object, **named: object) -> None:
    """Write to the ledger as the batch script does; a run is not lost because that fails."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            write(run.root, *words, **named)
    except Exception:
        logger.exception("the ledger of %s was not written", run.root)
    if said.getvalue():
        logger.info("%s", said.getvalue().rstrip())


def _end_with(parent: int) -> Callable[[], None]:
    """Return a function that makes its process end with ``parent``, even after KILL.

    So the run does not outlive its own process: the agent's keepers end all others.
    """
    libc = ctypes.CDLL(None)  # before the fork, where a lock may be held

    def tie() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the call
            os._exit(1)

    return tie


def agent_command(spec: JobSpec, attempt_dir: Path) -> list[str]:
    """The agent's command line, the same as in the batch script."""
    assert spec.home and spec.python and spec.run_folder
    environment = [f"{name}={value}" for name, value in spec.environment]
    agent = prepared(environment, spec.setup_commands, spec.home)
    agent += [spec.python, "-u", "-m", "bootstrap.agent", "--attempt-dir", str(attempt_dir)]
    driver = [spec.python, "-u", "-m", "rlpost.train", *spec.driver_args]
    driver += ["--cluster-from-stdin", "--run-folder", spec.run_folder]
    num_gpus = ["--num-gpus", str(spec.num_gpus_per_node)]
    return [*agent, *num_gpus, *spec.agent_args, "--", *driver]


def local_environment(inherited: dict[str, str], home: str) -> dict[str, str]:
    """The agent's environment without a scheduler's variables, so that it runs as a single node."""
    kept = {
        key: value for key, value in inherited.items() if not key.startswith(SCHEDULER_PREFIXES)
    }
    return {**kept, "PYTHONPATH": home, "RLPOST_HOME": home}


def _on_signal(attempt_dir: Path, number: int, deadline: float) -> None:
    reason = f"signal {signal.Signals(number).name} to the local run"
    try:
        request_stop(attempt_dir, reason, deadline=deadline)
    except OSError as error:  # an exception here would end the run without a checkpoint
        logger.error("%s: the STOP file cannot be written, send it again: %s", reason, error)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    LocalAttempt(pickle.load(sys.stdin.buffer))()
