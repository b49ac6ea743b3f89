"""Generalized advantage estimation: advantages and returns of tokens from the values of a critic.

Input: the reward of each token of an answer and the critic's value of the state before it. Output:
an advantage and a return for each token, float64. Pure, without torch.

Sources: GAE, arXiv 1506.02438, equations 11 and 16; PPO, arXiv 1707.06347, equations 11 and 12.
Tokens that the model did not generate (loss mask 0, the output of tools) are no actions: the state
before the next generated token follows the state before the last one, without a discount between.
An answer is an episode: the value after its last token is 0, also if it was truncated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from rlpost.algorithm.advantage import Penalties, whitened_tokens
from rlpost.algorithm.answers import Answer, answers_of
from rlpost.algorithm.partition import partition
from rlpost.columns import FloatColumn
from rlpost.types import SampleGroup

Array: TypeAlias = np.ndarray
"""A one-dimensional numpy array of float64."""
SHORT = 64
"""Tokens up to which one chunk is used."""


@dataclass(frozen=True, slots=True)
class Discounts:
    """The discounts, both in [0, 1].

    ``gamma`` discounts rewards. ``lambd`` weights estimates over more steps; 1 uses no
    bootstrapping.
    """

    gamma: float
    lambd: float


@dataclass(frozen=True, slots=True)
class Estimates:
    """Advantages for the policy and returns for the critic, by group and sample.

    There is one value per response token; 0 where the loss mask is 0.
    """

    advantages: list[tuple[FloatColumn, ...]]
    returns: list[tuple[FloatColumn, ...]]
    metrics: dict[str, float]


def gae(
    rewards_T: Array, values_T: Array, discounts: Discounts, *, chunk: int | None = None
) -> tuple[Array, Array]:
    """Advantages A_t = delta_t + gamma lambda A_(t+1) and returns A_t + V_t; [T], [T] -> [T], [T].

    delta_t = r_t + gamma V_(t+1) - V_t, where V after the last token is 0 (arXiv 1506.02438,
    equations 11 and 16). The sum runs over all chunks of ``chunk`` tokens at once, then over the
    chunks; the length of a chunk (default: the square root of T) changes only rounding.
    """
    next_values = np.append(values_T[1:], 0.0)
    deltas = rewards_T + discounts.gamma * next_values - values_T
    advantages = discounted_sums(deltas, discounts.gamma * discounts.lambd, chunk=chunk)
    return advantages, advantages + values_T


def discounted_sums(values_T: Array, factor: float, *, chunk: int | None = None) -> Array:
    """S_t = v_t + factor S_(t+1), with 0 after the last; [T] -> [T].

    Only products and sums of elements in a fixed order: equal on every processor.
    """
    length = len(values_T)
    if chunk is None:
        chunk = length if length <= SHORT else math.isqrt(length)
    chunk = max(chunk, 1)
    # [chunks, chunk], padded with zeros at the end, which add nothing
    count = -(-length // chunk)
    sums = np.zeros((count, chunk))
    sums.reshape(-1)[:length] = values_T
    for column in range(chunk - 2, -1, -1):
        sums[:, column] += factor * sums[:, column + 1]
    # What follows a chunk reaches its element t with factor^(chunk - t).
    powers = np.multiply.accumulate(np.full(chunk, factor))[::-1]
    for row in range(count - 2, -1, -1):
        sums[row] += powers * sums[row + 1, 0]
    return sums.reshape(-1)[:length]


def token_rewards(answer: Answer, penalties: Sequence[float] | None) -> Array:
    """Return the reward of each response token of an answer, over all of its samples; [T].

    The answer's reward is at its last trained token. The KL penalty of each token is subtracted.

    With rewards of turns (``rlpost.algorithm.turns``), the reward of each turn is at the last
    trained token of that turn, and the answer's reward is not used.
    """
    mask = answer.mask.array
    rewards = np.zeros(len(mask))
    ends = [(0, len(mask), answer.reward)]
    if answer.turns is not None:
        ends = [(turn.start, turn.end, turn.reward) for turn in answer.turns]
    for start, end, reward in ends:
        trained = np.flatnonzero(mask[start:end])
        if len(trained):
            rewards[start + trained[-1]] += reward
    if penalties is not None:
        rewards -= np.asarray(penalties, dtype=np.float64)
    return rewards * mask


def actions_of(answer: Answer) -> Array:
    """Return the positions of the trained tokens of an answer in the order of play.

    That of its turns where they are known, else that of its samples: the state after the last token
    of a sample is the one before the first token of the next.
    """
    actions = np.flatnonzero(answer.mask.array)
    if not answer.turns:
        return actions
    number = np.zeros(len(answer.mask), dtype=np.int64)
    for turn in answer.turns:
        number[turn.start : turn.end] = turn.number
    return actions[np.argsort(number[actions], kind="stable")]


def estimate_with_values(
    groups: Sequence[SampleGroup],
    values: Sequence[Sequence[FloatColumn]],
    penalties: Penalties | None,
    discounts: Discounts,
    *,
    normalize_advantages: bool,
) -> Estimates:
    """Advantages and returns of all samples of a rollout; an answer is one episode.

    ``values`` are those of the critic before the update, one per response token, and ``penalties``
    those of the KL divergence; both by group and sample. ``normalize_advantages`` whitens the
    advantages over the trained tokens of the rollout, but not the returns.
    """
    by_group = [answers_of(group) for group in groups]
    answers = list(itertools.chain.from_iterable(by_group))
    sizes = [len(answer.samples) for answer in answers]
    joined_values = _joined(values, sizes)
    charged = [None] * len(answers) if penalties is None else _joined(penalties, sizes)
    advantages: list[FloatColumn] = []
    returns: list[FloatColumn] = []
    trained_values: list[Array] = []
    trained_returns: list[Array] = []
    for answer, value_T, penalty_T in zip(answers, joined_values, charged, strict=True):
        actions = actions_of(answer)
        rewards_T = token_rewards(answer, penalty_T)
        own_values = value_T[actions]
        own_advantages, own_returns = gae(rewards_T[actions], own_values, discounts)
        advantages.append(_column(own_advantages, actions, len(value_T)))
        returns.append(_column(own_returns, actions, len(value_T)))
        trained_values.append(own_values)
        trained_returns.append(own_returns)
    metrics = _value_metrics(np.concatenate(trained_values), np.concatenate(trained_returns))
    if normalize_advantages:
        advantages = whitened_tokens(advantages, [answer.mask for answer in answers])
    return Estimates(
        advantages=_by_sample(by_group, advantages),
        returns=_by_sample(by_group, returns),
        metrics=metrics,
    )


def _joined(of_groups: Sequence[Sequence[Sequence[float]]], sizes: Sequence[int]) -> list[Array]:
    """Concatenate the values of the tokens of each answer of ``sizes`` samples; float64."""
    of_samples = [np.asarray(one, dtype=np.float64) for own in of_groups for one in own]
    return [np.concatenate(part) for part in partition(of_samples, sizes)]


def _by_sample(
    by_group: Sequence[Sequence[Answer]], columns: Sequence[FloatColumn]
) -> list[tuple[FloatColumn, ...]]:
    """Split the columns of answers into those of their samples, by group."""
    remaining = iter(columns)
    return [
        tuple(itertools.chain.from_iterable(answer.split(next(remaining)) for answer in answers))
        for answers in by_group
    ]


def _column(values: Array, positions: Array, length: int) -> FloatColumn:
    """Return ``values`` at ``positions`` among ``length`` tokens, 0 elsewhere."""
    whole = np.zeros(length, dtype=np.float32)
    whole[positions] = values
    return FloatColumn.view(whole)


def _value_metrics(values: Array, returns: Array) -> dict[str, float]:
    """Means, and how much of the variance of the returns the values explain (1: all, 0: none)."""
    if not len(returns):
        return {}
    spread = float(returns.var())
    explained = 1.0 - float((returns - values).var()) / spread if spread > 0.0 else 0.0
    return {
        "train/value_mean": float(values.mean()),
        "train/return_mean": float(returns.mean()),
        "train/value_explained_var": explained,
    }
