"""Generalized advantage estimation: advantages and returns of tokens from the values of a critic.

Input: the reward of each token of a response and the critic's value of the state before it. Output:
an advantage and a return for each token, float64. Pure, without torch.

Sources: GAE, arXiv 1506.02438, equations 11 and 16; PPO, arXiv 1707.06347, equations 11 and 12.
Tokens that the model did not generate (loss mask 0, the output of tools) are no actions: the state
before the next generated token follows the state before the last one, without a discount between.
A response is an episode: the value after its last token is 0, also if it was truncated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from rlpost.algorithm.advantage import Advantage, Penalties, whiten
from rlpost.algorithm.partition import by_group
from rlpost.algorithm.turns import turns_of
from rlpost.columns import FloatColumn
from rlpost.types import SampleGroup, ScoredSample

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

    gamma: float = 1.0
    lambd: float = 1.0


@dataclass(frozen=True, slots=True)
class Estimates:
    """Advantages for the policy and returns for the critic, by group and sample.

    There is one value per response token; 0 where the loss mask is 0.
    """

    advantages: list[tuple[Advantage, ...]]
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


def token_rewards(scored: ScoredSample, penalties: Sequence[float] | None) -> Array:
    """Return the reward of each response token; [T].

    The sample's reward is at its last trained token. The KL penalty of each token is subtracted.

    With rewards of turns (``rlpost.algorithm.turns``), the reward of each turn is at the last
    trained token of that turn, and the sample's reward is not used.
    """
    mask = scored.sample.mask.array
    rewards = np.zeros(len(mask))
    turns = turns_of(scored.sample.extra)
    ends = [(0, len(mask), scored.reward)]
    if turns is not None:
        ends = [(turn.start, turn.end, turn.reward) for turn in turns]
    for start, end, reward in ends:
        trained = np.flatnonzero(mask[start:end])
        if len(trained):
            rewards[start + trained[-1]] += reward
    if penalties is not None:
        rewards -= np.asarray(penalties, dtype=np.float64)
    return rewards * mask


def estimate_with_values(
    groups: Sequence[SampleGroup],
    values: Sequence[Sequence[FloatColumn]],
    penalties: Penalties | None,
    discounts: Discounts,
    *,
    normalize_advantages: bool,
) -> Estimates:
    """Advantages and returns of all samples of a rollout.

    ``values`` are those of the critic before the update, one per response token, and ``penalties``
    those of the KL divergence; both by group and sample. ``normalize_advantages`` whitens the
    advantages over the trained tokens of the rollout, but not the returns.
    """
    samples = [scored for group in groups for scored in group.samples]
    of_samples = list(itertools.chain.from_iterable(values))
    charged = [None] * len(samples) if penalties is None else [p for own in penalties for p in own]
    masks = [scored.sample.mask.array.astype(bool) for scored in samples]
    gae_estimates: list[tuple[Array, Array]] = []
    for scored, value, penalty, mask in zip(samples, of_samples, charged, masks, strict=True):
        rewards = token_rewards(scored, penalty)
        gae_estimates.append(gae(rewards[mask], value.array.astype(np.float64)[mask], discounts))
    metrics = _value_metrics(
        np.concatenate([value.array[mask] for value, mask in zip(of_samples, masks, strict=True)]),
        np.concatenate([returns for _, returns in gae_estimates]),
    )
    advantages = [advantage for advantage, _ in gae_estimates]
    if normalize_advantages:
        advantages = _whitened(advantages)
    advantage_columns = list(map(_column, advantages, masks))
    return_columns = [
        _column(returns, mask) for (_, returns), mask in zip(gae_estimates, masks, strict=True)
    ]
    return Estimates(
        advantages=[tuple(own) for own in by_group(groups, advantage_columns)],
        returns=[tuple(own) for own in by_group(groups, return_columns)],
        metrics=metrics,
    )


def _whitened(advantages: Sequence[Array]) -> list[Array]:
    flat = list(itertools.chain.from_iterable(own.tolist() for own in advantages))
    white = np.array(whiten(flat, [1] * len(flat)))
    return np.split(white, np.cumsum([len(own) for own in advantages])[:-1])


def _column(values: Array, mask: Array) -> FloatColumn:
    """Values of the trained tokens among all response tokens."""
    whole = np.zeros(len(mask), dtype=np.float32)
    whole[mask] = values
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
