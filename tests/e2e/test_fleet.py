"""Engines of a fleet on jobs that come and go, and a run without a fleet that is killed once in
every place it has: a real Slurm, Ray, Megatron and SGLang. Both runs end with the same weights.

``benchmarks.fleet`` and ``benchmarks.crash`` do the same as often as asked for.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.crash import PLACES, crash_lab, differences, killed, num_steps
from benchmarks.crashed_run import CrashedRun
from common.exit_codes import EXIT_PREEMPTED
from rlpost.metrics.writer import read_metrics
from rlpost.report.fleet_use import used_of
from tests.cluster.jobs import job_info, until
from tests.cluster.lab import Lab
from tests.e2e.fleet import NUM_KILLS, FleetStory, tell


@pytest.fixture(scope="module")
def lab(slurm_available: None, assets: Path) -> Iterator[Lab]:
    """Two nodes for engines that come and go, and for the run that is killed."""
    with crash_lab() as lab:
        yield lab


@pytest.fixture(scope="module")
def story(lab: Lab) -> FleetStory:
    """An undisturbed run, while engines of its fleet came and went."""
    return tell(lab)


def batch_log(story: FleetStory, engine: str) -> str:
    return (story.run.fleet_folder.logs / f"{engine}.batch").read_text()


def test_every_prompt_is_answered_once_and_the_run_ends_in_its_first_attempt(story):
    run = story.run
    finished = run.finished()
    assert len(set(finished)) == len(finished) > 0
    steps = [line["step"] for line in read_metrics(run.folder / "metrics.jsonl")]
    assert [step for step in steps if step] == list(range(1, run.num_steps + 1))
    assert run.is_done and run.count("attempt") == 1


def test_both_engines_served_and_the_table_showed_it(story):
    for engine in (story.preempted, story.killed):
        (line,) = [one for one in story.shown.splitlines() if one.startswith(f"{engine} ")]
        assert "RUNNING" in line and "ready" in line
    used = used_of(story.run.ledger)
    assert used[story.preempted] > 0 and used[story.killed] > 0


def test_the_preempted_engine_left_with_a_notice_was_requeued_and_served_again(story):
    run, log = story.run, batch_log(story, story.preempted)
    assert "USR2: preemption" in log and f"srun exit {EXIT_PREEMPTED}" in log
    first, second, *_ = run.starts_at(story.preempted)
    answers = run.answers_at(story.preempted)
    assert any(first <= at <= second for at in answers) and any(at > second for at in answers)


def test_the_killed_engine_was_requeued_and_served_again(story):
    run = story.run
    assert "USR2" not in batch_log(story, story.killed)
    assert max(run.answers_at(story.killed)) > run.starts_at(story.killed)[1]


def test_the_drained_engine_ended_and_the_other_left_when_the_run_was_done(story):
    run = story.run
    assert job_info(run.lab, story.preempted).state == "COMPLETED"
    until(lambda: run.job_is_over(story.killed), run.lab, "the last engine leaves")
    assert job_info(run.lab, story.killed).state == "COMPLETED"


def test_the_secret_of_the_fleet_stands_in_one_file_and_is_not_that_of_the_attempt(story):
    run = story.run
    secret = run.fleet_folder.secret().encode()
    files = [path for path in run.folder.rglob("*") if path.is_file()]
    assert [path for path in files if secret in path.read_bytes()] == [
        run.fleet_folder.root / "secret"
    ]
    of_attempt = (run.folder / "attempts/0/secret").read_bytes().strip()
    logs = list(run.fleet_folder.root.rglob("*"))
    assert not [one for one in logs if one.is_file() and of_attempt in one.read_bytes()]


def test_a_run_killed_in_every_place_ends_with_the_same_weights_and_every_prompt_once(lab, story):
    run = CrashedRun(lab, "killed", num_steps(NUM_KILLS))
    kills = killed(run, NUM_KILLS, random.Random(3))
    assert differences(run, story.run, [kill.at for kill in kills]) == [], run.tell()
    assert {kill.place for kill in kills} == set(PLACES)
    assert len(kills) == NUM_KILLS
