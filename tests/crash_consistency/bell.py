"""A two-turn environment for simulated runs that adds one token, the bell, after the first turn."""

from __future__ import annotations

import asyncio
import json

from rlpost.columns import IntColumn
from rlpost.extensions.agents.environments.protocol import Step, Turn
from rlpost.types import Prompt
from tests.crash_consistency import fakes
from tests.crash_consistency.interception import ROOM

RING = "!"


class Bell:
    """The environment; the reward of a turn is a function of its tokens."""

    async def reset(self, prompt: Prompt) -> None:
        """Remember the prompt, for the oracle."""
        self._prompt = prompt

    async def step(self, turn: Turn) -> Step:
        """Ring after the first turn; end after the second."""
        await asyncio.sleep(fakes.GRADE_S)
        reward = fakes.reward(turn.token_ids)
        if turn.number == 0:
            return Step(RING, reward=reward, tool="bell")
        if not self._prompt.text.startswith("held"):
            ROOM.attempt.observed.graded.append(self._prompt.prompt_id)
        return Step(reward=reward, done=True)


class ReplayedBell(Bell):
    """A bell that is run again on the recorded turns after a crash."""

    deterministic = True


class RestoredBell(Bell):
    """A bell that continues from its saved state after a crash."""

    async def save(self) -> bytes:
        """Return the prompt, which is the whole state."""
        return json.dumps([self._prompt.prompt_id, self._prompt.text]).encode()

    async def restore(self, data: bytes) -> None:
        """Continue from a state."""
        prompt_id, text = json.loads(data)
        self._prompt = Prompt(prompt_id, text, IntColumn())
