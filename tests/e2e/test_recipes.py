"""Each recipe of a dense Qwen3 in small: two real steps with its own algorithm, rollout and way of
sharing GPUs. In the colocated one a trainer rank and an engine are killed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rlpost.rollout.recorded import read_groups
from tests.e2e.local_run import LocalRun
from tests.e2e.scaled import (
    ScaledRun,
    assert_steps_are_trained,
    assert_two_steps_are_trained,
    make_models,
    run_scaled,
)

RANKS = 2
RECIPES = ["qwen3_4b", "qwen3_4b_decoupled", "qwen3_4b_async", "qwen3_4b_fp8"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where their models are, and their runs."""
    made = tmp_path_factory.mktemp("recipes")
    make_models(made, RECIPES, RANKS)
    return made


@pytest.fixture(scope="module")
def colocated(home: Path) -> ScaledRun:
    """A run whose engines share the GPUs of the trainer, of which a rank and an engine are
    killed.
    """

    def disturb(run: LocalRun) -> None:
        run.kill_a_rank_and_an_engine(after_step=2)
        run.done()
        run.assert_went_on_in_its_attempt()

    record = ("--save-debug-rollout-data", str(home / "colocated-{rollout_id}.jsonl"))
    flags = ("--rollout-health-check-interval", "1", *record)
    return run_scaled(home, "qwen3_4b", RANKS, *flags, num_steps=5, disturb=disturb)


def test_trainer_and_engines_take_turns_in_the_colocated_recipe(colocated: ScaledRun) -> None:
    run = colocated
    assert_steps_are_trained(run)
    assert run.config.cluster.colocate and run.config.num_engines == 2
    log = (run.folder / "attempts/0/actor-0.log").read_text()
    assert "offloaded weights" in log and "restored weights" in log


def test_the_colocated_recipe_trains_every_sample_though_a_rank_and_an_engine_are_killed(
    home: Path, colocated: ScaledRun
) -> None:
    """The ranks are started again beside engines that stay; the engine is restarted and given the
    current weights; and every step trains every one of its samples.
    """
    template, rollout = str(home / "colocated-{rollout_id}.jsonl"), colocated.config.rollout
    trained = [
        group for step in range(colocated.num_steps) for group in read_groups(template, step)
    ]
    assert len({group.prompt_id for group in trained}) == len(trained)
    assert len(trained) == colocated.num_steps * rollout.rollout_batch_size
    assert {len(group.samples) for group in trained} == {rollout.n_samples_per_prompt}


def test_the_decoupled_recipe_has_engines_of_its_own(home: Path) -> None:
    run = run_scaled(home, "qwen3_4b_decoupled", RANKS)
    assert_two_steps_are_trained(run)
    assert (run.config.actor_world_size, run.config.rollout_num_gpus, run.config.num_engines) == (
        2,
        2,
        2,
    )
    assert [line["rollout/staleness_max"] for line in run.trained] == [0, 0]


def test_the_async_recipe_generates_the_next_batch_while_it_trains(home: Path) -> None:
    """So the second is one version old."""
    run = run_scaled(home, "qwen3_4b_async", RANKS)
    assert run.config.rollout.rollout_mode == "one_step_off"
    assert [line["rollout/staleness_max"] for line in run.trained] == [0, 1]
    assert_two_steps_are_trained(run, last_differs=1e-2)


def test_engines_of_the_fp8_recipe_compute_in_fp8_and_the_trainer_does_not(home: Path) -> None:
    """Far more than rounding lies between their log-probs, and far less than between two models."""
    run = run_scaled(home, "qwen3_4b_fp8", RANKS)
    assert_two_steps_are_trained(run, first_differs=0.05, last_differs=0.05)
    assert all(line["train/rollout_logprob_abs_diff"] > 1e-3 for line in run.trained)
