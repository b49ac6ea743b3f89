"""A fixed random sample of the trials; ``python -m tests.crash_consistency --all`` runs all."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.crash_consistency.oracle import baseline, metrics_lines
from tests.crash_consistency.scenarios import Trial, run_trial, trials
from tests.crash_consistency.world import NUM_STEPS, SETUPS, World

COUNTS = {
    "kill": 20,
    "power": 16,
    "stop": 8,
    "fault": 12,
    "sequence": 18,
    "damage": 14,
    "two_attempts": 12,
    "change": 8,
}
FAILED_ONCE = (
    "sequence/fully_async,slow_save/hanging+power/40/919916",
    "sequence/sync,replay/hanging+kill/273/848461",
    "sequence/sync,partial,replayed/full+power/64/56921",
    "sequence/sync,slow_save/failing+kill/68/220085",
    "sequence/fully_async,env/full+power/262/178560",
    "two_attempts/one_step_off,partial/before:some/1/400402",
)


@pytest.mark.parametrize("scenario", COUNTS)
def test_a_disturbed_run_ends_as_an_undisturbed_one(base: Path, scenario: str) -> None:
    planned = random.Random(1).sample(list(trials(base, scenario, seed=0)), COUNTS[scenario])
    _expect_no_problem(base, planned)


def test_trials_that_failed_once_do_not_fail_again(base: Path) -> None:
    _expect_no_problem(base, [Trial.named(name) for name in FAILED_ONCE])


def _expect_no_problem(base: Path, planned: Sequence[Trial]) -> None:
    failed = []
    for trial in planned:
        result = run_trial(base, trial)
        failed += [f"{trial}  {result.note}  {problem}" for problem in result.problems]
    details = "for details run python -m tests.crash_consistency --trial NAME"
    assert not failed, "\n".join([f"{len(failed)} problems; {details}", *failed])


@pytest.mark.parametrize(
    "setup", ["sync,interval", "one_step_off,interval", "fully_async,interval"]
)
def test_a_run_disturbed_between_two_weight_updates_resumes_with_the_weights_of_the_last_one(
    base: Path, setup: str
) -> None:
    failed, moments = [], range(baseline(base, SETUPS[setup]).num_changes)
    for number in random.Random(setup).sample(moments, 4):
        for what in ("kill/{}/before", "stop/{}/journal", "stop/{}/checkpoint"):
            trial = Trial.named(f"{what.format(setup)}/{number}/1")
            result = run_trial(base, trial)
            failed += [f"{trial}  {result.note}  {problem}" for problem in result.problems]
    assert not failed, "\n".join(failed)


def test_the_metrics_of_every_step_contain_the_lag_of_the_event_loop(base: Path) -> None:
    world = World(base, SETUPS["sync"])
    assert world.attempt().how == "done"
    lines = [line for line in metrics_lines(world.run.metrics) if line["step"] > 0]
    assert len(lines) == NUM_STEPS
    assert all("driver/loop_lag_s" in line for line in lines)
