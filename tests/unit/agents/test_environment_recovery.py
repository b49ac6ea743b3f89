"""What an environment says about its recovery is true: replayed or begun again."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from rlpost.extensions.agents.environments.protocol import Step, Turn
from rlpost.extensions.agents.environments.resumption import resumption_of
from rlpost.extensions.agents.examples.calculator import Calculator
from rlpost.extensions.agents.examples.guess import Guess
from rlpost.extensions.agents.examples.shell import Shell
from rlpost.types import Prompt


def turns(*texts: str, stopped_at: str | None = None) -> list[Turn]:
    return [Turn(number, text, (), "stop", stopped_at) for number, text in enumerate(texts)]


def played(environment: Any, prompt: Prompt, given: list[Turn]) -> list[object]:
    """Return everything that an episode shows the model or counts."""
    said: list[object] = [environment.reset(prompt)]
    for turn in given:
        step: Step = environment.step(turn)
        said.append(step)
        if step.done:
            break
    return said


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (Guess, turns("1", "9", "4", "6")),
        (Calculator, turns("12*3", "+4", "2", stopped_at="=")),
    ],
)
def test_a_deterministic_example_answers_recorded_turns_alike(
    make: Callable[[], Any], given: list[Turn]
) -> None:
    assert make().deterministic is True
    for number in range(20):
        prompt = Prompt(number, f"{number}+2", (1,), label="40")
        random.seed(number)
        first = played(make(), prompt, given)
        assert len(first) > 1
        random.seed(number + 1)
        assert played(make(), prompt, given) == first


def test_the_shell_example_saves_and_restores_instead() -> None:
    assert resumption_of(Shell()) == "restored"
