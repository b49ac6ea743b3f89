"""What all episodes share: template and formats of the model, limits."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

from rlpost.extensions.agents.answer_parsing import MARKS, PROBE_ANSWER, PROBE_TOOLS, format_of
from rlpost.extensions.agents.chat_messages import BadRequest
from rlpost.extensions.agents.chat_template import ChatTemplate
from rlpost.extensions.agents.requests import ChatRequest

logger = logging.getLogger(__name__)

SMALLEST_BOUND = 4 << 20
"""Bytes of a body that are read whatever the context is."""
BYTES_PER_TOKEN = 16
"""Bound on a body, in bytes a token of the context: escaped Chinese has 6 to 12."""


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of the harness of one episode; None means no limit.

    Attributes:
        max_tokens: sampled tokens over all requests. A turn is truncated there, and later requests
            are refused. Parallel requests are not counted before they end.
        max_requests: answers of engines; ``n`` answers count as ``n``.
        max_parallel: answers that are generated at once; further ones wait.
    """

    max_tokens: int | None = None
    max_requests: int | None = None
    max_parallel: int = 16


class Policy:
    """Template, formats and limits of the model, shared by all episodes."""

    def __init__(self, template: ChatTemplate, *, longest_request: int | None = None) -> None:
        """``longest_request``: tokens of a request with its answer that the engines serve in full."""
        self.template, self.longest_request = template, longest_request
        self.format = format_of(template.written_for(PROBE_ANSWER, PROBE_TOOLS))
        logger.info("format of tool calls in the chat template: %s", self.format)
        if not template.takes_systems:
            logger.info(
                "the chat template takes one system message: the first ones are joined, later ones "
                "are written as the user's"
            )
        self._logged: set[str] = set()
        # Engines omit special tokens from their texts, so such marks are read from the ids.
        self.marks_are_special = any(template.is_special(mark) for mark in MARKS)

    def longest(self, max_context_len: int | None) -> int | None:
        """Return the bound on a request with its answer, in tokens.

        An input below it is accepted by the engines, also one that an abort has left incomplete.
        """
        bounds = [each for each in (max_context_len, self.longest_request) if each is not None]
        return min(bounds, default=None)

    def log_once(self, text: str) -> None:
        """Log a message of harnesses, unless one that differs only in numbers was logged."""
        kind = re.sub(r"\d+", "0", text)
        if kind not in self._logged:
            self._logged.add(kind)
            logger.info("%s (logged once)", text)

    def check_tools(self, request: ChatRequest) -> None:
        """Raise BadRequest for tools of a model whose format of calls is not known."""
        if request.tools and self.format == "none":
            raise BadRequest(
                "the chat template of this model writes tool calls in no format that the gateway "
                "reads (Qwen's JSON and XML, GLM's); describe the tools in a message instead",
                code="tools_not_supported",
                param="tools",
            )


def largest_body(longest: int) -> int:
    """Return the bound on a body in bytes, for a context of ``longest`` tokens."""
    return max(SMALLEST_BOUND, BYTES_PER_TOKEN * longest)
