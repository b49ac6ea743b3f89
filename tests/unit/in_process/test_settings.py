"""Settings of a run in one process: what has no effect is refused, the rest arrives."""

import pytest

from rlpost.config.flags import fields, groups
from rlpost.config.groups.checkpoint import CheckpointConfig
from rlpost.errors import ConfigError
from rlpost.extensions.in_process.settings import (
    ABSENT,
    NEVER_ABORTED,
    ONE_DEVICE,
    REWARDS,
    STARTS,
    one_process_config,
)

IDLE = [(table, key) for table in ABSENT for key in groups()[table].model_fields]
FIXED = [(table, key) for table, entries in ONE_DEVICE.items() for key in entries]
SAVES = [("checkpoint", key) for key in CheckpointConfig.model_fields.keys() - STARTS]
ABORTS = [("rollout", key) for key in NEVER_ABORTED]


@pytest.mark.parametrize(("table", "key"), [*IDLE, *FIXED, *sorted(SAVES), *sorted(ABORTS)])
def test_a_setting_without_effect_is_refused_by_name(table, key):
    with pytest.raises(ConfigError, match=rf"--{key.replace('_', '-')} 1 has no effect"):
        one_process_config("tiny", {key: 1})


def test_settings_of_rewards_are_refused_beside_a_function():
    assert fields().keys() >= REWARDS
    for key in REWARDS:
        with pytest.raises(ConfigError, match="the function of reward= is the reward"):
            one_process_config("tiny", {key: "x"}, has_reward=True)


def test_layout_and_saves_of_the_recipe_are_replaced_and_the_rest_is_kept():
    config = one_process_config("tiny", {"lr": 2e-3})
    assert (config.data_parallel_size, config.num_engines) == (1, 1)
    assert config.perf.tensor_model_parallel_size == 1 and not config.perf.sequence_parallel
    assert config.checkpoint.save_interval is None
    assert config.optimizer.lr == 2e-3 and config.optimizer.adam_beta2 == 0.98


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"learning_rate": 1}, "learning_rate = 1: no such setting"),
        ({"sglang_max_running_requests": 3}, "transformers generates"),
        ({"lora_rank": 4}, "--lora-rank: a run in one process does not have it"),
        ({"rollout_stop": ["x"]}, "--rollout-stop: a run in one process"),
        ({"lr": -1.0}, "--lr"),
    ],
)
def test_what_one_process_cannot_do_is_named(settings, words):
    with pytest.raises(ConfigError, match=words):
        one_process_config("tiny", settings)
