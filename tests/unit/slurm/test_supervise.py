"""Decisions after an attempt: the pure function, then what is recorded."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from common.ledger import Ledger
from slurm import supervise
from slurm.supervise import (
    Budgets,
    Ending,
    RestartDecision,
    bad_hosts,
    decide,
    describe_shortage,
    final_code,
    record_chained,
    record_end,
    record_start,
    stalled_attempts,
    why_too_few,
)

BUDGETS = Budgets(max_preemptions=2, max_failures=1, max_stalled_attempts=3)
ROOMY = Budgets(max_preemptions=1, max_failures=3, max_stalled_attempts=9)
SUBMITTED, ATTEMPT = {"event": "submitted"}, {"event": "attempt"}
PREEMPTED, FAILED = ({"event": "verdict", "verdict": word} for word in ("requeue", "failed"))


def committed(step: int) -> dict[str, Any]:
    return {"event": "committed", "step": step}


def code(ending: Ending, *entries: dict[str, Any]) -> int | None:
    return decide(ending, entries, BUDGETS).code


@pytest.mark.parametrize(("verdict", "expected"), [("done", 0), ("config", 78)])
def test_done_and_wrong_settings_are_final_whatever_the_budgets(
    verdict: str, expected: int
) -> None:
    assert code(Ending(verdict, code=1)) == expected


@pytest.mark.parametrize(
    ("verdict", "expected"), [("requeue", 75), ("failed", 3), ("none", 3), ("gibberish", 3)]
)
def test_after_term_and_where_forbidden_nothing_comes_back(verdict: str, expected: int) -> None:
    """A cancelled run stays cancelled; the exit code is the attempt's."""
    assert code(Ending(verdict, code=3)) is None
    assert code(Ending(verdict, code=3, terminated=True)) == expected
    assert code(Ending(verdict, code=3, no_restart="never")) == expected


def test_a_run_that_was_cancelled_comes_back_only_when_it_is_submitted_again() -> None:
    cancelled = {"event": "cancelled"}
    assert code(Ending("requeue"), SUBMITTED, cancelled) == 75
    assert code(Ending("requeue"), SUBMITTED, cancelled, SUBMITTED) is None


def test_the_next_job_of_a_chain_is_taken_back_when_the_run_was_cancelled_before_its_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled between the decision to restart and the entry with the next job."""
    (tmp_path / "scancel").write_text(f"#!/bin/sh\necho $* >>{tmp_path}/taken\n")
    (tmp_path / "scancel").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    record_chained(tmp_path, 0, "8")
    assert not (tmp_path / "taken").exists()
    Ledger(tmp_path / "ledger.jsonl").append("cancelled", job_id="8")
    record_chained(tmp_path, 0, "9;big")
    assert (tmp_path / "taken").read_text() == "--clusters=big 9\n"


def test_a_job_that_was_cancelled_while_it_was_requeued_does_not_start_again(
    tmp_path: Path,
) -> None:
    """The job of a new submission starts, even if its entry is still missing."""
    Ledger(tmp_path / "ledger.jsonl").append("cancelled", job_id="7")
    assert [record_start(tmp_path, 1, job, "", {}) for job in "78"] == [False, True]


def test_an_attempt_records_how_many_nodes_are_allocated_where_slurm_says_it(
    tmp_path: Path,
) -> None:
    record_start(tmp_path, 1, "7", "", {"SLURM_JOB_NUM_NODES": "3"})
    record_start(tmp_path, 1, "8", "", {})
    numbers = [entry.get("num_nodes") for entry in Ledger(tmp_path / "ledger.jsonl").read()]
    assert numbers == [3, None]


@pytest.mark.parametrize(
    ("ended", "job", "expected"),
    [
        ({"verdict": "done", "answer": 0}, "7", 0),
        ({"verdict": "config", "answer": 78}, "7", 78),
        ({"verdict": "failed", "answer": 3, "final": True}, "7", 3),
        ({"verdict": "requeue", "answer": 75, "final": False}, "7", None),  # Slurm preempted it
        ({"verdict": "requeue", "answer": "again", "final": False}, "7", None),
        ({"verdict": "done", "answer": 0, "final": True}, "8", None),  # another job resumes it
    ],
)
def test_only_the_job_whose_end_is_final_must_not_start_again(
    ended: dict[str, Any], job: str, expected: int | None
) -> None:
    entries = [
        {"event": "attempt", "attempt": 0, "job_id": "7"},  # before sbatch has returned
        {"event": "submitted", "job_id": "7"},
        {"event": "verdict", "attempt": 0, **ended},
    ]
    assert final_code(entries, job) == expected
    assert final_code([*entries, {"event": "submitted", "job_id": "9"}], "7") is None


def test_a_submission_counts_from_its_intent_unless_it_was_rejected() -> None:
    """sbatch may have no answer, and the job of a resumed run is not a cancelled one."""
    cancelled = {"event": "cancelled"}
    intent = {"event": "submitting", "outcome": "submitted", "file": "f"}
    assert code(Ending("requeue"), SUBMITTED, cancelled, intent, ATTEMPT) is None
    rejected = {"event": "rejected", "file": "f"}
    assert code(Ending("requeue"), SUBMITTED, cancelled, intent, rejected) == 75
    engines = {**intent, "outcome": "fleet"}
    assert code(Ending("requeue"), SUBMITTED, cancelled, engines) == 75


def test_a_failure_never_exits_with_zero() -> None:
    assert code(Ending("failed", code=0, terminated=True)) == 1


def test_preemptions_and_failures_have_budgets_of_their_own() -> None:
    """The budgets are independent, and the message names the one that is spent."""
    progress = (ATTEMPT, committed(1))
    assert code(Ending("requeue"), PREEMPTED, FAILED, FAILED, *progress) is None
    assert code(Ending("failed"), PREEMPTED, PREEMPTED, PREEMPTED, *progress) is None
    spent = decide(Ending("requeue"), (PREEMPTED, PREEMPTED, *progress), BUDGETS)
    reason = "not requeued: preemptions: 3, and max_preemptions is 2"
    assert spent == RestartDecision(75, reason, is_final=True)
    assert "max_failures is 1" in decide(Ending("none"), (FAILED,), BUDGETS).reason


def test_submitting_again_gives_new_budgets() -> None:
    assert code(Ending("failed"), FAILED, SUBMITTED) is None
    assert code(Ending("failed"), SUBMITTED, FAILED) == 1


def test_a_run_that_makes_no_progress_ends_at_the_third_attempt() -> None:
    """Only a checkpoint beyond the newest earlier one counts as progress."""
    before = [ATTEMPT, committed(20)]
    assert code(Ending("requeue"), *before, ATTEMPT, committed(20), ATTEMPT) is None
    assert code(Ending("requeue"), *before, ATTEMPT, committed(20), ATTEMPT, ATTEMPT) == 75
    assert code(Ending("requeue"), *before, ATTEMPT, committed(21), ATTEMPT, ATTEMPT) is None


def test_attempts_without_a_verdict_count_as_standing_still() -> None:
    """Their batch host died. A new submission resets the count but not the newest checkpoint."""
    assert stalled_attempts([ATTEMPT, ATTEMPT]) == 2
    assert stalled_attempts([ATTEMPT, committed(5), SUBMITTED, ATTEMPT, committed(5)]) == 1
    assert stalled_attempts([ATTEMPT, committed(5), SUBMITTED, ATTEMPT, committed(6)]) == 0


def test_whoever_removes_checkpoints_and_submits_again_makes_progress_from_where_the_run_begins() -> (
    None
):
    def started(step: int) -> dict[str, Any]:
        return {"event": "started", "step": step}

    before = [ATTEMPT, started(0), committed(90), SUBMITTED, ATTEMPT, started(30)]
    assert stalled_attempts([*before, committed(40)]) == 0
    assert stalled_attempts([*before, ATTEMPT, started(30), committed(30)]) == 2, (
        "from there on as always"
    )
    assert stalled_attempts([ATTEMPT, committed(90), ATTEMPT, started(60), committed(90)]) == 1, (
        "nobody did: damaged"
    )


def test_a_job_that_begins_before_its_submission_is_written_down_counts() -> None:
    early = [{"event": "attempt", "job_id": "7"}, {"event": "submitted", "job_id": "7"}]
    assert stalled_attempts([ATTEMPT, *early]) == 1
    assert stalled_attempts([*early, {"event": "attempt", "job_id": "8"}]) == 2


def test_bad_hosts_of_all_attempts_are_collected_and_nonsense_is_left_out(
    tmp_path: Path, capsys: Any
) -> None:
    for number, text in enumerate(["n02\n\n", "n01\n$(touch x)\nn02\n", ""]):
        folder = tmp_path / "attempts" / str(number)
        folder.mkdir(parents=True)
        (folder / "exclude").write_text(text)
    assert bad_hosts(tmp_path) == ["n01", "n02"]
    assert "'$(touch x)'" in capsys.readouterr().err


def what_follows(
    run: Path,
    code: int = 1,
    *,
    budgets: Budgets = ROOMY,
    terminated: bool = False,
    exclude: Sequence[str] = (),
    environ: Mapping[str, str] = MappingProxyType({}),
) -> int | str | None:
    """What follows attempt 0: the exit code of the job, or ``again`` with the excluded hosts."""
    ending = Ending("none", code, terminated)
    answer = record_end(run, 0, ending, budgets, static=exclude, environ=environ)
    return answer.code if answer.code is not None else " ".join(["again", *answer.exclude])


def test_the_ledger_tells_an_attempt_from_its_start_to_its_end(tmp_path: Path) -> None:
    """Nodes, image and code at the start; verdict, cause, answer and bad hosts at the end."""
    attempt = tmp_path / "attempts/0"
    attempt.mkdir(parents=True)
    (tmp_path / "code.json").write_text('{"commit": "abc", "is_dirty": true}')
    (attempt / "verdict").write_text("failed\n")
    (attempt / "verdict.json").write_text('{"cause": "n02 is gone"}')
    (attempt / "exclude").write_text("n02\n")
    environ = {"RLPOST_HOME": "/home/me/rlpost", "SLURM_JOB_NODELIST": "n[01-02]"}
    image = f"/images/sha256-{'0' * 64}.sqsh"
    assert record_start(tmp_path, 0, "7", image, environ)
    budgets = Budgets(1, 1, 2)
    assert what_follows(tmp_path, budgets=budgets, exclude=["n[07-08]"]) == "again n[07-08] n02"
    start, end = Ledger(tmp_path / "ledger.jsonl").read()
    del start["time"], end["time"]
    assert start == {
        "event": "attempt",
        "attempt": 0,
        "job_id": "7",
        "nodes": "n[01-02]",
        "image": {"path": image, "sha256": "0" * 64, "names": []},
        "home": "/home/me/rlpost",
        "code": {"commit": "abc", "is_dirty": True},
    }
    assert end == {
        "event": "verdict",
        "attempt": 0,
        "verdict": "failed",
        "cause": "n02 is gone",
        "answer": "again",
        "reason": "requeue after a failure (1 of 1)",
        "exclude": ["n02"],
        "final": False,
    }
    assert what_follows(tmp_path, 9, budgets=budgets) == 9


def begun(run: Path, nodes: str, logs: dict[str, str], launch: str) -> Path:
    """Folder of an attempt that started and left these logs."""
    attempt = run / "attempts/0"
    attempt.mkdir(parents=True)
    record_start(run, 0, "7", "", {"SLURM_JOB_NODELIST": nodes})
    for host, text in logs.items():
        (attempt / f"agent-{host}.log").write_text(text)
    (attempt / "launch.log").write_text(launch)
    return attempt


def test_what_fails_everywhere_before_the_agents_ends_the_job_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Verdict config, exit 78; ledger, log and files of the attempt contain the cause."""
    image = "[ERROR] Invalid image format: /images/rl.sqsh\n"
    launch = "srun: error: n[01-02]: tasks 0-1: Exited with exit code 1\n"
    attempt = begun(tmp_path, "n[01-02]", {"n01": image, "n02": image}, launch)
    assert what_follows(tmp_path) == 78
    said = capsys.readouterr().err
    assert "cause: n01, n02: the image /images/rl.sqsh is damaged" in said and "remedy:" in said
    entry = Ledger(tmp_path / "ledger.jsonl").read()[-1]
    assert (entry["verdict"], entry["answer"]) == ("config", 78)
    assert "/images/rl.sqsh" in str(entry["cause"])
    assert (attempt / "verdict").read_text() == "config\n"


def test_what_may_pass_is_tried_again_and_told_with_where_it_begins(tmp_path: Path) -> None:
    full = "Write on output file failed because No space left on device\n"
    launch = "srun: error: n[01-02]: tasks 0-1: Exited with exit code 1\n"
    begun(tmp_path, "n[01-02]", {"n01": full, "n02": full}, launch)
    assert what_follows(tmp_path) == "again"
    entry = Ledger(tmp_path / "ledger.jsonl").read()[-1]
    assert entry["verdict"] == "failed" and "No space left on device" in entry["cause"]


def test_an_import_that_failed_stands_in_the_ledger(tmp_path: Path) -> None:
    said = "enroot import docker://r.org#rl:9 failed (exit 1):\n[ERROR] URL https://r.org/v2 returned error code: {}\n"
    begun(tmp_path, "n01", {}, said.format("404 Not Found"))
    assert what_follows(tmp_path) == 78
    assert "404 Not Found" in Ledger(tmp_path / "ledger.jsonl").read()[-1]["cause"]
    (tmp_path / "attempts/0/verdict").unlink()
    (tmp_path / "attempts/0/launch.log").write_text(said.format("503 Service Unavailable"))
    assert what_follows(tmp_path) == "again"
    assert "503" in Ledger(tmp_path / "ledger.jsonl").read()[-1]["cause"]


def test_a_cancelled_attempt_is_blamed_on_nobody(tmp_path: Path) -> None:
    launch = "srun: error: n01: task 0: Exited with exit code 1\n"
    begun(tmp_path, "n01", {"n01": "setup command failed: sleep 99\n"}, launch)
    assert what_follows(tmp_path, terminated=True) == 1
    assert Ledger(tmp_path / "ledger.jsonl").read()[-1]["verdict"] == "none"


def test_a_job_that_its_excluded_hosts_leave_no_room_for_ends_with_their_names(
    tmp_path: Path,
) -> None:
    """Slurm would keep it pending with BadConstraints."""
    attempt = begun(tmp_path, "n[01-02]", {}, "")
    (attempt / "exclude").write_text("n02\n")
    (attempt / "verdict").write_text("failed\n")
    answers = {
        "scontrol": "echo JobId=7 Partition=batch NumNodes=2",
        "sinfo": r'printf "n01|x\nn02|x\n"',
    }
    for name, text in answers.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    assert what_follows(tmp_path, environ=environ) == 1
    reason = Ledger(tmp_path / "ledger.jsonl").read()[-1]["reason"]
    assert "without n02" in reason and "1 of the 2 nodes" in reason and "--resume" in reason
    (tmp_path / "sinfo").write_text('#!/bin/sh\nprintf "n01|x\\nn02|x\\nn03|x\\n"\n')
    assert what_follows(tmp_path, environ=environ) == "again n02"
    (attempt / "agent-n02.log").write_text("Write failed because No space left on device\n")
    (attempt / "freed-n02").touch()
    assert what_follows(tmp_path, environ=environ) == "again"


def test_an_attempt_that_had_time_for_the_journal_alone_counts_by_the_step_it_reached() -> None:
    def left(step: int, saved: str) -> dict[str, Any]:
        return {"event": "preempted", "step": step, "saved": saved}

    assert stalled_attempts([ATTEMPT, committed(3), ATTEMPT, left(5, "journal")]) == 0
    assert stalled_attempts([ATTEMPT, committed(3), ATTEMPT, left(5, "nothing")]) == 1
    assert stalled_attempts([ATTEMPT, left(5, "journal"), ATTEMPT, left(5, "journal")]) == 1, (
        "no farther than before"
    )


JOB = "JobId=7 JobName=tiny UserId=u(1) JobState=RUNNING Partition=batch NumNodes=2 NumCPUs=8 Features={} DelayBoot=0"
NODES = "n01|gpu,a100\nn02|gpu,a100\nn03|gpu\n"


@pytest.mark.parametrize(
    ("features", "excluded", "left"),
    [
        ("(null)", ["n02"], None),
        ("(null)", ["n02", "n03"], 1),
        ("(null)", ["n[02-03]"], 1),
        ("(null)", ["n09"], None),
        ("a100", ["n02"], 1),
        ("gpu&a100", ["n02"], 1),
        ("gpu", ["n02"], None),
        ("[a100|h100]", ["n02"], None),
    ],
)
def test_a_job_that_would_wait_for_good_is_told_by_its_hosts(
    features: str, excluded: list[str], left: int | None
) -> None:
    said = describe_shortage(JOB.format(features), NODES, excluded)
    if left is None:
        assert said is None
    else:
        assert said is not None and "without n02" in said and f"has {left} of the 2 nodes" in said
        assert "--resume" in said and "attempts/*/exclude" in said


@pytest.mark.parametrize(
    ("job", "nodes"), [("", NODES), (JOB, ""), ("JobId=7 NumNodes=2", NODES[:0])]
)
def test_where_slurm_says_nothing_nothing_is_claimed(job: str, nodes: str) -> None:
    assert describe_shortage(job, nodes, ["n01", "n02", "n03"]) is None


def test_slurm_is_asked_and_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = {
        "scontrol": f"echo '{JOB.format('(null)')}'",
        "sinfo": '[ "$SINFO_FORMAT$SLURM_TIME_FORMAT" ] || printf "n01|x\\nn02|x\\n"',
    }
    for name, text in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environ = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SINFO_FORMAT": "%P",
        "SLURM_TIME_FORMAT": "%s",
    }
    monkeypatch.setenv("PATH", environ["PATH"])
    assert "has 1 of the 2 nodes" in (why_too_few(["n02"], environ) or "")
    assert why_too_few([], environ) is None
    assert why_too_few(["n02"], {"PATH": environ["PATH"]}) is None, "outside a job"
    (tmp_path / "sinfo").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(supervise, "ANSWER_S", 0.2)
    assert why_too_few(["n02"], environ) is None
