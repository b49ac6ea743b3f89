"""The adapter for data sets of reasoning-gym, which generate tasks and score answers.

    --env reasoning_gym:leg_counting

An episode is one answer. ``rlpost.extensions.agents.environments.export`` writes the tasks as prompts; a
prompt whose text is not the task that the data set now generates is refused, since it would be
scored by another task's answer. The answer is the text between the last <answer> and </answer> behind
the thought; without them the score is that of no answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rlpost.errors import ConfigError, DataError
from rlpost.extensions.agents.environments.protocol import Step, Turn
from rlpost.types import Prompt

INSTALL = "pip install 'rlpost[reasoning-gym]'"


@dataclass(frozen=True)
class ReasoningTask:
    """A task as an entry of a prompt file."""

    prompt_text: str


class ReasoningGym:
    """One answer to a task of a data set."""

    deterministic = True

    def __init__(
        self,
        target: str,
        *,
        size: int = 1000,
        seed: int = 42,
        config: Mapping[str, Any] | None = None,
        tag: str | None = "answer",
    ) -> None:
        """
        Args:
            size, seed, config: number of tasks, seed and parameters of the data set.
            tag: marks the answer; None: all behind the thought is the answer.

        Raises ConfigError.
        """
        self._target, self._tag = target, tag
        self._dataset = _dataset(target, size, seed, json.dumps(config or {}))
        self._entry: Mapping[str, Any] = {}

    @property
    def tasks(self) -> list[ReasoningTask]:
        """All tasks, as prompts."""
        suffix = f"\n\nWrite the final answer between <{self._tag}> and </{self._tag}>."
        return [
            ReasoningTask(entry["question"].strip() + (suffix if self._tag else ""))
            for entry in map(self._dataset.__getitem__, range(len(self._dataset)))
        ]

    def reset(self, prompt: Prompt) -> None:
        """Generate the task of a prompt. Raises DataError for a prompt of another task."""
        number = prompt.metadata.get("task", prompt.prompt_id % len(self._dataset))
        if not isinstance(number, int) or not 0 <= number < len(self._dataset):
            raise DataError(
                f"prompt {prompt.prompt_id}: 'task' in its metadata is {number!r}; "
                f"reasoning_gym:{self._target} has the tasks 0 to {len(self._dataset) - 1}"
            )
        self._entry = self._dataset[number]
        if self._entry["question"].strip() not in prompt.text:
            raise DataError(
                f"prompt {prompt.prompt_id}: its text is not task {number} of "
                f"reasoning_gym:{self._target} with these --env-args; export the prompts again with "
                "the same arguments (python -m rlpost.extensions.agents.environments.export)"
            )

    def step(self, turn: Turn) -> Step:
        """Score the answer."""
        from reasoning_gym.utils import extract_answer

        text = turn.answer.strip()
        answer = text if self._tag is None else extract_answer(text, tag_name=self._tag)
        return Step(reward=float(self._dataset.score_answer(answer, self._entry)), done=True)


@lru_cache(maxsize=16)
def _dataset(target: str, size: int, seed: int, config: str) -> Any:
    """Return a data set, shared by all episodes: it is not changed."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError(f"--env reasoning_gym:{target}: {error}; {INSTALL}") from error
    try:
        return reasoning_gym.create_dataset(target, size=size, seed=seed, **json.loads(config))
    except Exception as error:  # a package's code
        raise ConfigError(
            f"--env reasoning_gym:{target}: {type(error).__name__}: {error}"
        ) from error
