"""The settings take precedence over hyperparameters in a checkpoint."""

from types import SimpleNamespace

from rlpost.actor.optimizer import apply_schedule
from rlpost.actor.settings import ActorSettings


def test_before_each_step_the_hyperparameters_are_those_of_the_settings():
    loaded = {"lr": 9.0, "weight_decay": 9.0, "betas": (0.5, 0.5), "eps": 9.0}
    groups = [dict(loaded), loaded | {"wd_mult": 0.0}]
    settings = ActorSettings(
        "", lr=1e-3, weight_decay=0.1, adam_beta1=0.8, adam_beta2=0.98, adam_eps=1e-6
    )
    assert apply_schedule(SimpleNamespace(param_groups=groups), settings, 0) == 1e-3
    now = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.8, 0.98), "eps": 1e-6}
    assert groups == [now, now | {"weight_decay": 0.0, "wd_mult": 0.0}]
