"""An example environment with a tool: a calculator adds the value after "=".

    --env rlpost.extensions.agents.examples.calculator:Calculator

Reward 1 for an answer that ends with the label of its prompt. The tool's digits are masked out of
the loss, so the model learns when to call it and when to stop.
"""

from __future__ import annotations

from rlpost.extensions.agents.environments.protocol import Step, Turn
from rlpost.rollout.examples.calculator import CALL, result
from rlpost.types import Prompt


class Calculator:
    """Keeps the conversation as one text, which the calculator reads from its end."""

    stop = (CALL,)
    deterministic = True  # the text is the prompt, the turns and what they compute

    def __init__(self) -> None:
        self._text, self._label = "", ""

    def reset(self, prompt: Prompt) -> None:
        """Begin with the text of the prompt."""
        self._text, self._label = prompt.text, (prompt.label or "").strip()

    def step(self, turn: Turn) -> Step:
        """Add the value of the expression before "="; the answer ends with any other turn."""
        self._text += turn.text
        if turn.stopped_at != CALL:
            return Step(done=True)
        value = result(self._text)
        self._text += CALL + value
        return Step(value, tool="calculator")

    def score(self) -> float:
        """Compare the end of the text with the label."""
        ending = self._text.rpartition(CALL)[2].strip()
        return float(bool(self._label) and ending == self._label)
