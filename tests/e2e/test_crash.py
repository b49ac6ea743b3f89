"""A supervised run on a real Slurm, killed ten times in every place it has, beside one that nobody
touched.
"""

import random

import pytest

from benchmarks.crash import PLACES, crash_lab, differences, finish, killed, num_steps
from benchmarks.crashed_run import CrashedRun

NUM_KILLS = 10


@pytest.fixture(scope="module")
def lab(slurm_available, assets):
    with crash_lab() as lab:
        yield lab


def test_a_run_killed_ten_times_ends_with_the_same_weights_and_every_prompt_once(lab):
    untouched = CrashedRun(lab, "untouched", num_steps(NUM_KILLS))
    finish(untouched)
    run = CrashedRun(lab, "killed", num_steps(NUM_KILLS))
    kills = killed(run, NUM_KILLS, random.Random(3))
    assert differences(run, untouched) == [], run.tell()
    assert {kill.place for kill in kills} == set(PLACES)
    assert len(kills) == NUM_KILLS
