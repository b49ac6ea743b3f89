"""A sample of all trials, the same at every run; ``python -m tests.crash_consistency --all`` runs
them all.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.crash_consistency.oracle import baseline, metrics_lines
from tests.crash_consistency.scenarios import Trial, run_trial, trials
from tests.crash_consistency.world import NUM_STEPS, SETUPS, World

COUNTS = {
    "kill": 120,
    "power": 90,
    "stop": 50,
    "fault": 80,
    "damage": 90,
    "two_attempts": 80,
    "change": 40,
}


@pytest.mark.parametrize("scenario", COUNTS)
def test_a_run_that_is_disturbed_ends_as_if_nothing_had_happened(base: Path, scenario: str) -> None:
    planned = random.Random(1).sample(list(trials(base, scenario, seed=0)), COUNTS[scenario])
    failed = []
    for trial in planned:
        result = run_trial(base, trial)
        failed += [f"{trial}  {result.note}  {problem}" for problem in result.problems]
    assert not failed, "\n".join(
        [f"python -m tests.crash_consistency --trial NAME tells more of {len(failed)}:", *failed]
    )


@pytest.mark.parametrize(
    "setup", ["sync,interval", "one_step_off,interval", "fully_async,interval"]
)
def test_a_run_that_is_disturbed_between_two_updates_of_the_engines_has_the_weights_of_the_last_one(
    base: Path, setup: str
) -> None:
    failed, moments = [], range(baseline(base, SETUPS[setup]).num_changes)
    for number in random.Random(setup).sample(moments, 12):
        for what in ("kill/{}/before", "stop/{}/journal", "stop/{}/checkpoint"):
            trial = Trial.named(f"{what.format(setup)}/{number}/1")
            result = run_trial(base, trial)
            failed += [f"{trial}  {result.note}  {problem}" for problem in result.problems]
    assert not failed, "\n".join(failed)


def test_the_driver_says_in_the_line_of_every_step_how_late_its_event_loop_was(base: Path) -> None:
    world = World(base, SETUPS["sync"])
    assert world.attempt().how == "done"
    lines = [line for line in metrics_lines(world.run.metrics) if line["step"] > 0]
    assert len(lines) == NUM_STEPS
    assert all("driver/loop_lag_s" in line for line in lines)
