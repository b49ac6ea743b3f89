"""Settings and registries agree, and old names of estimators select a loss."""

from typing import Any, get_args

import pytest

from rlpost.algorithm.advantage import ESTIMATORS
from rlpost.algorithm.objective import LOSSES, POLICY_LOSSES
from rlpost.config.groups.grpo import GrpoConfig
from rlpost.config.load import load


def choices(leaf: str) -> set[Any]:
    """The values that the setting accepts."""
    annotation = GrpoConfig.model_fields[leaf].annotation
    words = get_args(annotation)
    nested = [word for part in words for word in get_args(part)]
    return {word for word in (*words, *nested) if isinstance(word, str)}


def test_every_value_of_a_setting_has_an_entry_and_every_entry_a_value():
    assert choices("advantage_estimator") == ESTIMATORS.keys()
    assert choices("policy_loss") == POLICY_LOSSES.keys()
    assert choices("loss_type") == LOSSES.keys() | {"custom_loss"}
    assert {row.loss for row in ESTIMATORS.values()} == POLICY_LOSSES.keys()


@pytest.mark.parametrize(
    ("grpo", "loss"),
    [
        ({}, "ppo"),
        ({"advantage_estimator": "rloo"}, "ppo"),
        ({"advantage_estimator": "gspo"}, "gspo"),
        ({"advantage_estimator": "cispo"}, "cispo"),
        ({"advantage_estimator": "rloo", "policy_loss": "gspo"}, "gspo"),
        ({"advantage_estimator": "gspo", "policy_loss": "ppo"}, "ppo"),
    ],
)
def test_an_estimator_that_names_a_loss_selects_it_unless_one_is_given(grpo, loss, tmp_path):
    config = load([], {"grpo": grpo, "checkpoint": {"hf_checkpoint": str(tmp_path)}}).config
    assert config.loss_settings.policy_loss == loss
