"""Reward shaping compared with the formulas of its papers."""

from __future__ import annotations

import numpy as np
import pytest

from rlpost.algorithm.advantage import estimate, opo_advantages
from rlpost.algorithm.shaping import Shaping, overlong_reward, shaped
from rlpost.columns import RunColumn
from rlpost.config.checks.algorithm import algorithm_problems
from rlpost.config.load import load
from rlpost.types import Sample, SampleGroup, ScoredSample

LOOP = "so it goes. " * 100


def answer(length: int, reward: float, *, finish: str = "stop", text: str = "") -> ScoredSample:
    sample = Sample(0, 0, [1], [2] * length, [-0.5] * length, text, finish, 0)
    return ScoredSample(sample, reward)


GROUP = SampleGroup(
    0,
    (answer(4, 1.0), answer(8, 1.0), answer(10, 0.5, finish="length"), answer(6, 1.0, text=LOOP)),
)


def test_the_overlong_punishment_equals_the_equation_of_dapo() -> None:
    # DAPO, arXiv 2503.14476, equation 13, with L_max = 20480 and L_cache = 4096
    at = {16384: 0.0, 16385: -1 / 4096, 18432: -0.5, 20480: -1.0, 100: 0.0, 30000: -1.0}
    found = {n: overlong_reward(n, max_len=20480, buffer_len=4096) for n in at}
    assert found == pytest.approx(at)


def test_without_shaping_groups_are_unchanged() -> None:
    assert shaped([GROUP], Shaping(max_response_len=10)) == [GROUP]


def test_long_answers_lose_reward_and_others_do_not() -> None:
    shaping = Shaping(max_response_len=10, overlong_buffer_len=4, overlong_penalty=0.5)
    assert shaped([GROUP], shaping)[0].rewards == pytest.approx((1.0, 0.75, 0.0, 1.0))


def test_truncated_answers_are_masked_but_count_in_the_baseline() -> None:
    (group,) = shaped([GROUP], Shaping(max_response_len=10, truncated_answers="mask"))
    assert group.rewards == GROUP.rewards
    totals = [scored.sample.mask.total() for scored in group.samples]
    assert totals == [4, 8, 0, 6]


def test_repetitive_answers_get_the_punished_reward() -> None:
    shaping = Shaping(max_response_len=10, repetitive_answers="punish", punished_reward=-1.0)
    (group,) = shaped([GROUP], shaping)
    assert group.rewards == (1.0, 1.0, 0.5, -1.0)
    assert [scored.sample.loss_mask for scored in group.samples] == [None] * 4


def test_the_baseline_of_opo_is_the_mean_weighted_by_length() -> None:
    for rewards, lengths in (([1.0, 0.5, -2.0], [2, 6, 1]), ([3.0], [1])):
        tokens = np.repeat(rewards, lengths)
        masks = [[RunColumn([(1, length)]) for length in lengths]]
        (found,) = estimate("opo", [rewards], masks, normalize_std=True)
        assert found == pytest.approx(np.array(rewards) - tokens.mean())
    assert opo_advantages([3.0], [0]) == (3.0,)


@pytest.mark.parametrize(
    ("grpo", "named"),
    [
        ({"overlong_buffer_len": 2000}, "--overlong-buffer-len 2000"),
        ({"use_rollout_logprobs": True, "use_tis": True}, "--use-rollout-logprobs true"),
        ({"use_unbiased_kl": True}, "--use-unbiased-kl true"),
        (
            {"normalize_advantages": True, "custom_advantage_function_path": "f.py:g"},
            "--normalize-advantages true",
        ),
    ],
)
def test_contradictory_settings_are_reported(grpo, named, tmp_path) -> None:
    config = load([], {"grpo": grpo, "checkpoint": {"hf_checkpoint": str(tmp_path)}}).config
    (problem,) = algorithm_problems(config)
    assert named in problem and "use" in problem
