"""Reward shaping compared with the formulas of its papers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlpost.algorithm.advantage import AnswerGroup, estimate, opo_advantages
from rlpost.algorithm.answers import answers_of
from rlpost.algorithm.shaping import Shaping, overlong_reward, shaped
from rlpost.algorithm.turns import TurnReward, turn_record
from rlpost.columns import RunColumn
from rlpost.config.checks.algorithm import algorithm_problems
from rlpost.config.groups.grpo import GrpoConfig
from rlpost.config.load import load
from rlpost.config.tree import Config
from rlpost.config.wording import with_values
from rlpost.driver.batches import rollout_advantages, shaping_of
from rlpost.types import Sample, SampleGroup, ScoredSample

LOOP = "so it goes. " * 800


def answer(
    index: int, length: int, reward: float, *, finish: str = "stop", text: str = "", prompt: int = 1
) -> ScoredSample:
    sample = Sample(0, index, [1] * prompt, [2] * length, [-0.5] * length, text, finish, 0)
    return ScoredSample(sample, reward)


GROUP = SampleGroup(
    0,
    (
        answer(0, 4, 1.0),
        answer(1, 8, 1.0),
        answer(2, 10, 0.5, finish="length"),
        answer(3, 6, 1.0, text=LOOP),
    ),
)


def shaping_with(
    max_response_len: int, *, max_context_len: int | None = None, **grpo: object
) -> Shaping:
    lengths = {
        "rollout_max_response_len": max_response_len,
        "rollout_max_context_len": max_context_len,
    }
    return shaping_of(with_values(Config(), **lengths, **grpo))


def test_the_overlong_punishment_equals_the_equation_of_dapo() -> None:
    # DAPO, arXiv 2503.14476, equation 13, with L_max = 20480 and L_cache = 4096
    at = {16384: 0.0, 16385: -1 / 4096, 18432: -0.5, 20480: -1.0, 100: 0.0, 30000: -1.0}
    found = {n: overlong_reward(n, max_len=20480, buffer_len=4096) for n in at}
    assert found == pytest.approx(at)


def test_without_shaping_groups_are_unchanged() -> None:
    assert shaped([GROUP], shaping_with(max_response_len=10)) == [GROUP]


def test_long_answers_lose_reward_and_others_do_not() -> None:
    shaping = shaping_with(max_response_len=10, overlong_buffer_len=4, overlong_penalty=0.5)
    assert shaped([GROUP], shaping)[0].rewards == pytest.approx((1.0, 0.75, 0.0, 1.0))


def test_lengths_count_from_where_generation_ends() -> None:
    """DAPO's L_max: of a context of 14 tokens a prompt of 9 leaves 5, which is less than 10.

    A later sample of an answer has its own prompt: 2 tokens, then a history of 8 that leaves 6.
    """
    shaping = shaping_with(max_response_len=10, max_context_len=14, overlong_buffer_len=4)
    lengths = (1, 3, 5)
    samples = [answer(index, length, 1.0, prompt=9) for index, length in enumerate(lengths)]
    parts = [answer(3, 2, 1.0, prompt=2), answer(3, 4, 1.0, prompt=8)]
    (group,) = shaped([SampleGroup(0, (*samples, *parts))], shaping)
    assert group.rewards == pytest.approx((1.0, 0.5, 0.0, 0.5, 0.5))
    short = replace(shaping, max_context_len=11)  # two tokens, fewer than the buffer
    (group,) = shaped([SampleGroup(0, (samples[0],))], short)
    assert group.rewards == pytest.approx((0.5,))


def test_truncated_answers_are_masked_but_count_in_the_baseline() -> None:
    (group,) = shaped([GROUP], shaping_with(max_response_len=10, truncated_answers="mask"))
    assert group.rewards == GROUP.rewards
    assert [mask.total() for mask in group.masks] == [4, 8, 0, 6]
    pair = SampleGroup(0, (answer(0, 4, 1.0), answer(1, 10, 0.0, finish="length")))
    masked = shaped([pair], shaping_with(max_response_len=10, truncated_answers="mask"))
    baselines = {"grpo": 1 / 2, "rloo": 0.0, "opo": 4 / 14}
    for estimator, baseline in baselines.items():
        grpo = GrpoConfig(advantage_estimator=estimator, disable_grpo_std_normalization=True)
        assert rollout_advantages(masked, grpo)[0][0] == pytest.approx(1 - baseline), estimator


def test_a_change_of_the_reward_counts_for_the_last_turn_and_punished_answers_have_no_other() -> (
    None
):
    turns = [turn_record([TurnReward(0, 2, 0.5, 0), TurnReward(2, 3, 0.25, 2)]),
             turn_record([TurnReward(0, 5, 0.75, 1)])]  # fmt: skip
    parts = [answer(0, 3, 1.5), answer(0, 5, 1.5, finish="length")]
    group = SampleGroup(
        0,
        tuple(
            replace(one, sample=replace(one.sample, extra=extra))
            for one, extra in zip(parts, turns, strict=True)
        ),
    )

    def rewards_of_turns(shaping: Shaping) -> list[float]:
        ((changed,),) = map(answers_of, shaped([group], shaping))
        assert sum(turn.reward for turn in changed.turns) == pytest.approx(changed.reward)
        return [turn.reward for turn in changed.turns]

    overlong = shaping_with(max_response_len=10, overlong_buffer_len=4)  # 8 tokens: half the buffer
    assert rewards_of_turns(overlong) == pytest.approx([0.5, 0.75, -0.25])
    punished = replace(overlong, truncated_answers="punish", punished_reward=-1.0)
    assert rewards_of_turns(punished) == pytest.approx([0.0, 0.0, -1.5])


def test_repetitive_answers_get_the_punished_reward() -> None:
    shaping = shaping_with(max_response_len=10, repetitive_answers="punish", punished_reward=-1.0)
    (group,) = shaped([GROUP], shaping)
    assert group.rewards == (1.0, 1.0, 0.5, -1.0)
    assert [scored.sample.loss_mask for scored in group.samples] == [None] * 4


def test_the_baseline_of_opo_is_the_mean_weighted_by_length() -> None:
    for rewards, lengths in (([1.0, 0.5, -2.0], [2, 6, 1]), ([3.0], [1])):
        tokens = np.repeat(rewards, lengths)
        masks = [[RunColumn([(1, length)]) for length in lengths]]
        groups = [AnswerGroup(rewards, *masks, lengths)]
        (found,) = estimate("opo", groups, normalize_std=True, gamma=1.0)
        assert found == pytest.approx(np.array(rewards) - tokens.mean())
    assert opo_advantages([3.0], [0]) == (3.0,)


@pytest.mark.parametrize(
    ("grpo", "named"),
    [
        ({"overlong_buffer_len": 2000}, "--overlong-buffer-len 2000"),
        ({"use_rollout_logprobs": True, "use_tis": True}, "--use-rollout-logprobs true"),
        ({"use_unbiased_kl": True}, "--use-unbiased-kl true"),
        (
            {"loss_type": "custom_loss", "custom_loss_function_path": "f.py:g"}
            | {"truncated_answers": "punish", "disable_compute_advantages_and_returns": True},
            "--truncated-answers punish with --disable-compute-advantages-and-returns true",
        ),
        (
            {"normalize_advantages": True, "custom_advantage_function_path": "f.py:g"},
            "--normalize-advantages true",
        ),
    ],
)
def test_contradictory_settings_are_reported(grpo, named, tmp_path) -> None:
    config = load([], {"grpo": grpo, "checkpoint": {"hf_checkpoint": str(tmp_path)}}).config
    (problem,) = algorithm_problems(config)
    assert named in problem
