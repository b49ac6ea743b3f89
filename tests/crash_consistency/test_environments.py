"""Runs with a two-turn environment, killed or stopped at many points, train the same episodes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.crash_consistency.oracle import baseline
from tests.crash_consistency.scenarios import Trial, run_trial
from tests.crash_consistency.world import WITH_ENVIRONMENT

NUM_KILLS, NUM_STOPS = 6, 2


@pytest.mark.parametrize("name", WITH_ENVIRONMENT)
def test_a_run_with_an_environment_resumes_with_the_episodes_of_an_undisturbed_one(
    base: Path, name: str
) -> None:
    """No trained episode is generated again, and each token is that of its version's weights.

    Weights are a hash of all trained tokens, masks, rewards and prompts. They equal those of the
    undisturbed run where batches do not depend on the clock.
    """
    setup = WITH_ENVIRONMENT[name]
    undisturbed = baseline(base, setup)
    draw = random.Random(name)
    numbers = draw.sample(range(undisturbed.num_changes), NUM_KILLS + NUM_STOPS)
    trials = [Trial("kill", name, "before", number) for number in numbers[:NUM_KILLS]]
    trials += [Trial("stop", name, "checkpoint", number, 1) for number in numbers[NUM_KILLS:]]
    failed = []
    interrupted = 0
    for trial in trials:
        result = run_trial(base, trial)
        interrupted += len(result.endings) > 1
        failed += [f"{trial}  {result.note}  {problem}" for problem in result.problems]
    assert not failed, "\n".join(failed)
    assert interrupted > NUM_KILLS / 2, "most trials end an attempt before the run is done"
