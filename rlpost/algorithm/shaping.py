"""Reward shaping: rewards and loss masks of too long, truncated or repetitive answers. Pure.

Input: the graded groups of a rollout as the journal holds them. Output: the groups to train, from
which baselines and advantages are computed. Rewards in metrics and filters stay those of the
reward function.

Shaping acts on answers, so on all samples of one. Rewards of turns follow: a change of the answer's
reward counts for its last turn, and a punished answer has no other reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlpost.algorithm.answers import Answer, answers_of
from rlpost.algorithm.turns import turn_record, turns_of
from rlpost.types import Sample, SampleGroup, ScoredSample


@dataclass(frozen=True, slots=True)
class PostProcessed:
    """Groups with the rewards to train on, and the same groups with the raw rewards."""

    groups: tuple[SampleGroup, ...]
    raw_groups: tuple[SampleGroup, ...]


@dataclass(frozen=True, slots=True)
class Shaping:
    """Options of reward shaping; fields have the names and meanings of [grpo].

    ``max_response_len`` and ``max_context_len`` are those of the rollout.
    """

    max_response_len: int
    max_context_len: int | None
    overlong_buffer_len: int | None
    overlong_penalty: float
    truncated_answers: str
    repetitive_answers: str
    punished_reward: float

    @property
    def is_off(self) -> bool:
        """Whether every answer is trained as it was graded."""
        kept = self.truncated_answers == self.repetitive_answers == "train"
        return kept and self.overlong_buffer_len is None


def overlong_reward(length: int, *, max_len: int, buffer_len: int) -> float:
    """Return the soft overlong punishment, between -1 and 0, of an answer of ``length`` tokens.

    0 up to max_len - buffer_len, then falling linearly to -1 at max_len. A buffer longer than
    max_len begins at 0. Source: DAPO, arXiv 2503.14476, equation 13.
    """
    buffer_len = min(buffer_len, max_len)
    beyond = length - (max_len - buffer_len)
    return -min(max(beyond / buffer_len, 0.0), 1.0)


def max_length(answer: Answer, shaping: Shaping) -> int:
    """Return the length in tokens at which the generation of an answer had to end, at least 1.

    --rollout-max-response-len, or less where the last sample then fills --rollout-max-context-len.
    """
    longest = shaping.max_response_len
    if shaping.max_context_len is not None:
        num_before = answer.length - answer.lengths[-1]
        in_context = len(answer.samples[-1].sample.prompt_ids)
        longest = min(longest, num_before + shaping.max_context_len - in_context)
    return max(longest, 1)


def shaped(groups: Sequence[SampleGroup], shaping: Shaping) -> list[SampleGroup]:
    """Return the groups with shaped rewards and loss masks."""
    if shaping.is_off:
        return list(groups)
    changed = []
    for group in groups:
        samples = [scored for answer in answers_of(group) for scored in _shaped(answer, shaping)]
        changed.append(replace(group, samples=tuple(samples)))
    return changed


def _shaped(answer: Answer, shaping: Shaping) -> list[ScoredSample]:
    actions = set()
    if answer.is_truncated:
        actions.add(shaping.truncated_answers)
    if shaping.repetitive_answers != "train" and answer.is_repetitive:
        actions.add(shaping.repetitive_answers)
    is_punished = "punish" in actions
    added = shaping.punished_reward if is_punished else 0.0
    if shaping.overlong_buffer_len is not None:
        added += shaping.overlong_penalty * overlong_reward(
            answer.length,
            max_len=max_length(answer, shaping),
            buffer_len=shaping.overlong_buffer_len,
        )
    last_turn = max((turn.number for turn in answer.turns or ()), default=-1)
    return [
        ScoredSample(
            _with_turns(scored.sample, last_turn, added, keeps_rewards=not is_punished),
            added if is_punished else scored.reward + added,
            is_masked="mask" in actions,
        )
        for scored in answer.samples
    ]


def _with_turns(sample: Sample, last_turn: int, added: float, *, keeps_rewards: bool) -> Sample:
    """Add to the reward of the last turn, and drop those of all turns without ``keeps_rewards``."""
    turns = turns_of(sample.extra)
    if turns is None:
        return sample
    changed = []
    for turn in turns:
        reward = turn.reward if keeps_rewards else 0.0
        changed.append(replace(turn, reward=reward + added * (turn.number == last_turn)))
    return replace(sample, extra={**sample.extra, **turn_record(changed)})
