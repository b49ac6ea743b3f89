"""Rewards of turns: their record in a sample, and the advantage of each turn. Pure.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlpost.algorithm.partition import partition
from rlpost.columns import FloatColumn

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
    recorded = extra.get(KEY)
    return None if recorded is None else tuple(TurnReward(*turn) for turn in recorded)


def joined_turns(
    of_samples: Sequence[Sequence[TurnReward]], lengths: Sequence[int]
) -> tuple[TurnReward, ...]:
    """Return the turns of an answer in the order of play.

    Their spans are those in the responses of its samples, of ``lengths``, one after the other.
    """
    joined: list[TurnReward] = []
    for turns, offset in zip(of_samples, itertools.accumulate(lengths, initial=0), strict=False):
        joined += [
            replace(turn, start=turn.start + offset, end=turn.end + offset) for turn in turns
        ]
    return tuple(sorted(joined, key=lambda turn: turn.number))


def turn_returns(rewards: Sequence[float]) -> tuple[float, ...]:
    """Return for each turn the sum of its reward and of all later ones.

    >>> turn_returns([0.5, 0.0, 1.0])
    (1.5, 1.0, 1.0)
    """
    return tuple(reversed(list(itertools.accumulate(reversed(list(rewards))))))


def turn_advantages(
    answers: Sequence[Sequence[TurnReward]],
    lengths: Sequence[int],
    baseline: Callable[[Sequence[float]], Sequence[float]],
) -> tuple[FloatColumn, ...]:
    """Return the advantages per token of each answer of a group.

    ``answers`` have their turns in the order of play, and ``lengths`` tokens. ``baseline`` turns
    the returns of all turns of the group into their advantages. Tokens outside of turns (the output
    of tools) have an advantage of 0; their mask is 0.
    """
    returns = [turn_returns([turn.reward for turn in turns]) for turns in answers]
    flat = list(itertools.chain.from_iterable(returns))
    by_trajectory = partition(baseline(flat) if flat else [], map(len, returns))
    return tuple(
        _spread(turns, advantages, length)
        for turns, advantages, length in zip(answers, by_trajectory, lengths, strict=True)
    )


def _spread(turns: Sequence[TurnReward], advantages: Sequence[float], length: int) -> FloatColumn:
    values = [0.0] * length
    for turn, advantage in zip(turns, advantages, strict=True):
        values[turn.start : turn.end] = [advantage] * (turn.end - turn.start)
    return FloatColumn(values)
