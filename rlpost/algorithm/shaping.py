"""Reward shaping: rewards and loss masks of too long, truncated or repetitive answers. Pure.

Input: the graded groups of a rollout as the journal holds them. Output: the groups to train, from
which baselines and advantages are computed. Rewards in metrics and filters stay those of the
reward function.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlpost.columns import RunColumn
from rlpost.types import SampleGroup, ScoredSample

REPETITION_WINDOW, REPETITION_LEAST = 4096, 256  # characters at the end of an answer
REPETITIVE = 10


@dataclass(frozen=True, slots=True)
class Shaping:
    """Options of reward shaping; fields have the names and meanings of [grpo].

    ``max_response_len`` is --rollout-max-response-len.
    """

    max_response_len: int
    overlong_buffer_len: int | None = None
    overlong_penalty: float = 1.0
    truncated_answers: str = "train"
    repetitive_answers: str = "train"
    punished_reward: float = 0.0

    @property
    def is_off(self) -> bool:
        """Whether every answer is trained as it was graded."""
        kept = self.truncated_answers == self.repetitive_answers == "train"
        return kept and self.overlong_buffer_len is None


def overlong_reward(length: int, *, max_len: int, buffer_len: int) -> float:
    """Return the soft overlong punishment, between -1 and 0, of an answer of ``length`` tokens.

    0 up to max_len - buffer_len, then falling linearly to -1 at max_len. Source: DAPO, arXiv
    2503.14476, equation 13.
    """
    beyond = length - (max_len - buffer_len)
    return -min(max(beyond / buffer_len, 0.0), 1.0)


def shaped(groups: Sequence[SampleGroup], shaping: Shaping) -> list[SampleGroup]:
    """Return the groups with shaped rewards and loss masks."""
    if shaping.is_off:
        return list(groups)
    found = []
    for group in groups:
        samples = tuple(_shaped(scored, shaping) for scored in group.samples)
        found.append(replace(group, samples=samples))
    return found


def _shaped(scored: ScoredSample, shaping: Shaping) -> ScoredSample:
    sample, reward = scored.sample, scored.reward
    actions = set()
    if sample.finish_reason == "length":
        actions.add(shaping.truncated_answers)
    if shaping.repetitive_answers != "train" and is_repetitive(sample.text):
        actions.add(shaping.repetitive_answers)
    if "punish" in actions:
        reward = shaping.punished_reward
    if shaping.overlong_buffer_len is not None:
        reward += shaping.overlong_penalty * overlong_reward(
            len(sample.response_ids),
            max_len=shaping.max_response_len,
            buffer_len=shaping.overlong_buffer_len,
        )
    if "mask" in actions:
        sample = replace(sample, loss_mask=RunColumn([(0, len(sample.response_ids))]))
    return ScoredSample(sample, reward)


def is_repetitive(text: str) -> bool:
    """Return whether an answer ends in a repetition loop.

    Deflate compresses such an end at least REPETITIVE times, but prose and code only 3 to 4 times.
    Texts shorter than REPETITION_LEAST bytes are never repetitive.
    """
    end = text[-REPETITION_WINDOW:].encode()
    return len(end) >= REPETITION_LEAST and len(end) > REPETITIVE * len(zlib.compress(end, 1))
