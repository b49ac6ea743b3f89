"""Rules of the fleet that follow from the settings."""

import pytest

from rlpost.config.load import load
from rlpost.extensions.fleet.fleet_sync import fleet_rules

FP8 = {"quantization_config": {"quant_method": "fp8"}}


def rules(fleet, hf=None, **groups):
    return fleet_rules(load([], {"fleet": fleet, **groups}).config, hf or {})


def test_without_settings_a_fleet_is_optional():
    plain = rules({})
    assert not plain.is_wanted and plain.min_engines == 0 and plain.refusal is None
    assert plain.limits.pull_bytes_per_s is None


def test_a_run_wants_a_fleet_that_it_submits_or_needs():
    assert rules({"engines": 1}).is_wanted
    assert rules({"min_engines": 2}).is_wanted
    assert not rules({"min_engines": 1}).is_wanted  # its own engine is enough


def test_limits_and_deadlines_are_those_of_the_settings():
    made = rules(
        {"engine_lost_after_s": 60.0, "pulls_at_once": 2, "pull_gb_per_s": 5.0},
        cluster={"distributed_timeout_minutes": 30},
        sglang={"rollout_health_check_interval": 7.0, "rollout_health_check_timeout": 8.0},
    )
    assert (made.limits.lost_after_s, made.limits.pulls_at_once) == (60.0, 2)
    assert made.limits.pull_bytes_per_s == 5e9
    assert made.deadlines.update_s == 1800
    assert (made.deadlines.health_every_s, made.deadlines.health_s) == (7.0, 8.0)


def test_a_quantised_model_has_no_fleet():
    assert "fp8" in rules({}, FP8).refusal


@pytest.mark.parametrize("follows", [False, True])
def test_a_group_has_its_own_concurrency_and_needs_its_fleet(follows):
    judge = {"fleet": True, "model": "/m", "concurrency": 3, "follows_policy": follows}
    config = load([], {"engines": {"judge": judge}}).config
    made = fleet_rules(config, FP8, "judge", command="rlpost fleet R --group judge --engines N")
    assert made.is_wanted and made.min_engines == 1 and made.concurrency == 3
    assert "[engines.judge] needs 1" in made.waits.format(1)
    assert "--group judge --engines N starts" in made.waits
    assert (made.refusal is not None) == follows, "a judge reads no weights of the policy"
