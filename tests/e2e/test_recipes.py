"""Each recipe of a dense Qwen3 in small: two real steps with its own algorithm, rollout and way of
sharing GPUs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.scaled import assert_two_steps_are_trained, make_models, run_scaled

RANKS = 2
RECIPES = ["qwen3_4b", "qwen3_4b_decoupled", "qwen3_4b_async", "qwen3_4b_fp8"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where their models are, and their runs."""
    made = tmp_path_factory.mktemp("recipes")
    make_models(made, RECIPES, RANKS)
    return made


def test_trainer_and_engines_take_turns_in_the_colocated_recipe(home: Path) -> None:
    run = run_scaled(home, "qwen3_4b", RANKS)
    assert_two_steps_are_trained(run)
    assert run.config.cluster.colocate and run.config.num_engines == 2
    log = (run.folder / "attempts/0/actor-0.log").read_text()
    assert "offloaded weights" in log and "restored weights" in log


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
