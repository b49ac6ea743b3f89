"""Sources of answers that are not one response of an engine, such as episodes of environments.

Input: the settings and what a run has. Output: generate functions and their counts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlpost.config import extensions
from rlpost.config.tree import Config
from rlpost.engines.group_client import EngineClients
from rlpost.rollout.response_builder import GenerateFunction


@dataclass(frozen=True, slots=True)
class AnswerParts:
    """What a source of answers gets of a run.

    Attributes:
        run_folder: where services of the run register.
        engines: the clients of the groups of engines; their owner closes them.
        record: the file for records of episodes; None for none.
        check: called before each recording; raises Fenced when another attempt owns the run.
    """

    run_folder: Path
    engines: EngineClients
    record: Path | None
    check: Callable[[], None]


class AnswerSource(AbstractAsyncContextManager[object], Protocol):
    """Writes the answers of a run. It is entered once the engines answer."""

    def function(self, evaluation: str | None = None) -> GenerateFunction:
        """Return the function of training, or of the evaluation set of that name."""

    def counters(self) -> dict[str, float]:
        """Return counts of training since the last call, by metric name."""

    async def close(self) -> None:
        """Close files, after the source was left or without that."""


def answer_source(config: Config, parts: AnswerParts) -> AnswerSource | None:
    """Return the source of answers of an extension; None if engines' responses are the answers.

    Raises:
        ConfigError: the settings name a source that cannot be made.
    """
    for each in extensions.extensions():
        if each.answers is not None:
            source: AnswerSource | None = extensions.load(each.answers)(config, parts)
            if source is not None:
                return source
    return None
