"""Tests of ``rlpost list``: what it shows at 80 columns, states that Slurm has forgotten, its cache."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from common.run_folder import RunFolder
from rlpost.cli.main import main
from rlpost.extensions.watching import run_status as statuses_module
from rlpost.extensions.watching.goodput import Goodput
from rlpost.extensions.watching.list_verb import reasons, table, total_cost
from rlpost.extensions.watching.run_status import CACHE, Status, status_of, statuses
from rlpost.extensions.watching.run_status import rows as shown
from slurm.queue import FORGOTTEN, QueueEntry
from slurm.states import JobState
from tests.unit.watching.report.runs import make_run

ROOT = Path(__file__).parents[3]
LONG = "glm45_355b_with_a_long_name-20261123-031122"


@pytest.fixture
def no_slurm(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))  # no squeue


def status(name: str, **values: object) -> Status:
    given = {"folder": "/runs/x", "job_id": "1234567", "state": "RUNNING"}
    return Status(name=name, **(given | values))


def run_of(folder, *events: dict[str, object]) -> RunFolder:
    run = RunFolder(folder)
    (folder / "attempts").mkdir(parents=True)
    run.run_json.write_text("{}")
    for event in events:
        values = dict(event)
        run.ledger.append(str(values.pop("event")), **values)
    return run


def test_at_80_columns_names_of_runs_and_jobs_are_whole_and_the_least_columns_go() -> None:
    found = [
        status(LONG, step=120, num_steps=3000, num_attempts=2, verdict="requeue", reward=0.71),
        status("tiny-20261123-031122", job_id="1234568_17", state="COMPLETED", reward=0.5),
    ]
    rows = [" ".join(cells) for cells in table(found, 80)]
    assert all(LONG in rows[1] and "1234567" in rows[1] for _ in [0])
    assert max(len("  ".join(cells)) for cells in table(found, 80)) <= 80
    assert "reward" not in rows[0] and "step" in rows[0]
    wide = table(found, 200)
    assert [cell.strip() for cell in wide[0]][-3:] == ["goodput", "attempts", "checkpoint"]
    narrow = table(found, 20)
    assert [cell.strip() for cell in narrow[0]] == ["run", "job", "state"]
    assert narrow[1][0].strip() == LONG


def spent(gpu_hours: float, price: float | None) -> Goodput:
    cost = None if price is None else gpu_hours * price
    return Goodput(0.5, gpu_hours, {"trained": gpu_hours / 2}, 0.0, price, cost)


def test_a_price_gives_a_column_and_a_sum_over_the_runs_that_have_one() -> None:
    found = [
        status("a", goodput=spent(512.0, 2.5)),
        status("b", goodput=spent(8.0, 2.0)),
        status("c", goodput=spent(100.0, None)),
        status("d"),
    ]
    rows = [[cell.strip() for cell in cells] for cells in table(found, 200)]
    at = rows[0].index("cost")
    assert [row[at] for row in rows[1:]] == ["1,280.00", "16.00", "", ""]
    assert total_cost(found) == ["cost of 2 runs: 1,296.00 for 520.0 GPU h"]
    assert total_cost(found[1:]) == []
    assert "cost" not in [cell.strip() for cell in table(found[2:], 200)[0]]
    assert ("cost", "1,280.00 for 512 GPU h at 2.50, 640.00 of it trained steps") in shown(found[0])
    assert "cost" not in dict(shown(found[2]))


def test_reasons_stand_below_the_table_and_a_common_one_stands_there_once() -> None:
    why = "squeue does not answer: timed out"
    same = [status(f"run{n}", state="UNKNOWN", reason=why) for n in range(3)]
    assert reasons(same) == [f"3 runs: {why}"]
    mixed = [status("a", reason="Priority", state="PENDING"), status("b")]
    assert reasons(mixed) == ["a: Priority"]


ENDED = {"event": "verdict", "attempt": 0, "cause": "", "reason": ""}


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([{"event": "done", "step": 3, "weights": "x"}], "COMPLETED"),
        ([{"event": "done", "step": 3}, ENDED | {"verdict": "done", "answer": 0}], "COMPLETED"),
        ([ENDED | {"verdict": "failed", "answer": 1}], "FAILED"),
        ([ENDED | {"verdict": "requeue", "answer": 0}], "PREEMPTED"),
        ([ENDED | {"verdict": "failed", "answer": "again"}], "UNKNOWN"),
        ([{"event": "cancelled"}], "CANCELLED"),
        ([{"event": "done"}, {"event": "submitted", "job_id": "8", "nodes": 1}], "UNKNOWN"),
        ([], "UNKNOWN"),
    ],
)
def test_a_run_that_slurm_has_forgotten_has_the_state_of_its_ledger(events, state, tmp_path):
    run = run_of(tmp_path / "a", *events)
    forgotten = QueueEntry("7", JobState.UNKNOWN, reason=FORGOTTEN)
    assert status_of(run, "7", forgotten).state == state
    running = QueueEntry("7", JobState.RUNNING)
    assert status_of(run, "7", running).state == "RUNNING", "Slurm knows better"
    # the record of Slurm 24.05 and later of a job that was preempted once, whatever its end
    preempted = status_of(run, "7", QueueEntry("7", JobState.PREEMPTED)).state
    assert preempted == ("PREEMPTED" if state == "UNKNOWN" else state)


def test_status_says_what_the_newest_attempt_goes_on_with(tmp_path):
    kept = {"event": "kept", "answers": 312, "turns": 1204, "begun_again": 9, "tokens": 5}
    run = run_of(tmp_path / "a", {"event": "submitted", "job_id": "7"})
    run.new_attempt()
    for attempt, words in (
        ("7", ""),
        ("0", "312 answers and 1,204 turns kept, 9 answers begun again"),
    ):
        run.ledger.append(**kept, attempt=attempt)
        found = status_of(run, "7", QueueEntry("7", JobState.RUNNING))
        assert found.kept == words, "only of the newest attempt"
    assert ("resumed with", found.kept) in shown(found)


def test_a_status_is_kept_until_a_file_of_the_run_changes(no_slurm, tmp_path, monkeypatch):
    run = make_run(tmp_path / "a", num_steps=20, preempted_at=(9,))
    first = statuses([run])[0]
    assert first.state == "COMPLETED" and (run.root / CACHE).stat().st_mode & 0o077 == 0
    made = []
    monkeypatch.setattr(
        statuses_module, "status_of", lambda *given: made.append(1) or status_of(*given)
    )
    second = statuses([run])[0]
    assert not made and second.goodput == first.goodput and second.name == first.name
    run.ledger.append("submitted", job_id="99", nodes=2)
    assert statuses([run])[0].state == "UNKNOWN" and made == [1]
    assert statuses([run])[0].state == "UNKNOWN" and made == [1, 1], "kept only once it is over"


@pytest.mark.parametrize("text", ['{"torn', "[]", '{"version": 1, "sources": [], "status": {}}'])
def test_a_damaged_cache_is_made_again(no_slurm, text, tmp_path):
    run = make_run(tmp_path / "a", num_steps=5, preempted_at=())
    (run.root / CACHE).write_text(text)
    assert statuses([run])[0].step == 5
    assert json.loads((run.root / CACHE).read_text())["status"]["step"] == 5


def test_list_selects_states_and_names_those_there_are(no_slurm, tmp_path, capsys):
    make_run(tmp_path / "done", num_steps=5, preempted_at=())
    run_of(tmp_path / "broken", ENDED | {"verdict": "failed", "answer": 1, "cause": "no disk"})
    words = ("list", "--runs-dir", str(tmp_path))
    assert main([*words, "--state", "failed", "--json"]) == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)] == ["broken"]
    assert main([*words]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"broken +FAILED", shown) and re.search(r"done .*COMPLETED +5/5", shown)
    assert main([*words, "--state", "BROKEN"]) == 2
    assert "--state BROKEN: no state of Slurm" in capsys.readouterr().err


def test_status_says_how_far_the_start_is_while_a_node_extracts_the_image(tmp_path) -> None:
    """Minutes for an image of 30 GB, in which no agent can report."""
    run = run_of(tmp_path, {"event": "submitted", "job_id": "7"})
    folder = run.new_attempt()

    def why() -> str:
        return status_of(run, "7", QueueEntry("7", JobState.RUNNING, nodelist="n[01-02]")).reason

    assert why() == ""
    (folder / "launch.log").write_text("")
    assert why() == "starting: importing the image"
    run.ledger.append("attempt", attempt=int(folder.name), job_id="7", nodes="n[01-02]")
    assert why() == "starting: 0 of 2 nodes joined"
    (folder / "container").write_text("enroot\n")
    assert why() == "starting: 0 of 2 nodes joined; extracting the image on n01, n02"
    began = "2026-11-26 12:00:01.123 INFO agent[n01] looking for peers\n"
    (folder / "agent-n01.log").write_text(began)
    (folder / "agent-n02.log").write_text("n02: extracting the image /a.sqsh\n")
    with (folder / "agent-n02.log").open("a") as log:
        log.write("[INFO] Extracting squashfs filesystem...\nParallel unsquashfs: Using 2\n")
    assert why() == "starting: 1 of 2 nodes joined; extracting the image on n02"
    with (folder / "agent-n02.log").open("a") as log:
        log.write("Collecting psutil\n")
    assert why() == "starting: 1 of 2 nodes joined"
    with (folder / "agent-n01.log").open("a") as log:
        log.write("2026-11-26 12:00:09.123 INFO agent[n01] n02 joined from 10.0.0.2 (eth0)\n")
    assert why() == "starting: 2 of 2 nodes joined"
    run.ledger.append("started", attempt=int(folder.name), step=0)
    assert why() == ""


def test_a_list_of_ended_runs_loads_neither_the_settings_nor_numpy(no_slurm, tmp_path):
    """A fresh interpreter: these libraries take most of the time of a short command."""
    run_of(tmp_path / "runs/ended-1", {"event": "submitted", "job_id": "1"}, {"event": "done"})
    code = (
        "import sys; from rlpost.cli.main import main; assert main(['list']) == 0;"
        "assert 'rlpost.extensions.watching.run_status' in sys.modules;"
        "heavy = {'pydantic', 'numpy', 'submitit', 'transformers', 'torch', 'ray'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    environment = os.environ | {"RLPOST_RUNS_DIR": str(tmp_path / "runs")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "ended-1" in done.stdout and "COMPLETED" in done.stdout
