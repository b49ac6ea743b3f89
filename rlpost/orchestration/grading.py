"""Gradings that a stop request ends. A reward model at the other end of a network may take minutes, and a run that has
to leave does not have them: the answers are kept as they are and graded after the resume.

In: a grader, the stop request. Out: the same grader, whose ``grade`` raises ``Halted``, as a request for tokens does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlpost.errors import Preempted
from rlpost.orchestration.preemption import StopRequest
from rlpost.reward.grader import Grader, Rewards
from rlpost.rollout.connection import Halted
from rlpost.types import Prompt, Sample


class StoppableGrader:
    """See the module."""

    def __init__(self, grader: Grader, stop: StopRequest) -> None:
        self._grader = grader
        self._stop = stop

    async def grade(self, prompt: Prompt, samples: Sequence[Sample]) -> Rewards:
        """See ``Grader``. Raises Halted when a stop is requested first."""
        try:
            return await self._stop.unless_requested(self._grader.grade(prompt, samples))
        except Preempted:
            raise Halted from None

    def counters(self) -> Mapping[str, float]:
        """See ``Grader``."""
        return self._grader.counters()

    async def close(self) -> None:
        """See ``Grader``."""
        await self._grader.close()
