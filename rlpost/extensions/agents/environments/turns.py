"""A turn of the model in an episode, and the answer of a plain environment to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlpost.columns import IntColumn
from rlpost.tasks.reward.answer_extraction import behind_thought
from rlpost.types import FinishReason

Content = str | Sequence[str | bytes]
"""What an environment adds for the model: a text, or texts and files of images in order."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What the model wrote.

    ``number`` counts the turns of the episode from 0. ``stopped_at`` is the token id or string that
    ended the turn; ``text`` is without that string, ``token_ids`` hold all sampled tokens.
    """

    number: int
    text: str
    token_ids: IntColumn
    finish_reason: FinishReason
    stopped_at: int | str | None

    @property
    def answer(self) -> str:
        """The text behind the thought: empty in a thought that never closes."""
        return behind_thought(self.text)


@dataclass(frozen=True, slots=True)
class Step:
    """The answer of an environment to a turn.

    Attributes:
        text: added after the turn, masked out of the loss; special tokens of a chat template are
            not recognised. A sequence may also have the bytes of image files, each at its place.
        reward: of this turn.
        done: the episode is over.
        tool: the name of what was called, for the record of the episode.
    """

    text: Content = ""
    reward: float = 0.0
    done: bool = False
    tool: str | None = None
