"""Rows whose response is in the data: the interface of the tokenizer that makes them examples.

Input: a prompt of a row. Output: a group as if an engine had generated its answer. An extension has
the tokenizer (``Extension.examples``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from rlpost.config import extensions
from rlpost.config.tree import Config
from rlpost.tasks.tokenizer import PromptTokenizer
from rlpost.types import Prompt, SampleGroup


class ExampleTokenizer(PromptTokenizer, ABC):
    """Like ``PromptTokenizer``, for rows of which a response is trained."""

    @abstractmethod
    def whole(self, prompt: Prompt) -> Sequence[int]:
        """Return the ids of a prompt and its response in the data.

        Raises:
            DataError: there is no response, or it cannot be trained as it is.
        """

    @abstractmethod
    def group(self, prompt: Prompt) -> SampleGroup:
        """Return a group of one sample with the response of the data.

        Raises:
            DataError: see ``whole``.
            ConfigError: the prompt has images.
        """

    @abstractmethod
    def marked(self, prompt: Prompt, *, most: int) -> str:
        """Return prompt and response with what is trained in ⟦brackets⟧.

        Of each part at most ``most`` characters are shown.
        """


def tokenizer_class(config: Config) -> type[PromptTokenizer]:
    """Return the class of a run's tokenizer. Raises ConfigError as ``extensions.examples``."""
    if not config.grpo.is_supervised:
        return PromptTokenizer
    examples: type[ExampleTokenizer] = extensions.examples()
    return examples
