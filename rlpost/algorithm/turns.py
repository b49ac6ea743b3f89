"""Rewards of turns: from an episode of many turns to the advantage of each token. Pure.

An episode is one answer of a group; it has one sample or several (branches of a conversation). A
sample carries the spans of its turns and their rewards (``Sample.extra``, see ``turn_record``);
a turn belongs to the sample in which its tokens are trained.

The return of a turn is the sum of the rewards of this turn and of all later ones of the episode, in
any sample. Advantages are those of GRPO with the turns of the group as its population:
(return - mean) / (std + 1e-6). With one turn an episode this is GRPO. A turn with the mean return
of the group has an advantage of 0, however long its episode; process supervision as in arXiv
2402.03300, section 4.1.3, sums normalised rewards, and so penalises each further turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlpost.algorithm.advantage import Advantage, grpo_advantages
from rlpost.algorithm.partition import partition
from rlpost.columns import FloatColumn
from rlpost.types import SampleGroup

KEY = "turn_rewards"


@dataclass(frozen=True, slots=True)
class TurnReward:
    """A turn of an episode.

    It has the tokens ``start`` to ``end`` (exclusive) of a response, a reward, and a number in the
    episode.
    """

    start: int
    end: int
    reward: float
    number: int


def turn_record(turns: Sequence[TurnReward]) -> dict[str, object]:
    """Return the entry of ``Sample.extra`` for the turns of a sample."""
    return {KEY: [[turn.start, turn.end, turn.reward, turn.number] for turn in turns]}


def turns_of(extra: Mapping[str, Any]) -> tuple[TurnReward, ...] | None:
    """Return the turns of a sample, the inverse of ``turn_record``; None for one without."""
    given = extra.get(KEY)
    return None if given is None else tuple(TurnReward(*turn) for turn in given)


def turn_returns(rewards: Sequence[float]) -> tuple[float, ...]:
    """Return for each turn the sum of its reward and of all later ones.

    >>> turn_returns([0.5, 0.0, 1.0])
    (1.5, 1.0, 1.0)
    """
    return tuple(reversed(list(itertools.accumulate(reversed(list(rewards))))))


def turn_advantages(
    episodes: Sequence[Sequence[float]], *, normalize_std: bool = True
) -> list[tuple[float, ...]]:
    """Return the advantage of each turn, from the rewards of the turns by episode of a group."""
    returns = [turn_returns(rewards) for rewards in episodes]
    flat = [each for own in returns for each in own]
    if not flat:
        return [() for _ in episodes]
    return partition(grpo_advantages(flat, normalize_std=normalize_std), map(len, returns))


def group_turn_advantages(
    group: SampleGroup, *, normalize_std: bool = True
) -> tuple[Advantage, ...] | None:
    """Return the advantages per token of each sample of a group; None if a sample has no turns.

    Tokens outside of turns (the output of tools) have an advantage of 0; their mask is 0.
    """
    of_samples = [turns_of(scored.sample.extra) for scored in group.samples]
    if any(turns is None for turns in of_samples):
        return None
    episodes: dict[int, list[TurnReward]] = {}
    for scored, turns in zip(group.samples, of_samples, strict=True):
        episodes.setdefault(scored.sample.index, []).extend(turns or ())
    rewards = []
    for own in episodes.values():
        own.sort(key=lambda turn: turn.number)
        rewards.append([turn.reward for turn in own])
    episode_advantages = turn_advantages(rewards, normalize_std=normalize_std)
    by_turn = {
        (index, turn.number): advantage
        for (index, own), advantages in zip(episodes.items(), episode_advantages, strict=True)
        for turn, advantage in zip(own, advantages, strict=True)
    }
    spread: list[Advantage] = []
    for scored, turns in zip(group.samples, of_samples, strict=True):
        sample = scored.sample
        in_order = sorted(turns or (), key=lambda turn: turn.start)
        credited = [(turn, by_turn[sample.index, turn.number]) for turn in in_order]
        spread.append(_spread(credited, len(sample.response_ids)))
    return tuple(spread)


def _spread(turns: Sequence[tuple[TurnReward, float]], length: int) -> FloatColumn:
    values: list[float] = []
    for turn, advantage in turns:
        values += [0.0] * (turn.start - len(values)) + [advantage] * (turn.end - turn.start)
    return FloatColumn(values + [0.0] * (length - len(values)))
