"""Rewards that came with an answer: an episode or a generate function has set them.

Input: samples, some with a reward under ``REWARD`` in ``extra``. Output: these rewards as numbers,
and those of another grader for the other samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlpost.config.groups.rollout import RolloutConfig
from rlpost.tasks.reward.grader import Grader, Rewards
from rlpost.tasks.reward.reward_number import reward_number
from rlpost.types import Prompt, Sample

REWARD = "reward"
"""Key of ``Sample.extra`` with the reward of a sample."""


class GivenRewards:
    """A grader that asks another one only for samples without a reward."""

    def __init__(self, grader: Grader, rollout: RolloutConfig) -> None:
        """With --group-rm the function of the settings grades all samples of a prompt."""
        self._grader, self._takes_given = grader, not rollout.group_rm
        self._key, self._weights = rollout.reward_key, rollout.reward_weights

    async def grade(self, prompt: Prompt, samples: Sequence[Sample]) -> Rewards:
        """See ``Grader``.

        Raises:
            ConfigError: --reward-key or --reward-weights does not match a reward.
        """
        rewards: dict[int, float | None] = {}
        ungraded = []
        for position, sample in enumerate(samples):
            if self._takes_given and REWARD in sample.extra:
                rewards[position] = reward_number(sample.extra[REWARD], self._key, self._weights)
            else:
                ungraded.append(position)
        if ungraded:
            graded = await self._grader.grade(prompt, [samples[position] for position in ungraded])
            rewards.update(zip(ungraded, graded, strict=True))
        return [rewards[position] for position in range(len(samples))]

    def grades_singly(self, prompt: Prompt) -> bool:
        return self._grader.grades_singly(prompt)

    def counters(self) -> Mapping[str, float]:
        return self._grader.counters()

    async def close(self) -> None:
        await self._grader.close()
