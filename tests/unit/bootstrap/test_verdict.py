"""Invariant: every outcome has a verdict, and a run restarts only if a restart can help."""

import itertools
import json
import stat
from pathlib import Path

import pytest

from bootstrap.agent.verdict import AttemptOutcome, decide, write_verdict


@pytest.mark.parametrize(
    ("outcome", "word"),
    [
        (AttemptOutcome(driver_code=0), "done"),
        (AttemptOutcome(driver_code=0, lost="n02 is gone"), "done"),
        (AttemptOutcome(driver_code=75, stop_requested=True), "requeue"),
        (AttemptOutcome(driver_code=75), "requeue"),
        (AttemptOutcome(driver_code=75, lost="n02 is gone"), "failed"),
        (AttemptOutcome(driver_code=75, lost="n02 is gone", stop_requested=True), "requeue"),
        (AttemptOutcome(driver_code=78), "config"),
        (AttemptOutcome(driver_code=1), "failed"),
        (AttemptOutcome(driver_code=-9), "failed"),
        (AttemptOutcome(driver_code=1, stop_requested=True), "failed"),
        (AttemptOutcome(stop_requested=True), "requeue"),
        (AttemptOutcome(lost="n02 is gone"), "failed"),
        (AttemptOutcome(bringup_error="n03 did not join"), "failed"),
        (AttemptOutcome(bringup_error="n03 did not join", stop_requested=True), "failed"),
        (AttemptOutcome(bringup_error="other ray", bringup_verdict="config"), "config"),
        (AttemptOutcome(bringup_error="n03 is unfit", bringup_verdict="requeue"), "requeue"),
        (AttemptOutcome(), "failed"),
    ],
)
def test_the_table_of_verdicts(outcome: AttemptOutcome, word: str) -> None:
    assert decide(outcome).verdict == word


def test_every_outcome_has_a_verdict_with_a_cause() -> None:
    codes, errors, losses, stops = (
        (None, 0, 1, 75, 78, -9, -99),
        (None, "e"),
        (None, "l"),
        (True, False),
    )
    for code, error, lost, stop in itertools.product(codes, errors, losses, stops):
        assert decide(AttemptOutcome(code, "tail", error, lost, stop)).cause


def test_the_cause_is_what_was_lost_and_not_what_the_driver_made_of_it() -> None:
    assert (
        decide(
            AttemptOutcome(driver_code=1, driver_tail="RaySystemError", lost="n02 is gone")
        ).cause
        == "n02 is gone"
    )


def test_a_stop_before_the_start_does_not_speak_of_a_deadline() -> None:
    early = decide(AttemptOutcome(stop_requested=True, was_up=False))
    assert early.verdict == "requeue" and "deadline" not in early.cause


def test_a_failed_driver_is_quoted() -> None:
    cause = decide(AttemptOutcome(driver_code=-9, driver_tail="out of memory")).cause
    assert "SIGKILL" in cause and "out of memory" in cause


def test_the_word_stands_alone_in_its_file_and_the_cause_beside_it(tmp_path: Path) -> None:
    write_verdict(tmp_path, decide(AttemptOutcome(driver_code=78, driver_tail="lr: not a number")))
    assert (tmp_path / "verdict").read_text() == "config\n"
    assert "lr: not a number" in json.loads((tmp_path / "verdict.json").read_text())["cause"]
    assert stat.S_IMODE((tmp_path / "verdict").stat().st_mode) == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["verdict", "verdict.json"]


def test_hosts_to_avoid_stand_one_a_line_beside_the_verdict(tmp_path: Path) -> None:
    unfit = AttemptOutcome(
        bringup_error="too few", bringup_verdict="requeue", exclude=("n02", "n07")
    )
    write_verdict(tmp_path, decide(unfit))
    assert (tmp_path / "exclude").read_text() == "n02\nn07\n"
    assert json.loads((tmp_path / "verdict.json").read_text())["exclude"] == ["n02", "n07"]
    assert decide(AttemptOutcome(lost="n02 is gone", exclude=("n02",))).exclude == ("n02",)
    assert decide(AttemptOutcome(driver_code=0, lost="n02 is gone", exclude=("n02",))).exclude == ()


def test_what_the_driver_says_is_the_first_line_of_the_cause():
    """`rlpost status` shows this line."""
    said = "train_step hangs because of actor-2 on n03"
    verdict = decide(AttemptOutcome(driver_code=1, driver_tail="a warning", driver_cause=said))
    assert verdict.verdict == "failed"
    assert verdict.cause.splitlines() == [
        said,
        "the driver ended with exit code 1; its last lines:",
        "a warning",
    ]


def test_a_lost_node_is_the_cause_even_if_the_driver_saw_a_hang():
    outcome = AttemptOutcome(driver_code=1, driver_cause="train_step hangs", lost="n02 is gone")
    assert decide(outcome).cause == "n02 is gone"
