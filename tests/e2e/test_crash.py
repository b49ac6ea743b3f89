"""A supervised run on a real Slurm, killed once in every place it has, beside one that nobody
killed, whose answers came from a fleet. The benchmark ``crash`` kills any number of times.
"""

import random

from benchmarks.crash import PLACES, differences, killed, num_steps
from benchmarks.crashed_run import CrashedRun
from tests.e2e.fleet import NUM_KILLS


def test_a_run_killed_in_every_place_ends_with_the_same_weights_and_every_prompt_once(
    crash_cluster, fleet_story
):
    undisturbed = fleet_story.run
    run = CrashedRun(crash_cluster, "killed", num_steps(NUM_KILLS))
    kills = killed(run, NUM_KILLS, random.Random(3))
    assert differences(run, undisturbed, [kill.at for kill in kills]) == [], run.tell()
    assert {kill.place for kill in kills} == set(PLACES)
    assert len(kills) == NUM_KILLS
