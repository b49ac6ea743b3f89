"""Answers: the unit of rewards, baselines, shaping, losses and metrics. Pure.

An answer has one sample or several: the turns of an agent, the branches of a conversation, the parts
between which its context was compacted. All count as one answer: one reward (the mean of its
samples'), one advantage, and a loss that is the mean over the tokens of all its samples.

Input: groups; the samples of an answer have the same index and are adjacent. Output: their answers;
an advantage and a weight per sample.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rlpost.algorithm.advantage import Advantage, AnswerGroup, Penalties
from rlpost.algorithm.partition import partition
from rlpost.algorithm.repetition import is_repetitive
from rlpost.algorithm.turns import TurnReward, joined_turns, turn_returns, turns_of
from rlpost.columns import DoubleColumn, FloatColumn, RunColumn
from rlpost.types import SampleGroup, ScoredSample

Column = TypeVar("Column", FloatColumn, DoubleColumn, RunColumn)


@dataclass(frozen=True, slots=True)
class Answer:
    """One graded answer to a prompt: its samples in order, at least one."""

    samples: tuple[ScoredSample, ...]

    @property
    def reward(self) -> float:
        """The mean of the samples' rewards, which are usually equal."""
        rewards = [scored.reward for scored in self.samples]
        return rewards[0] if len(set(rewards)) == 1 else math.fsum(rewards) / len(rewards)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Response tokens of each sample, those of tools included."""
        return tuple(len(scored.sample.response_ids) for scored in self.samples)

    @property
    def length(self) -> int:
        """Response tokens of all samples together, those of tools included."""
        return sum(self.lengths)

    @property
    def mask(self) -> RunColumn:
        """1 for each of these tokens that enters the loss, else 0."""
        return RunColumn(run for scored in self.samples for run in scored.mask.runs)

    @property
    def num_generated(self) -> int:
        """Tokens that the policy generated, also of an answer that is masked out of the loss."""
        return sum(scored.sample.mask.total() for scored in self.samples)

    @property
    def text(self) -> str:
        return "".join(scored.sample.text for scored in self.samples)

    @property
    def is_truncated(self) -> bool:
        """Whether a length limit ended it: its last sample."""
        return self.samples[-1].sample.finish_reason == "length"

    @property
    def is_repetitive(self) -> bool:
        """Whether it ends in a repetition loop."""
        return is_repetitive(self.text, is_truncated=self.is_truncated)

    @property
    def turns(self) -> tuple[TurnReward, ...] | None:
        """Its turns in the order of play, with the positions of their tokens among all of them.

        None if a sample has no rewards of turns.
        """
        of_samples = [turns_of(scored.sample.extra) for scored in self.samples]
        known = [turns for turns in of_samples if turns is not None]
        return joined_turns(known, self.lengths) if len(known) == len(of_samples) else None

    def split(self, column: Column) -> list[Column]:
        """Return the parts of a column of all its response tokens, by sample."""
        return partition(column, self.lengths)


def answers_of(group: SampleGroup) -> list[Answer]:
    """Return the answers of a group, in order."""
    by_index = itertools.groupby(group.samples, key=lambda scored: scored.sample.index)
    return [Answer(tuple(samples)) for _, samples in by_index]


def compared_rewards(answers: Sequence[Answer]) -> list[float]:
    """Return what the baseline of a group compares; if all are equal, no answer has an advantage.

    The returns of turns if all answers have rewards of turns, else the rewards of the answers.
    """
    by_answer = [answer.turns for answer in answers]
    returns: list[float] = []
    for turns in by_answer:
        returns += turn_returns([turn.reward for turn in turns or ()])
    if returns and None not in by_answer:
        return returns
    return [answer.reward for answer in answers]


def answer_group(
    answers: Sequence[Answer], penalties: Sequence[Sequence[float]] | None
) -> AnswerGroup:
    """Return what estimators read of the answers of a group.

    ``penalties`` are those of each response token, by sample.
    """
    joined = None
    if penalties is not None:
        answer_penalties = partition(penalties, [len(answer.samples) for answer in answers])
        joined = [DoubleColumn.joined(map(DoubleColumn.of, tokens)) for tokens in answer_penalties]
    answer_turns = [answer.turns for answer in answers]
    turns = [turns for turns in answer_turns if turns is not None]
    return AnswerGroup(
        rewards=[answer.reward for answer in answers],
        masks=[answer.mask for answer in answers],
        lengths=[answer.num_generated for answer in answers],
        penalties=joined,
        turns=turns if len(turns) == len(answer_turns) else None,
    )


def estimate_by_answer(
    groups: Sequence[SampleGroup],
    penalties: Penalties | None,
    estimate: Callable[[Sequence[AnswerGroup]], Sequence[Sequence[Advantage]]],
) -> list[tuple[Advantage, ...]]:
    """Compute the advantages of all samples of a rollout, by group and sample.

    ``estimate`` receives the answers of all groups and returns an advantage for each. Advantages
    per token are split among the samples of the answer. ``penalties`` are by group and sample.
    """
    by_group = [answers_of(group) for group in groups]
    charged = [None] * len(groups) if penalties is None else penalties
    estimated = estimate(list(map(answer_group, by_group, charged)))
    return [
        tuple(
            itertools.chain.from_iterable(
                _of_samples(answer, advantage)
                for answer, advantage in zip(answers, advantages, strict=True)
            )
        )
        for answers, advantages in zip(by_group, estimated, strict=True)
    ]


def _of_samples(answer: Answer, advantage: Advantage) -> Sequence[Advantage]:
    """Convert the advantage of an answer to those of its samples."""
    if isinstance(advantage, FloatColumn):
        return answer.split(advantage)
    return [advantage] * len(answer.samples)


def answer_weights(group: SampleGroup) -> list[tuple[float, int]]:
    """Return ``weight`` and ``count`` of each sample, see ``TrainSample``.

    The weight is the sample's share of the answer's tokens in the loss; the count is 1 for the
    first sample of an answer and 0 for the others.
    """
    weights: list[tuple[float, int]] = []
    for answer in answers_of(group):
        totals = [scored.mask.total() for scored in answer.samples]
        whole = max(1, sum(totals))
        weights += [(total / whole, int(number == 0)) for number, total in enumerate(totals)]
    return weights
