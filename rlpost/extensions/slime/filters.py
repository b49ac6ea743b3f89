"""Group filters, buffer filters and reward post-processing of slime, with rlpost's interfaces.
A group filter selects the scored groups to train, a buffer filter the waiting groups to start next.
Input: functions ``(args, samples, **kwargs)`` and ``(args, rollout_id, buffer, num_samples)``.
Output: functions with rlpost's interfaces. A filter reads the prompt of a group, which a
``SampleGroup`` does not have; it is kept from the grading of the group until the filter has run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlpost.algorithm.partition import by_group
from rlpost.algorithm.shaping import PostProcessed
from rlpost.errors import ConfigError
from rlpost.extensions.slime.arguments import Arguments
from rlpost.extensions.slime.sample import START, Sample, begun, shown
from rlpost.types import Prompt, SampleGroup, Unfinished
from rlpost.types import Sample as Answer

if TYPE_CHECKING:
    from rlpost.tasks.reward.grader import Grader, Rewards

SMALLEST_STD = 1e-6


@dataclass
class DynamicFilterOutput:
    """The result of a group filter.

    ``keep_when_insufficient``: train a rejected group if the batch would otherwise need more
    prompts.
    """

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def scored_samples(
    group: SampleGroup, args: Arguments, prompt: Prompt | None = None
) -> list[Sample]:
    """Return a scored group as samples of slime.

    Without ``prompt`` they lack its text and metadata, which a scored group does not hold.
    """
    first = group.samples[0].sample
    prompt = prompt or Prompt(group.prompt_id, "", first.prompt_ids, first.label)
    siblings, key = args.n_samples_per_prompt, args.reward_key
    samples = []
    for scored in group.samples:
        reward = {key: scored.reward} if key else scored.reward
        sample = shown(prompt, scored.sample, siblings=siblings, reward=reward)
        if scored.is_masked:
            sample.loss_mask = list(scored.mask)
        samples.append(sample)
    return samples


class SlimeFilter:
    """A group filter of slime with rlpost's interface."""

    def __init__(self, function: Callable[..., object], args: Arguments) -> None:
        self._function, self._args = function, args
        self.prompts: dict[int, Prompt] = {}  # prompts of groups that are graded, not yet filtered
        self.keep_when_insufficient = False  # for the group of the last call

    def __call__(self, group: SampleGroup) -> bool:
        """Whether to train a group."""
        prompt = self.prompts.pop(group.prompt_id, None)
        output = self._function(self._args, scored_samples(group, self._args, prompt))
        self.keep_when_insufficient = bool(getattr(output, "keep_when_insufficient", False))
        return bool(getattr(output, "keep", output))


class SlimeBufferFilter:
    """A buffer filter of slime with rlpost's interface.

    The function receives lists of samples and may remove some from the buffer. Groups that it
    removes and does not return stay in the buffer: every fetched prompt is eventually trained or
    filtered.
    """

    def __init__(self, function: Callable[..., Any], args: Arguments) -> None:
        self._function, self._args = function, args

    def __call__(self, waiting: Sequence[Unfinished], num_groups: int) -> Sequence[Unfinished]:
        """Return at most ``num_groups`` groups to start. Raises ConfigError for other results."""
        by_id = {entry.prompt.prompt_id: entry for entry in waiting}
        chosen = self._function(
            self._args, None, [self._group(entry) for entry in waiting], num_groups
        )
        try:
            return [by_id[group[0].group_index] for group in chosen][:num_groups]
        except (AttributeError, IndexError, KeyError, TypeError):
            raise ConfigError(
                f"--buffer-filter-path: the function returned {repr(chosen)[:200]}; it must return a list of groups "
                "of its argument buffer"
            ) from None

    def _group(self, entry: Unfinished) -> list[Sample]:
        siblings = self._args.n_samples_per_prompt
        started = {answer.index: answer for answer in entry.samples}
        samples: list[Sample] = []
        for index in range(siblings):
            if index in started:
                samples.append(_resumed(entry.prompt, started[index], siblings))
            else:
                samples.append(begun(entry.prompt, index, siblings=siblings))
        return samples


def _resumed(prompt: Prompt, answer: Answer, siblings: int) -> Sample:
    made = shown(prompt, answer, siblings=siblings)
    made.metadata.setdefault(START, answer.oldest_version)
    return made


def check_reward_nonzero_std(
    args: object, samples: Sequence[Sample], **kwargs: object
) -> DynamicFilterOutput:
    """Whether the rewards of a group differ."""
    del kwargs
    rewards = [float(sample.get_reward_value(args)) for sample in samples]
    keep = statistics.pstdev(rewards) > SMALLEST_STD
    return DynamicFilterOutput(keep, None if keep else f"all rewards are {rewards[0]:g}")


def check_reward_nonzero_std_with_fallback(
    args: object, samples: Sequence[Sample], **kwargs: object
) -> DynamicFilterOutput:
    """Like ``check_reward_nonzero_std``, but prefer equal rewards to more prompts."""
    found = check_reward_nonzero_std(args, samples, **kwargs)
    return DynamicFilterOutput(found.keep, found.reason, keep_when_insufficient=True)


def pop_first(
    args: object, rollout_id: object, buffer: list[object], num_samples: int
) -> list[object]:
    """Take the oldest groups out of the buffer."""
    del args, rollout_id
    taken, buffer[:] = buffer[:num_samples], buffer[num_samples:]
    return taken


class SlimeGrader:
    """Keeps the prompts of graded groups for a filter, until the filter has run."""

    def __init__(self, grader: Grader, wanted: SlimeFilter) -> None:
        self._grader, self._prompts = grader, wanted.prompts

    async def grade(self, prompt: Prompt, samples: Sequence[Answer]) -> Rewards:
        """See ``rlpost.tasks.reward.grader.Grader``."""
        self._prompts[prompt.prompt_id] = prompt
        return await self._grader.grade(prompt, samples)

    def grades_singly(self, prompt: Prompt) -> bool:
        """Return False: the prompt comes from ``grade``."""
        return False

    def counters(self) -> Mapping[str, float]:
        """See ``Grader``."""
        return self._grader.counters()

    async def close(self) -> None:
        """See ``Grader``."""
        await self._grader.close()


class RewardPostProcess:
    """The function of --custom-reward-post-process-path on rlpost's groups.

    It is ``(args, samples, **kwargs) -> (raw_rewards, rewards)``, with a number for each sample, in
    place of the normalisation of a group: advantages are computed from ``rewards`` without another
    baseline; metrics report ``raw_rewards``. Samples have the tokens, texts, labels and rewards of
    slime's; prompts have no text or metadata, which scored groups do not hold. Changes that the
    function makes to a sample have no effect.
    Source: slime, ``slime/ray/rollout.py`` at 624b824, ``_post_process_rewards``.
    """

    def __init__(
        self, function: Callable[..., object], args: Arguments, *, path: str, key: str
    ) -> None:
        """``path`` and its setting ``key`` are for messages."""
        self._function, self._args, self._path, self._key = function, args, path, key

    def __call__(self, groups: Sequence[SampleGroup]) -> PostProcessed:
        """Call the function once, with all samples of a rollout.

        Raises:
            ConfigError: the function fails, or does not return two finite numbers for each sample.
        """
        samples = [made for group in groups for made in scored_samples(group, self._args)]
        returned = self._function(self._args, samples)
        raw, rewards = self._checked(returned, len(samples))
        return PostProcessed(_rewarded(groups, rewards), _rewarded(groups, raw))

    def _checked(self, returned: Any, count: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        try:
            raw, rewards = (tuple(map(float, values)) for values in returned)
        except (TypeError, ValueError, RuntimeError) as error:  # tensors raise RuntimeError
            raise ConfigError(
                f"{self._key} = {self._path}: got {returned!r:.200} ({error}); return two lists, the raw "
                "rewards and those to train on, with a number for each sample"
            ) from error
        are_finite = all(map(math.isfinite, (*raw, *rewards)))
        if not len(raw) == len(rewards) == count or not are_finite:
            raise ConfigError(
                f"{self._key} = {self._path}: got {len(raw)} raw rewards and {len(rewards)} rewards for "
                f"{count} samples, or one that is not finite; return a finite number for each"
            )
        return raw, rewards


def _rewarded(groups: Sequence[SampleGroup], rewards: Sequence[float]) -> tuple[SampleGroup, ...]:
    """Return groups with the rewards of all samples, in order."""
    changed = []
    for group, own in zip(groups, by_group(groups, rewards), strict=True):
        pairs = zip(group.samples, own, strict=True)
        samples = tuple(replace(scored, reward=reward) for scored, reward in pairs)
        changed.append(replace(group, samples=samples))
    return tuple(changed)
