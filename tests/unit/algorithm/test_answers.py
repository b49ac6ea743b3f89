"""The unit is the answer: split into samples in any way, it has equal figures, advantages and losses."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlpost.algorithm.answers import answers_of
from rlpost.algorithm.gae import Discounts, estimate_with_values
from rlpost.algorithm.shaping import shaped
from rlpost.algorithm.turns import TurnReward, turn_record, turns_of
from rlpost.columns import FloatColumn
from rlpost.config.checks.algorithm import algorithm_problems
from rlpost.config.load import load
from rlpost.config.tree import Config
from rlpost.driver.batches import (
    deal,
    rollout_advantages,
    rollout_metrics,
    samples_with,
    shaping_of,
)
from rlpost.extensions.agents.checks import agent_problems
from rlpost.extensions.evaluating.set_results import read_results
from rlpost.observe.evaluation_answers import write_answers
from rlpost.observe.samples import chosen
from rlpost.rollout.episode_metrics import ENV, NUM_TURNS, episode_metrics
from rlpost.rollout.evaluate import pass_rates, summarise
from rlpost.rollout.filters import check_reward_nonzero_std
from rlpost.trainer.packing import pack
from rlpost.trainer.step import Weighting
from rlpost.types import Sample, SampleGroup, ScoredSample

LOOP = "let me check that again. "
CONTEXT, RESPONSE = 26, 24
"""Lengths at which generation ends: of prompt and answer, and of the answer."""


def whole_group(prompt_id: int, source: random.Random, *, by_turn: bool) -> SampleGroup:
    """Answers of one sample each: turns of the model with the outputs of tools between them."""
    samples = []
    prompt = [source.randrange(90) for _ in range(source.randint(1, 6))]
    for index in range(source.randint(2, 4)):
        mask: list[int] = []
        turns: list[TurnReward] = []
        for number in range(source.randint(1, 4)):
            mask += [0] * source.randint(0, 2)
            start = len(mask)
            mask += [1] * source.randint(1, 4)
            turns.append(TurnReward(start, len(mask), source.choice((0.0, 0.5, 1.0)), number))
        extra: dict[str, Any] = {ENV: f"env{prompt_id % 2}", NUM_TURNS: len(turns)}
        if by_turn:
            extra |= turn_record(turns)
        sample = Sample(
            *(prompt_id, index, prompt, [source.randrange(90) for _ in mask]),
            [-source.random() for _ in mask],
            source.choice(("short", LOOP * 60)),
            source.choice(("stop", "length")),
            0,
            loss_mask=mask,
            extra=extra,
        )
        samples.append(ScoredSample(sample, sum(turn.reward for turn in turns)))
    return SampleGroup(prompt_id, tuple(samples))


def split(group: SampleGroup, source: random.Random) -> SampleGroup:
    """The same answers in parts: a part's prompt is the answer's prompt and the parts before it.

    Answers with rewards of turns are cut between turns, as a turn belongs to one sample.
    """
    parts = []
    for scored in group.samples:
        sample, turns = scored.sample, turns_of(scored.sample.extra)
        length = len(sample.response_ids)
        places = list(range(1, length))
        if turns is not None:
            places = [turn.start for turn in turns if turn.start]
        cuts = sorted(source.sample(places, source.randint(0, min(3, len(places)))))
        text_cuts = sorted(source.randrange(len(sample.text) + 1) for _ in cuts)
        ranges = itertools.pairwise([0, *cuts, length])
        texts = itertools.pairwise([0, *text_cuts, len(sample.text)])
        for (start, end), (text_start, text_end) in zip(ranges, texts, strict=True):
            extra = dict(sample.extra)
            if turns is not None:
                inside = [turn for turn in turns if start <= turn.start < end]
                extra |= turn_record(
                    [replace(one, start=one.start - start, end=one.end - start) for one in inside]
                )
            part = replace(
                sample,
                prompt_ids=sample.prompt_ids + sample.response_ids[:start],
                response_ids=sample.response_ids[start:end],
                rollout_logprobs=sample.rollout_logprobs[start:end],
                loss_mask=sample.mask[start:end],
                text=sample.text[text_start:text_end],
                finish_reason=sample.finish_reason if end == length else "stop",
                extra=extra,
            )
            parts.append(ScoredSample(part, scored.reward))
    return SampleGroup(group.prompt_id, tuple(parts))


def config(**grpo: Any) -> Config:
    rollout = {
        "rollout_max_response_len": RESPONSE,
        "rollout_max_context_len": CONTEXT,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 4,
    }
    return load([], {"rollout": rollout, "grpo": grpo}).config


def per_token(groups: Sequence[SampleGroup], columns: Sequence[Sequence[Any]]) -> list[float]:
    """All values of tokens in order; a number is that of each token of its sample."""
    values: list[float] = []
    for group, own in zip(groups, columns, strict=True):
        for scored, value in zip(group.samples, own, strict=True):
            length = len(scored.sample.response_ids)
            values += value if isinstance(value, FloatColumn) else [value] * length
    return values


def figures(groups: Sequence[SampleGroup], folder: Path) -> list[object]:
    """All that training, evaluation, ``rlpost evaluate`` and the report count of answers."""
    write_answers(folder, "set", groups, lambda ids: str(len(ids)), weights="step 0")
    (result,) = read_results(folder)
    kept = [{**one, "answer": ""} for one in chosen(groups, lambda ids: str(list(ids)))]
    wanted = [check_reward_nonzero_std(group) for group in groups]
    counted = [rollout_metrics(groups), summarise(groups), pass_rates(groups)]
    return [*counted, episode_metrics(groups), result, kept, wanted]


SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "gspo": {"advantage_estimator": "gspo", "disable_grpo_std_normalization": True},
    "rloo": {"advantage_estimator": "rloo", "truncated_answers": "mask"},
    "opo": {"advantage_estimator": "opo", "truncated_answers": "mask"},
    "++": {"advantage_estimator": "reinforce_plus_plus", "gamma": 0.9},
    "++ baseline": {"advantage_estimator": "reinforce_plus_plus_baseline"},
    "raw": {"disable_rewards_normalization": True, "normalize_advantages": True},
    "punish": {"truncated_answers": "punish", "punished_reward": -1.0},
    "mask": {"truncated_answers": "mask", "normalize_advantages": True},
    "loops": {"repetitive_answers": "punish", "truncated_answers": "mask"},
    "overlong": {"overlong_buffer_len": 12, "overlong_penalty": 0.7},
    "tokens": {"calculate_per_token_loss": True, "overlong_buffer_len": 6},
}


def test_the_filter_drops_the_groups_without_an_advantage() -> None:
    """Also with rewards of turns, where answers of equal rewards differ in their turns."""
    source = random.Random(7)
    dropped, equal_answers_kept = 0, 0
    for number in range(300):
        group = whole_group(number, source, by_turn=bool(number % 2))
        (advantages,) = rollout_advantages([group], config().grpo)
        is_kept = check_reward_nonzero_std(group)
        assert is_kept == any(per_token([group], [advantages])), number
        assert rollout_metrics([group])["rollout/zero_std_groups"] == (not is_kept)
        dropped += not is_kept
        equal_answers_kept += is_kept and len(set(group.rewards)) == 1
    assert dropped and equal_answers_kept


@pytest.mark.parametrize("by_turn", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_an_answer_in_parts_counts_as_the_same_answer_in_one_sample(
    name: str, by_turn: bool, tmp_path: Path
) -> None:
    source = random.Random(f"{name} {by_turn}")
    given = config(**SETTINGS[name])
    for trial in range(6):
        whole = [whole_group(number, source, by_turn=by_turn) for number in range(4)]
        parts = [split(group, source) for group in whole]
        assert figures(parts, tmp_path) == figures(whole, tmp_path), trial
        both = [shaped(groups, shaping_of(given)) for groups in (whole, parts)]
        charged = [source.random() for group in whole for _ in range(group.num_tokens)]
        advantages = [
            rollout_advantages(groups, given.grpo, None if by_turn else by_sample(groups, charged))
            for groups in both
        ]
        one, other = (per_token(*pair) for pair in zip(both, advantages, strict=True))
        assert one == pytest.approx(other, abs=1e-6)
        weights = [
            token_weights(groups, own, given) for groups, own in zip(both, advantages, strict=True)
        ]
        assert weights[0] == pytest.approx(weights[1], abs=1e-7)


def by_sample(groups: Sequence[SampleGroup], values: Sequence[float]) -> list[list[list[float]]]:
    """Values of all response tokens in order, by group and sample."""
    remaining = iter(values)
    return [
        [list(itertools.islice(remaining, len(one.sample.response_ids))) for one in group.samples]
        for group in groups
    ]


def token_weights(
    groups: Sequence[SampleGroup], advantages: Sequence[Sequence[Any]], given: Config
) -> list[float]:
    """The factor of each response token's loss: it is all that a sample's size acts on."""
    samples = samples_with(advantages, groups, given.grpo)
    (step,) = deal(samples, given)
    batch = step.batches[0]  # the denominators are those of all ranks
    weighting = Weighting(batch.num_samples, batch.num_tokens, given.grpo.calculate_per_token_loss)
    return weighting.weights(pack(tuple(samples))).tolist()


def test_with_lost_gradings_the_mean_reward_is_still_that_of_prompts() -> None:
    """One of four answers to the first prompt is left: it does not count a fifth of the other four."""
    rewards = [[0.0], [1.0, 1.0, 1.0, 1.0]]
    groups = [
        SampleGroup(
            number,
            tuple(
                ScoredSample(Sample(number, i, (1,), (2,), (-0.5,), "", "stop", 0), reward)
                for i, reward in enumerate(own)
            ),
        )
        for number, own in enumerate(rewards)
    ]
    assert summarise(groups)["reward_mean"] == pass_rates(groups)["pass@1"] == 0.5
    assert rollout_metrics(groups)["reward/mean"] == 0.5


@pytest.mark.parametrize("by_turn", [False, True])
def test_a_critic_takes_an_answer_in_parts_as_one_episode(by_turn: bool) -> None:
    source = random.Random(3)
    shaping = shaping_of(config(truncated_answers="mask", overlong_buffer_len=8))
    for trial in range(12):
        whole = [whole_group(number, source, by_turn=by_turn) for number in range(3)]
        both = [shaped(one, shaping) for one in (whole, [split(group, source) for group in whole])]
        values = [source.gauss(0, 1) for group in whole for _ in range(group.num_tokens)]
        found = []
        for groups in both:
            columns = [list(map(FloatColumn, own)) for own in by_sample(groups, values)]
            made = estimate_with_values(
                *(groups, columns, by_sample(groups, values), Discounts(0.9, 0.8)),
                normalize_advantages=trial % 2 == 0,
            )
            tokens = [per_token(groups, each) for each in (made.advantages, made.returns)]
            found.append([*tokens[0], *tokens[1], *made.metrics.values()])
        assert found[0] == pytest.approx(found[1], abs=1e-5), trial


def test_turns_are_episodes_steps_in_the_order_of_play_for_a_critic_too() -> None:
    """The second sample has the turn between the two turns of the first one."""
    extras = [
        turn_record([TurnReward(0, 1, 0.0, 0), TurnReward(1, 2, 1.0, 2)]),
        turn_record([TurnReward(0, 1, 0.5, 1)]),
    ]
    samples = [
        ScoredSample(
            Sample(0, 0, (1,), (2,) * count, (-1.0,) * count, "", "stop", 0, extra=extra), 1.5
        )
        for count, extra in zip((2, 1), extras, strict=True)
    ]
    values = [[FloatColumn([0.1, 0.3]), FloatColumn([0.2])]]
    found = estimate_with_values(
        *([SampleGroup(0, tuple(samples))], values, None, Discounts(1.0, 1.0)),
        normalize_advantages=False,
    )
    ((first, second),) = found.returns
    assert list(first) == pytest.approx([1.5, 1.0])
    assert list(second) == pytest.approx([1.5])


def test_samples_of_one_answer_with_different_rewards_have_their_mean_and_one_advantage() -> None:
    def sample(index: int, length: int) -> Sample:
        return Sample(0, index, (1,), (5,) * length, (-0.5,) * length, "", "stop", 0)

    scored = [(0, 3, 1.0), (0, 1, 0.4), (1, 5, 0.0)]
    group = SampleGroup(
        0, tuple(ScoredSample(sample(index, length), reward) for index, length, reward in scored)
    )
    assert [answer.reward for answer in answers_of(group)] == [pytest.approx(0.7), 0.0]
    grpo = config(disable_grpo_std_normalization=True).grpo
    samples = samples_with(rollout_advantages([group], grpo), [group], grpo)
    assert [each.advantage for each in samples] == pytest.approx([0.35, 0.35, -0.35])
    assert [(each.weight, each.count) for each in samples] == [(0.75, 1), (0.25, 0), (1.0, 1)]


def test_samples_of_one_answer_are_trained_in_one_step() -> None:
    source = random.Random(5)
    groups = [split(whole_group(number, source, by_turn=False), source) for number in range(4)]
    rollout = {"rollout_batch_size": 4, "n_samples_per_prompt": 4, "num_steps_per_rollout": 4}
    cluster = {"actor_num_gpus_per_node": 1}
    given = load([], {"rollout": rollout, "cluster": cluster}).config
    samples = samples_with(rollout_advantages(groups, given.grpo), groups, given.grpo)
    steps = deal(samples, given)
    assert sum(step.batches[0].num_samples for step in steps) == sum(
        len(answers_of(group)) for group in groups
    )
    for step in steps:
        positions = sorted(one for one in step.positions[0] if one is not None)
        assert samples[positions[0]].count == 1, "a step begins with an answer"


REWARD_SETTINGS: dict[str, dict[str, Any]] = {
    name: SETTINGS[name] for name in ("punish", "mask", "loops", "overlong")
} | {
    "whitened": {"normalize_advantages": True},
    "raw": {"disable_rewards_normalization": True},
    "kl": {"kl_coef": 0.1},
    "post": {"custom_reward_post_process_path": "mine.py:post"},
}


@pytest.mark.parametrize("env_reward", ["episode", "turn"])
@pytest.mark.parametrize("estimator", ["grpo", "rloo", "opo", "reinforce_plus_plus"])
def test_a_setting_of_rewards_changes_what_is_trained_or_is_refused(
    estimator: str, env_reward: str
) -> None:
    """One way to advantages: also with rewards of turns every setting acts, or check says not."""
    source = random.Random(8)
    groups = [whole_group(n, source, by_turn=env_reward == "turn") for n in range(4)]
    charged = by_sample(groups, [source.random() for one in groups for _ in range(one.num_tokens)])

    def trained(given: Config) -> list[list[float]]:
        changed = shaped(groups, shaping_of(given))
        penalties = charged if given.grpo.kl_coef else None
        advantages = rollout_advantages(changed, given.grpo, penalties)
        mask = [value for group in changed for one in group.masks for value in one]
        return [per_token(changed, advantages), mask]

    env = {"env": ["rlpost.extensions.agents.examples.guess:Guess"], "env_reward": env_reward}
    environments = load([], {"env": env}).config.env
    plain = config(advantage_estimator=estimator)
    acts = {}
    for name, settings in REWARD_SETTINGS.items():
        given = config(advantage_estimator=estimator, **settings)
        given = given.model_copy(update={"env": environments})
        problems = [*agent_problems(given), *algorithm_problems(given)]
        acts[name] = bool(problems) or trained(given) != trained(plain)
    if estimator == "reinforce_plus_plus":
        del acts["whitened"]  # it whitens anyway
        del acts["post"]  # post-processed rewards are whitened as rewards are
    assert all(acts.values()), acts
