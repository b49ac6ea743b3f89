"""Turn rewards reach the tokens of their turns; expected values are computed manually."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from rlpost.algorithm.turns import turn_returns
from rlpost.config.groups.grpo import GrpoConfig
from rlpost.driver.batches import rollout_advantages, rollout_samples
from rlpost.durable.group_records import BASE64, group_from, group_record
from rlpost.extensions.agents.episode_results import EpisodeResult, TurnResult, rewarded
from rlpost.rollout.episode_metrics import episode_metrics
from rlpost.rollout.evaluate import pass_rates
from rlpost.types import Sample, SampleGroup, ScoredSample

WITHOUT_STD = GrpoConfig(disable_grpo_std_normalization=True)


def sample(index: int, mask: list[int]) -> Sample:
    count = len(mask)
    return Sample(3, index, (1, 2), range(count), [-0.5] * count, "text", "stop", 0, loss_mask=mask)


def turn(start: int, end: int, reward: float = 0.0, *, of: int = 0) -> TurnResult:
    return TurnResult(sample=of, start=start, end=end, text="t", reward=reward)


def group(*episodes: EpisodeResult, by_turn: bool = True) -> SampleGroup:
    scored = [
        ScoredSample(each, played.reward)
        for played in episodes
        for each in rewarded(played, "env", by_turn=by_turn)
    ]
    return SampleGroup(3, tuple(scored))


TWO_TURNS = EpisodeResult((sample(0, [1, 1, 0, 1]),), (turn(0, 2, 1.0), turn(3, 4, 0.5)))
ONE_TURN = EpisodeResult((sample(1, [1, 1, 1]),), (turn(0, 3),), score=0.3)


def test_the_return_of_a_turn_is_its_reward_and_those_of_later_turns():
    assert turn_returns([1.0, 0.0, -0.5]) == (0.5, -0.5, -0.5)
    assert turn_returns([]) == ()


def test_turn_advantages_equal_manually_computed_ones():
    # Returns: 1.5 and 0.5 (first episode), 0.3 (second episode); mean 2.3 / 3.
    mean = 2.3 / 3
    std = math.sqrt(sum((value - mean) ** 2 for value in (1.5, 0.5, 0.3)) / 2)
    first, second, third = ((value - mean) / (std + 1e-6) for value in (1.5, 0.5, 0.3))
    (found,) = rollout_advantages([group(TWO_TURNS, ONE_TURN)], GrpoConfig())
    assert list(found[0]) == pytest.approx([first, first, 0.0, second], rel=1e-5)
    assert list(found[1]) == pytest.approx([third] * 3, rel=1e-5)
    (plain,) = rollout_advantages([group(TWO_TURNS, ONE_TURN)], WITHOUT_STD)
    assert list(plain[0]) == pytest.approx([1.5 - mean, 1.5 - mean, 0.0, 0.5 - mean])
    raw = GrpoConfig(disable_rewards_normalization=True)
    (returns,) = rollout_advantages([group(TWO_TURNS, ONE_TURN)], raw)
    assert list(returns[0]) == [1.5, 1.5, 0.0, 0.5]


def test_episodes_with_equal_returns_have_no_advantage_for_any_number_of_turns():
    episodes = []
    for index, rewards in enumerate(([0.0, 0.0, 1.0], [1.0], [0.0, 1.0])):
        turns = tuple(turn(number, number + 1, reward) for number, reward in enumerate(rewards))
        episodes.append(EpisodeResult((sample(index, [1] * len(rewards)),), turns))
    (found,) = rollout_advantages([group(*episodes)], GrpoConfig())
    assert [value for own in found for value in own] == [0.0] * 6


def test_with_one_turn_per_episode_turn_advantages_are_those_of_grpo():
    episodes = [
        EpisodeResult((sample(number, [1, 1]),), (turn(0, 2, reward),))
        for number, reward in enumerate((1.0, 0.0, 0.5))
    ]
    by_turn = rollout_advantages([group(*episodes)], GrpoConfig())[0]
    by_episode = rollout_advantages([group(*episodes, by_turn=False)], GrpoConfig())[0]
    for tokens, whole in zip(by_turn, by_episode, strict=True):
        assert list(tokens) == pytest.approx([whole] * 2)


def test_the_reward_of_the_episode_counts_for_its_last_turn_and_so_for_all():
    played = EpisodeResult((sample(0, [1, 1, 0, 1]),), (turn(0, 2, 0.25), turn(3, 4)), score=2.0)
    (made,) = rewarded(played, "env", by_turn=True)
    assert made.extra["turn_rewards"] == [[0, 2, 0.25, 0], [3, 4, 2.0, 1]]
    assert made.extra["reward"] == played.reward == 2.25


BRANCHED = EpisodeResult(
    # The second branch starts before the second turn: three turns in two samples.
    (sample(0, [1, 1, 0, 1]), sample(0, [1, 1])),
    (turn(0, 2, 0.0), turn(3, 4, 1.0), turn(0, 2, 0.5, of=1)),
)


def test_turns_of_several_samples_of_an_episode_are_counted_in_the_order_of_play():
    # Returns: 1.5, 1.5 and 0.5 (branched episode), 0.3 (other episode); mean 3.8 / 4.
    mean = 3.8 / 4
    (found,) = rollout_advantages([group(BRANCHED, ONE_TURN)], WITHOUT_STD)
    assert list(found[0]) == pytest.approx([1.5 - mean] * 2 + [0.0, 1.5 - mean])
    assert list(found[1]) == pytest.approx([0.5 - mean] * 2)


def test_an_episode_of_several_samples_counts_once_in_the_baseline_of_its_group():
    grpo = WITHOUT_STD
    groups = [group(BRANCHED, ONE_TURN, by_turn=False)]
    first, second, other = rollout_advantages(groups, grpo)[0]
    mean = (1.5 + 0.3) / 2  # not (1.5 + 1.5 + 0.3) / 3
    assert (first, second, other) == pytest.approx((1.5 - mean, 1.5 - mean, 0.3 - mean))
    made = rollout_samples(groups, grpo)
    assert [each.weight for each in made] == pytest.approx([3 / 5, 2 / 5, 1.0])
    assert [each.count for each in made] == [1, 0, 1]


def test_an_episode_that_is_left_out_leaves_the_advantages_of_the_others_alone():
    groups = [group(TWO_TURNS, ONE_TURN)]
    alone = rollout_advantages(groups, GrpoConfig())[0]
    lost = EpisodeResult((sample(2, [1, 1]),), (turn(0, 2, 0.0),))
    with_zero = rollout_advantages([group(TWO_TURNS, ONE_TURN, lost)], GrpoConfig())[0]
    assert list(alone[0]) != pytest.approx(list(with_zero[0]))  # a 0 would change the baseline


def test_the_sample_with_the_turn_that_ended_an_episode_is_its_last():
    """A sub-agent's branch is between two turns of the main conversation, which a limit ended."""
    main = replace(sample(0, [1, 1, 0, 1]), finish_reason="length")
    turns = (turn(0, 2), turn(0, 2, of=1), turn(3, 4))
    samples = rewarded(EpisodeResult((main, sample(0, [1, 1])), turns), "env", by_turn=False)
    assert [one.finish_reason for one in samples] == ["stop", "length"]


def test_a_group_from_the_journal_has_the_same_advantages():
    before = group(BRANCHED, ONE_TURN)
    after = group_from(json.loads(json.dumps(group_record(before, BASE64))))
    assert [list(each) for each in rollout_advantages([after], GrpoConfig())[0]] == [
        list(each) for each in rollout_advantages([before], GrpoConfig())[0]
    ]
    assert episode_metrics([after]) == episode_metrics([before])
    assert episode_metrics([before])["env/env/episodes"] == 2.0, "branches are one episode"


def test_an_episode_of_several_samples_is_one_answer_of_pass_at_k():
    lost = EpisodeResult((sample(1, [1, 1]),), (turn(0, 2, 0.0),))
    rates = pass_rates([group(BRANCHED, lost, by_turn=False)])
    assert rates == {"pass@1": 0.5, "pass@2": 1.0}
