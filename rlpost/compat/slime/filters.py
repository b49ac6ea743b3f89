"""Filters of slime: which scored groups to train, and which groups of the buffer to resume first.

Input: functions ``(args, samples, **kwargs)`` and ``(args, rollout_id, buffer, num_samples)``. Output: functions of
our own interfaces. A filter reads the prompt of a group, which a ``SampleGroup`` does not have: it is kept from the
grading of the group until its filter.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlpost.compat.slime.arguments import Arguments
from rlpost.compat.slime.modules import sample_class
from rlpost.compat.slime.sample import START, begun, shown
from rlpost.errors import ConfigError
from rlpost.types import Prompt, SampleGroup, Unfinished
from rlpost.types import Sample as Answer

SMALLEST_STD = 1e-6


@dataclass
class DynamicFilterOutput:
    """What a filter of groups says. ``keep_when_insufficient``: train a group all the same where a batch would
    otherwise need more prompts."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


class SlimeFilter:
    """A filter of slime under our interface."""

    def __init__(self, function: Callable[..., Any], args: Arguments) -> None:
        self._function, self._args = function, args
        self.prompts: dict[int, Prompt] = {}  # of groups that are graded and not yet filtered
        self.keep_when_insufficient = False  # of the group that was looked at last

    def __call__(self, group: SampleGroup) -> bool:
        """Whether to train a group."""
        first = group.samples[0].sample
        prompt = self.prompts.pop(group.prompt_id, None) or Prompt(group.prompt_id, "", first.prompt_ids, first.label)
        key = self._args.reward_key
        samples = [
            shown(
                prompt,
                scored.sample,
                siblings=self._args.n_samples_per_prompt,
                reward={key: scored.reward} if key else scored.reward,
                kind=sample_class(),
            )
            for scored in group.samples
        ]
        output = self._function(self._args, samples)
        self.keep_when_insufficient = bool(getattr(output, "keep_when_insufficient", False))
        return bool(getattr(output, "keep", output))


class SlimeBufferFilter:
    """A filter of the buffer of slime under our interface.

    It gets lists of samples, which it may take out of the buffer. What it removes and does not return goes on waiting:
    every prompt that was fetched is trained or filtered in the end.
    """

    def __init__(self, function: Callable[..., Any], args: Arguments) -> None:
        self._function, self._args = function, args

    def __call__(self, waiting: Sequence[Unfinished], num_groups: int) -> Sequence[Unfinished]:
        """The groups to start now, at most ``num_groups``. Raises ConfigError for anything else than groups."""
        by_id = {entry.prompt.prompt_id: entry for entry in waiting}
        chosen = self._function(self._args, None, [self._group(entry) for entry in waiting], num_groups)
        try:
            return [by_id[group[0].group_index] for group in chosen][:num_groups]
        except (AttributeError, IndexError, KeyError, TypeError):
            raise ConfigError(
                f"--buffer-filter-path: the function returned {repr(chosen)[:200]}; it has to return a list of groups "
                "of the buffer that it was given"
            ) from None

    def _group(self, entry: Unfinished) -> list[Any]:
        siblings, kind = self._args.n_samples_per_prompt, sample_class()
        written = {answer.index: answer for answer in entry.samples}
        return [
            _resumed(entry.prompt, written[index], siblings, kind)
            if index in written
            else begun(entry.prompt, index, siblings=siblings, kind=kind)
            for index in range(siblings)
        ]


def _resumed(prompt: Prompt, answer: Answer, siblings: int, kind: type[Any]) -> Any:
    made = shown(prompt, answer, siblings=siblings, kind=kind)
    made.metadata.setdefault(START, answer.oldest_version)
    return made


def check_reward_nonzero_std(args: Any, samples: Sequence[Any], **kwargs: Any) -> DynamicFilterOutput:
    """Whether the rewards of a group differ."""
    del kwargs
    rewards = [float(sample.get_reward_value(args)) for sample in samples]
    keep = statistics.pstdev(rewards) > SMALLEST_STD
    return DynamicFilterOutput(keep, None if keep else f"all rewards are {rewards[0]:g}")


def check_reward_nonzero_std_with_fallback(args: Any, samples: Sequence[Any], **kwargs: Any) -> DynamicFilterOutput:
    """The same; equal rewards are better than more prompts."""
    found = check_reward_nonzero_std(args, samples, **kwargs)
    return DynamicFilterOutput(found.keep, found.reason, keep_when_insufficient=True)


def pop_first(args: Any, rollout_id: Any, buffer: list[Any], num_samples: int) -> list[Any]:
    """Take those out of the buffer that have waited longest."""
    del args, rollout_id
    taken, buffer[:] = buffer[:num_samples], buffer[num_samples:]
    return taken


class SlimeGrader:
    """A grader before another one: it keeps prompts for a filter, and takes rewards that a generate function set."""

    def __init__(self, grader: Any, *, wanted: Any, takes_given: bool, reward_key: str | None) -> None:
        self._grader, self._takes_given, self._key = grader, takes_given, reward_key
        self._prompts = wanted.prompts if isinstance(wanted, SlimeFilter) else None

    async def grade(self, prompt: Prompt, samples: Sequence[Answer]) -> Any:
        """See ``rlpost.reward.grader.Grader``. Raises ConfigError for a reward that is no number."""
        if self._prompts is not None:
            self._prompts[prompt.prompt_id] = prompt
        given = {
            at: one.extra["reward"] for at, one in enumerate(samples) if self._takes_given and "reward" in one.extra
        }
        asked = [at for at in range(len(samples)) if at not in given]
        rewards = await self._grader.grade(prompt, [samples[at] for at in asked]) if asked else []
        by_place = dict(zip(asked, rewards, strict=True)) | {at: self._number(value) for at, value in given.items()}
        return [by_place[at] for at in range(len(samples))]

    def counters(self) -> Mapping[str, float]:
        """See ``Grader``."""
        return self._grader.counters()

    async def close(self) -> None:
        """See ``Grader``."""
        await self._grader.close()

    def _number(self, reward: Any) -> float:
        return reward_number(reward, self._key)


def reward_number(reward: Any, key: str | None) -> float:
    """A reward as a number: that under ``key`` where it is an object.

    Raises:
        ConfigError: an object without --reward-key, or without that key.
    """
    if isinstance(reward, Mapping):
        if key is None or key not in reward:
            has = ", ".join(map(str, reward))
            raise ConfigError(f"--reward-key {key or 'is not set'}: a reward is an object with {has}; name one")
        reward = reward[key]
    return float(reward)
