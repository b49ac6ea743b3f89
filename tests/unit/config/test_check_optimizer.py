"""Schedules and precisions that cannot be are named with their numbers."""

import pytest

from rlpost.config.checks.observe import observe_problems
from rlpost.config.checks.optimizer import optimizer_problems
from rlpost.config.load import load
from rlpost.config.tree import Config
from rlpost.errors import ConfigError


def config(perf=None, **optimizer):
    return load(
        [], {"optimizer": optimizer, "perf": perf or {}, "rollout": {"num_rollout": 10}}
    ).config


def test_the_settings_of_published_recipes_have_no_problems():
    offloaded = {
        "lr": 1e-6,
        "lr_decay_style": "constant",
        "weight_decay": 0.1,
        "adam_beta2": 0.98,
        "optimizer_cpu_offload": True,
        "overlap_cpu_optimizer_d2h_h2d": True,
        "use_precision_aware_optimizer": True,
    }
    assert optimizer_problems(config()) == optimizer_problems(config(**offloaded)) == []
    wsd = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 3, "lr_warmup_iters": 2}
    assert optimizer_problems(config(**wsd)) == []


def test_a_learning_rate_falls_over_all_steps_of_the_run_unless_told_otherwise():
    assert config().lr_decay_iters == 10
    assert config(lr_decay_iters=7).lr_decay_iters == 7


def problems(**observe):
    cluster = {"actor_num_nodes": 1, "actor_num_gpus_per_node": 2}
    return observe_problems(
        Config.model_validate(
            {"rollout": {"num_rollout": 20}, "cluster": cluster, "observe": observe}
        )
    )


@pytest.mark.parametrize(("text", "steps"), [("3:5", [3, 4, 5]), ("7", [7]), ("2:2", [2])])
def test_steps_are_traced_from_the_first_to_the_last(text, steps):
    config = load([], {"observe": {"trace_steps": text}}).config
    assert list(config.observe.traced) == steps
    assert list(config.observe.profiled) == []


@pytest.mark.parametrize("text", ["5:3", "0:3", "a", "3-5", "3:"])
def test_what_is_no_range_of_steps_is_an_error_with_its_form(text):
    with pytest.raises(ConfigError, match="FIRST:LAST"):
        load([], {"observe": {"trace_steps": text}})


def test_memory_that_would_be_recorded_after_the_run_is_named_and_an_unwanted_profile_is_not():
    assert problems(profile_step_start=9, profile_step_end=3) == []
    assert problems(profile=True) == []
    (late,) = problems(record_memory_history=True, profile_step_start=21, profile_step_end=22)
    assert "--profile-step-start 21 is after the last step, --num-rollout 20" in late
