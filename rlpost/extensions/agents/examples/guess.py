"""An example environment of several turns: guess a digit, and be told "higher" or "lower".

    --env rlpost.extensions.agents.examples.guess:Guess --env-reward turn

The secret depends only on the prompt, so all answers of a group have to guess the same digit, also
after a resume.
"""

from __future__ import annotations

import hashlib
import re

from rlpost.extensions.agents.environments.protocol import Step, Turn
from rlpost.types import Prompt

HIGHER, LOWER = "+", "-"  # one token each for the tiny model


class Guess:
    """Guess a digit: reward 1, less ``price`` for each wrong guess; 0 if it is not found."""

    deterministic = True  # the secret is a hash of the prompt

    def __init__(self, turns: int = 4, price: float = 0.1, ask: str = "=") -> None:
        """``ask`` follows each hint, to ask for the next guess."""
        self._turns, self._price, self._ask = turns, price, ask
        self._secret = 0

    def reset(self, prompt: Prompt) -> str:
        """Draw the secret."""
        digest = hashlib.sha256(f"{prompt.prompt_id}:{prompt.text}".encode()).digest()
        self._secret = digest[0] % 10
        return self._ask

    def step(self, turn: Turn) -> Step:
        """Compare a guess; anything but a single digit ends the episode."""
        found = re.fullmatch(r"\s*([0-9])\s*", turn.answer)
        if found is None:
            return Step(done=True)
        guess = int(found[1])
        if guess == self._secret:
            return Step(reward=1.0 - self._price * turn.number, done=True, tool="compare")
        hint = HIGHER if guess < self._secret else LOWER
        return Step(hint + self._ask, done=turn.number + 1 == self._turns, tool="compare")
