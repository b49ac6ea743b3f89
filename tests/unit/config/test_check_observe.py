"""Steps to look at: as text, and those that would leave nothing behind."""

import pytest

from rlpost.config.checks.observe import observe_problems
from rlpost.config.load import load
from rlpost.config.tree import Config
from rlpost.errors import ConfigError


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


def test_a_profile_that_would_be_empty_is_named_and_one_that_is_not_wanted_is_none():
    assert problems(profile_step_start=9, profile_step_end=3) == []
    assert problems(profile=True) == []
    (order,) = problems(profile=True, profile_step_start=9, profile_step_end=9)
    assert "--profile-step-end 9 must be above --profile-step-start 9" in order
    (late,) = problems(record_memory_history=True, profile_step_start=21, profile_step_end=22)
    assert "--profile-step-start 21 is after the last step, --num-rollout 20" in late
    (rank,) = problems(profile=True, profile_ranks=(0, 2))
    assert "rank 2 does not exist" in rank
    (trace,) = problems(trace_steps="21:22")
    assert "--trace-steps 21:22" in trace
