"""The live page of a run: what it says follows from what it is given, at any width; Slurm is asked
rarely.
"""

import io
import itertools
import json
import re
from dataclasses import replace

import pytest
from rich.console import Console

from common.run_folder import RunFolder
from rlpost.cli.main import main
from rlpost.durable.commit import checkpoint_name
from rlpost.extensions.watching import watch as live
from rlpost.extensions.watching.pace import mean_phases
from rlpost.extensions.watching.run_status import warnings_in
from rlpost.extensions.watching.watch import is_over, page, read_view, sparkline
from slurm.queue import FORGOTTEN, QueueEntry
from slurm.states import JobState
from tests.unit.watching.report.runs import make_run


def text(view, width=100):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(page(view, width))
    return console.file.getvalue()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("runs") / "seven-b")
    latest = run.attempts / "latest"
    (latest / "driver.log").write_text(
        "08:00:00 INFO all is well\n08:00:01 WARNING engine-1 was restarted\n"
    )
    for number in (0, 1):
        (latest / f"engine-{number}-server.log").write_text("up\n")
    return run


@pytest.fixture(scope="module")
def view(run):
    entry = QueueEntry("4711", JobState.RUNNING, time_left_s=3661, nodelist="n[01-02]")
    return read_view(run, "4711", entry)


def test_the_page_says_where_the_run_is(view):
    shown = text(view)
    for words in (
        "seven-b  RUNNING",
        "4711",
        "n[01-02]",
        "1:01:01",
        "240/240",
        "aime 0.595, math500 0.822",
        "tokens/s, 99.29 s a step",
        "generate 67%",
        "engine-0 0:0",
        checkpoint_name(240),
        "engine-1 was restarted",
    ):
        assert words in shown, words
    assert "preempted: SIGUSR2" in shown and "all is well" not in shown
    assert "MFU 36%" in shown


def test_the_table_says_the_same_in_short_and_to_programs_too(run, capsys):
    assert main(["status", str(run.root)]) == 0
    shown = capsys.readouterr().out
    for words in ("generate 67%", f"{checkpoint_name(240)}, ", "engine-1 was restarted"):
        assert words in shown, words
    assert re.search(r"preemptions +2 *\n", shown)
    assert main(["status", str(run.root), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["num_attempts"], told["num_preemptions"], told["mfu"]) == (3, 2, 0.36)
    assert set(told["phases_s"]) >= {"generate", "train", "sync"}
    assert told["warnings"] == ["08:00:01 WARNING engine-1 was restarted"]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_line_is_wider_than_the_terminal(view, width):
    assert max(map(len, text(view, width).splitlines())) <= width


def test_a_run_of_which_nothing_is_known_has_a_page(tmp_path):
    run = RunFolder(tmp_path / "new")
    run.root.mkdir()
    view = read_view(run, None, None)
    assert "never submitted" in text(view)
    assert not is_over(view)


def test_a_run_is_over_when_it_is_done_or_slurm_says_so(view):
    assert is_over(view)
    going = replace(view, history=None)
    assert not is_over(going)
    assert is_over(replace(going, status=replace(view.status, state="CANCELLED")))
    assert is_over(replace(going, status=replace(view.status, state="UNKNOWN", reason=FORGOTTEN)))
    assert not is_over(
        replace(going, status=replace(view.status, state="UNKNOWN", reason="squeue did not answer"))
    )


def test_a_sparkline_is_as_long_as_there_is_room_and_rises_with_its_values():
    assert sparkline([0, 1, 2, 3], 4) == "▁▃▆█"
    assert sparkline(list(range(1000)), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([5.0] * 3, 8) == "▄▄▄"


def test_a_phase_has_its_mean_over_all_steps():
    lines = [
        {"step": 0, "time/eval_s": 90.0},
        {"step": 1, "time/step_s": 10.0, "time/generate_s": 6.0, "time/train_s": 3.0},
        {
            "step": 2,
            "time/step_s": 10.0,
            "time/generate_s": 6.0,
            "time/train_s": 3.0,
            "time/eval_s": 2.0,
        },
    ]
    phases = mean_phases(lines)
    assert phases == {"generate": 6.0, "train": 3.0, "evaluate": 1.0}
    assert mean_phases(lines[:1]) == {}


def test_warnings_are_shown_once_and_the_newest_last():
    log = "08:00:00 INFO x\n08:00:01 WARNING a\n08:00:01 WARNING a\nWARNING of somebody else\n08:00:02 ERROR b\n"
    assert warnings_in(log) == ["08:00:01 WARNING a", "08:00:02 ERROR b"]


def test_slurm_is_asked_once_in_a_while_however_often_the_page_is_drawn(tmp_path, monkeypatch):
    """Two minutes of a running job on a clock of our own: a question every POLL_S at most."""
    run = make_run(tmp_path / "short", num_steps=2, preempted_at=())
    clock, asked = [0.0], []

    def ask(ids):
        asked.append(clock[0])
        state = JobState.RUNNING if clock[0] < 120 else JobState.CANCELLED
        return {ids[0]: QueueEntry(ids[0], state)}

    def sleep(seconds):
        clock[0] += seconds

    monkeypatch.setattr(live.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(live.time, "sleep", sleep)
    monkeypatch.setattr(live, "queue", ask)
    monkeypatch.setattr(live, "timeline", lambda events, until: None)
    monkeypatch.setattr(live.sys.stdout, "isatty", lambda: True)
    assert live.watch(run) == 0
    assert clock[0] >= 120
    assert min(b - a for a, b in itertools.pairwise(asked)) >= live.POLL_S


def test_a_pipe_is_told_of_json(run, capsys):
    assert main(["status", str(run.root), "--watch"]) == 2
    assert "--json" in capsys.readouterr().err


def test_recoveries_within_attempts_are_counted_by_role(tmp_path, capsys):
    run = make_run(tmp_path / "recovered")
    for role in ("trainer", "trainer", "driver"):
        run.ledger.append(
            "recovered", role=role, phase="train", step=3, seconds=4.0, cause="killed"
        )
    assert main(["status", str(run.root)]) == 0
    assert re.search(r"recoveries +trainer 2, driver 1 *\n", capsys.readouterr().out)
    assert main(["status", str(run.root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recoveries"] == {"trainer": 2, "driver": 1}
