"""A sample of all trials, the same at every run; ``python -m tests.crash_consistency --all`` runs them all."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.crash_consistency.scenarios import run_trial, trials

COUNTS = {"kill": 120, "power": 90, "stop": 50, "fault": 80, "damage": 90, "two_attempts": 80, "change": 40}


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
