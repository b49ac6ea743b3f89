"""Guards: each names the numbers, and a healthy step has no warning."""

import math

import pytest

from rlpost.algorithm.guards import Guards, check_tokens
from rlpost.config.groups.grpo import GrpoConfig
from rlpost.driver.training import guard_bounds
from rlpost.errors import TrainingError
from rlpost.types import TrainBatch, TrainSample

HEALTHY = {
    "train/ppo_kl": 1e-9,
    "train/ref_kl": 0.0,
    "train/rollout_logprob_abs_diff": 0.01,
    "train/grad_norm": 1.0,
}


def guards(*, is_fresh=True, **bounds):
    return Guards(guard_bounds(GrpoConfig(**bounds)), is_fresh=is_fresh)


def test_a_healthy_run_has_no_warnings():
    own = guards()
    for step in range(20):
        later = {"train/ppo_kl": 0.02, "train/ref_kl": 0.1, "train/grad_norm": 1.0 + step % 3}
        assert own.after_step(HEALTHY, is_first=True) == []
        assert own.after_step(HEALTHY | later, is_first=False) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_not_finite_ends_the_run_and_is_named(value):
    with pytest.raises(TrainingError, match=r"train/grad_norm = -?(nan|inf)"):
        guards().after_step(HEALTHY | {"train/grad_norm": value}, is_first=True)


def test_a_policy_that_differs_before_its_first_update_ends_the_run():
    with pytest.raises(TrainingError, match=r"train/ppo_kl = 0\.02 .*bound 0\.001"):
        guards().after_step(HEALTHY | {"train/ppo_kl": 0.02}, is_first=True)


def test_a_reference_that_differs_ends_a_fresh_run_and_only_at_its_first_step():
    broken = HEALTHY | {"train/ref_kl": 0.3}
    with pytest.raises(TrainingError, match=r"train/ref_kl = 0\.3"):
        guards().after_step(broken, is_first=True)
    assert guards(is_fresh=False).after_step(broken, is_first=True) == []
    own = guards()
    own.after_step(HEALTHY, is_first=True)
    assert own.after_step(broken, is_first=True) == []
    assert guards(guard_initial_kl=0.0).after_step(broken, is_first=True) == []


def test_engines_that_disagree_with_the_trainer_are_warned_of_once_a_rollout():
    broken = HEALTHY | {"train/rollout_logprob_abs_diff": 0.4, "train/rollout_ratio": 1.7}
    (warning,) = guards().after_step(broken, is_first=True)
    assert "0.4 is above 0.1" in warning and "1.7" in warning and "--use-tis" in warning
    assert guards().after_step(broken, is_first=False) == []
    assert guards(guard_rollout_logprob_diff=0.0).after_step(broken, is_first=True) == []


def test_a_spike_of_the_gradient_norm_is_measured_against_the_median_of_the_steps_before():
    own = guards()
    for norm in (1.0, 2.0, 3.0, 2.0, 1.0):
        assert own.after_step(HEALTHY | {"train/grad_norm": norm}, is_first=True) == []
    (warning,) = own.after_step(HEALTHY | {"train/grad_norm": 50.0}, is_first=True)
    assert "50 is 25 times the median of the last 5 steps, 2" in warning


def batch(*masks):
    micro_batches = tuple(
        (TrainSample((1,) * (1 + len(mask)), 1, mask, (0.0,) * len(mask), 1.0),) for mask in masks
    )
    return TrainBatch(micro_batches, num_samples=len(masks), num_tokens=sum(map(sum, masks)))


def test_micro_batches_without_a_token_are_counted_and_a_step_without_any_is_an_error():
    assert check_tokens([batch((1, 0), (0, 1))]) is None
    assert check_tokens([batch((1, 0), (0, 0))]).startswith("1 of 2 micro-batches")
    with pytest.raises(TrainingError, match="2 samples has no token"):
        check_tokens([batch((0, 0), (0, 0))])
