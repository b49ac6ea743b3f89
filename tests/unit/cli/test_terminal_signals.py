"""What a terminal does to a run on this machine that was started from it: Ctrl-C, hang-up, a pipe.

A real pseudo-terminal with its foreground process group and the default handling of SIGINT; the
agent is a stub that saves until the test ends the save.
"""

from __future__ import annotations

import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.run_folder import RunFolder
from common.stop_file import request_stop
from rlpost.cli.runs import LOCAL, local_is_alive, newest_job
from rlpost.extensions.watching.run_status import statuses
from tests.cluster.lab_host import wait_until

ROOT = Path(__file__).parents[3]
STUB_HOME = ROOT / "tests/fakes/cluster_home"
SUBMIT = """
import sys
from pathlib import Path
from common.run_folder import create_run_folder
from rlpost.cli.entry import run_command
from rlpost.extensions.watching.follow import follow
from slurm.executor import submit
from slurm.spec import JobSpec
from tests.settings import a_job

def command(words):
    home, root, waits = words
    run = create_run_folder(Path(root), "{}")
    spec = a_job(gpu_request="none", driver_args=("slow-save",), python=sys.executable)
    job_id = submit(spec, run, home=Path(home), where="local")
    print("submitted", job_id, flush=True)
    return follow(run, job_id, started_it=True) if waits == "wait" else 0

sys.exit(run_command(command, sys.argv[1:]))
"""
"""``rlpost submit`` without the checks of a recipe, whose agent is a stub."""


class Terminal:
    """A run that was started from a pseudo-terminal."""

    def __init__(self, folder: Path, *, before: str = "", after: str = "") -> None:
        """``before`` and ``after`` surround the command in a shell's line."""
        self.run = RunFolder(folder / "run")
        command = [sys.executable, "-c", SUBMIT, str(STUB_HOME), str(self.run.root), "wait"]
        if before or after:
            command = ["/bin/sh", "-c", f"{before} {shlex.join(command)} {after.format(folder)}"]
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup, and inherited
            os.chdir(ROOT)
            os.execv(command[0], command)
        self.said = b""

    @property
    def attempt(self) -> Path:
        return self.run.attempts / "0"

    @property
    def job(self) -> str:
        job = newest_job(self.run)
        assert job is not None
        return job

    def wait_for_agent(self) -> None:
        assert wait_until(lambda: any(self.attempt.glob("argv-*.json")), deadline_s=60)

    def press_ctrl_c(self) -> None:
        os.write(self.master, b"\x03")

    def wait_for_stop_request(self) -> None:
        assert wait_until((self.attempt / "STOP").exists, deadline_s=60)

    def finish_save(self) -> None:
        (self.attempt / "saved").touch()

    def exit_code(self) -> int:
        """Read the terminal to its end; return the exit code, negative for a signal."""
        while True:
            try:
                chunk = os.read(self.master, 4096)
            except OSError:  # EIO: no process has the terminal any more
                break
            if not chunk:
                break
            self.said += chunk
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def terminal(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Terminal]:
    started = Terminal(tmp_path, **getattr(request, "param", {}))
    yield started
    job = newest_job(started.run)
    if job is not None and local_is_alive(job):
        os.kill(int(job.removeprefix(LOCAL)), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("reason", ["Ctrl-C", "SIGUSR2"])
def test_ctrl_c_and_usr2_end_a_run_when_it_has_saved(terminal: Terminal, reason: str) -> None:
    terminal.wait_for_agent()
    if reason == "Ctrl-C":
        terminal.press_ctrl_c()
    else:
        os.kill(terminal.pid, signal.SIGUSR2)
    terminal.wait_for_stop_request()
    assert os.waitpid(terminal.pid, os.WNOHANG) == (0, 0), "the run still saves"
    terminal.finish_save()
    assert terminal.exit_code() == 75, terminal.said
    assert json.loads((terminal.attempt / "STOP").read_text())["reason"] == reason
    assert (terminal.attempt / "verdict").read_text() == "requeue\n"
    assert terminal.said.count(b"stopping: the run saves") == 1
    assert b"Traceback" not in terminal.said


@pytest.mark.slow
@pytest.mark.parametrize("terminal", [{"after": "| cat"}], indirect=True, ids=["cat"])
def test_ctrl_c_ends_a_run_also_where_it_ends_the_reader_of_the_output(terminal: Terminal) -> None:
    """Ctrl-C signals the whole pipeline; what follows goes to standard error."""
    terminal.wait_for_agent()
    terminal.press_ctrl_c()
    terminal.wait_for_stop_request()
    terminal.finish_save()
    terminal.exit_code()
    assert (terminal.attempt / "verdict").read_text() == "requeue\n", terminal.said
    assert json.loads((terminal.attempt / "STOP").read_text())["reason"] == "Ctrl-C"
    assert b"stopping: the run saves" in terminal.said
    assert b"ended: requeue" in terminal.said and b"Traceback" not in terminal.said


@pytest.mark.slow
@pytest.mark.parametrize(
    "terminal", [{"before": "nohup", "after": "> {}/nohup.out"}], indirect=True, ids=["nohup"]
)
def test_under_nohup_the_command_follows_its_run_after_the_terminal(
    terminal: Terminal, tmp_path: Path
) -> None:
    terminal.wait_for_agent()
    os.close(terminal.master)
    time.sleep(1)
    request_stop(terminal.attempt, "end of the test")
    terminal.finish_save()
    output = tmp_path / "nohup.out"
    assert wait_until(lambda: "ended: requeue" in output.read_text(), deadline_s=60)


@pytest.mark.slow
def test_a_second_ctrl_c_leaves_the_run_alone(terminal: Terminal) -> None:
    terminal.wait_for_agent()
    terminal.press_ctrl_c()
    terminal.wait_for_stop_request()
    terminal.press_ctrl_c()
    assert terminal.exit_code() == 130, terminal.said
    assert local_is_alive(terminal.job)
    terminal.finish_save()
    assert wait_until(lambda: not local_is_alive(terminal.job), deadline_s=60)
    assert (terminal.attempt / "verdict").read_text() == "requeue\n"


@pytest.mark.slow
def test_a_closed_terminal_leaves_the_run_running_and_status_finds_it(terminal: Terminal) -> None:
    terminal.wait_for_agent()
    os.close(terminal.master)
    # by the signal, or by a write to the terminal that comes before it
    assert os.waitstatus_to_exitcode(os.waitpid(terminal.pid, 0)[1]) in (-signal.SIGHUP, 1)
    time.sleep(1)
    (status,) = statuses([terminal.run])
    assert status.state == "RUNNING" and not (terminal.attempt / "STOP").exists()
    request_stop(terminal.attempt, "end of the test")
    terminal.finish_save()
    assert wait_until(lambda: not local_is_alive(terminal.job), deadline_s=60)
    assert (terminal.attempt / "verdict").read_text() == "requeue\n"


def test_without_waiting_the_command_returns_at_once_into_a_pipe_too(tmp_path: Path) -> None:
    """Nothing of the run holds the pipe."""
    run = RunFolder(tmp_path / "run")
    words = [sys.executable, "-c", SUBMIT, str(STUB_HOME), str(run.root), "no"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    job = newest_job(run)
    assert job is not None and done.stdout == f"submitted {job}\n" and local_is_alive(job)
    os.kill(int(job.removeprefix(LOCAL)), signal.SIGKILL)
