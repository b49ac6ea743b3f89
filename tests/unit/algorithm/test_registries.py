"""Settings and registries agree, and old names of estimators select a loss."""

from typing import Any, get_args

import pytest
import torch

from rlpost.algorithm.advantage import ESTIMATORS
from rlpost.algorithm.loss import cispo_loss
from rlpost.algorithm.loss_settings import POLICY_LOSS_ROWS
from rlpost.algorithm.objective import LOSSES, POLICY_LOSSES
from rlpost.config.groups.grpo import GrpoConfig
from rlpost.config.load import load
from rlpost.config.plugin_settings import settings_of
from tests.settings import loss_settings


def choices(leaf: str) -> set[Any]:
    """The values that the setting accepts."""
    annotation = GrpoConfig.model_fields[leaf].annotation
    words = get_args(annotation)
    nested = [word for part in words for word in get_args(part)]
    return {word for word in (*words, *nested) if isinstance(word, str)}


def test_every_value_of_a_setting_has_an_entry_and_every_entry_a_value():
    assert choices("advantage_estimator") == ESTIMATORS.keys()
    assert choices("policy_loss") == POLICY_LOSSES.keys() == POLICY_LOSS_ROWS.keys()
    assert choices("loss_type") == LOSSES.keys() | {"custom_loss"}
    assert {row.loss for row in ESTIMATORS.values()} <= POLICY_LOSSES.keys()


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


@pytest.mark.parametrize(
    ("grpo", "bounds"),
    [
        ({}, (0.2, 0.2)),
        ({"eps_clip": 0.1}, (0.1, 0.1)),
        ({"eps_clip_high": 0.28}, (0.2, 0.28)),
        ({"advantage_estimator": "gspo"}, (3e-4, 4e-4)),
        ({"policy_loss": "gspo", "eps_clip": 1e-4}, (1e-4, 1e-4)),
        ({"advantage_estimator": "gspo", "policy_loss": "ppo"}, (0.2, 0.2)),
        ({"advantage_estimator": "cispo"}, (1.0, 4.0)),
        ({"advantage_estimator": "cispo", "eps_clip_high": 2.0}, (1.0, 2.0)),
        ({"advantage_estimator": "cispo", "eps_clip": 0.2, "eps_clip_high": 0.28}, (0.2, 0.28)),
    ],
)
def test_clip_ranges_are_those_of_the_loss_unless_given(grpo, bounds):
    config = load([], {"grpo": grpo}).config
    assert (config.loss_settings.eps_clip, config.loss_settings.eps_clip_high) == bounds
    given = settings_of(config)
    assert (given["eps_clip"], given["eps_clip_high"]) == bounds


def test_at_its_defaults_cispo_keeps_the_weight_of_a_token_that_became_unlikely():
    """From a tenth to five times; a lower bound would take away what the ratio is for."""
    settings = loss_settings(policy_loss="cispo")
    ratio = torch.tensor([0.1, 0.8, 1.0, 4.0, 10.0])
    logprobs = ratio.log().requires_grad_()
    loss, _ = cispo_loss(
        logprobs,
        torch.zeros(5),
        torch.ones(5),
        eps_clip=settings.eps_clip,
        eps_clip_high=settings.eps_clip_high,
    )
    (weights,) = torch.autograd.grad(-loss.sum(), logprobs)
    assert weights.tolist() == pytest.approx([0.1, 0.8, 1.0, 4.0, 5.0])
