"""A request to the policy and its answer, whatever the format of the API."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from rlpost.columns import FloatColumn, IntColumn
from rlpost.extensions.agents.chat_messages import BadRequest, Message, Tool
from rlpost.extensions.agents.message_images import sent_images

AnswerEnd = Literal["stop", "length", "tool_calls"]
MAX_CHOICES, MAX_STOPS, MAX_STOP_CHARS = 64, 16, 1000
MESSAGE_CHARS = 40  # of JSON around a text
TOKEN_CHARS, LOGPROB_CHARS = 4, 100  # of JSON in an answer, a token


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request of a harness.

    Attributes:
        tools: in OpenAI's format; empty if the model must not see any.
        n: number of answers.
        max_tokens: of each answer; None for the run's limit.
        overridden: sampling parameters in the request that have no effect, because the policy
            samples with those of the run.
        dropped_tools: kinds of tools that the server would run; the model does not see them.
        namespaces: the namespace of each function that is in one.
        found_tools: those that outputs of a search hold. The policy read them there, so they are no
            part of ``tools``.
        allows_calls: the answer may have calls; found tools are known to later requests anyway.
        searches_tools: the function ``tool_search`` is a search that the client runs.
        custom_tools: names of functions whose calls the client gets as a text.
        has_instructions: the first message is not part of the conversation, but of this request.
        size: bytes of its body, or characters of its messages if it refers to earlier ones.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    with_logprobs: bool = False
    is_stream: bool = False
    with_usage: bool = False
    overridden: tuple[str, ...] = ()
    dropped_tools: tuple[str, ...] = ()
    namespaces: Mapping[str, str] = field(default_factory=dict)
    found_tools: tuple[Tool, ...] = ()
    allows_calls: bool = True
    searches_tools: bool = False
    custom_tools: frozenset[str] = frozenset()
    has_instructions: bool = False
    size: int = field(default=0, compare=False)

    def num_chars(self) -> int:
        """Return the characters of its messages, about as in a body that holds them all."""
        return sum(
            MESSAGE_CHARS
            + len(message.content)
            + len(message.reasoning)
            + sum(len(call.arguments) for call in message.tool_calls)
            for message in self.messages
        )

    @property
    def image_chars(self) -> int:
        """Characters of images in a request that was not decoded yet."""
        return sum(len(image.base64) for image in sent_images(self.messages))

    def written_texts(self) -> list[str]:
        """Return the texts that every chat template writes: all but reasoning, which it may drop.

        The tools are one text, as JSON.
        """
        texts = [json.dumps(self.tools, ensure_ascii=False)] if self.tools else []
        for message in self.messages:
            texts.append(message.content)
            for call in message.tool_calls:
                texts += [call.name, call.arguments]
        return texts


@dataclass(frozen=True, slots=True)
class Earlier:
    """An answer of the episode that a request refers to, and the request that it answered."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    has_instructions: bool
    answer: Message
    found_tools: tuple[Tool, ...] = ()
    namespaces: Mapping[str, str] = field(default_factory=dict)

    def conversation(self, *, with_instructions: bool) -> tuple[Message, ...]:
        """Return all messages up to the answer."""
        leave_out = self.has_instructions and not with_instructions
        return (*self.messages[int(leave_out) :], self.answer)


Recall = Callable[[str], Earlier | None]
"""Returns the answer of a completion, or with a call, of an id; None if there is none."""


def recall_nothing(name: str) -> None:
    """Refer to no answer; the default of the readers of requests."""


def recalled(name: object, prefix: str, recall: Recall, *, field: str, remedy: str) -> Earlier:
    """Return the answer whose id is ``PREFIX_ID``. Raises BadRequest."""
    head, _, rest = str(name).partition("_")
    earlier = recall(rest) if head == prefix else None
    if earlier is None:
        raise BadRequest(
            f"{field} {str(name)[:80]!r} is no answer of this episode; {remedy}", param=field
        )
    return earlier


@dataclass(frozen=True, slots=True)
class ChatChoice:
    """One answer. ``stop`` is the stop string that ended it."""

    message: Message
    ended_by: AnswerEnd
    stop: str | None
    token_ids: IntColumn
    logprobs: FloatColumn


@dataclass(frozen=True, slots=True)
class Completion:
    """The answers to a request.

    ``number`` counts the requests of the episode. ``id`` is ``EPISODE_NUMBER``: unique in the run
    among training episodes, the same in each attempt.
    """

    id: str
    number: int
    choices: tuple[ChatChoice, ...]
    num_prompt_tokens: int

    @property
    def num_tokens(self) -> int:
        """Sampled tokens."""
        return sum(len(choice.token_ids) for choice in self.choices)

    def size(self, *, with_logprobs: bool) -> int:
        """Return about how many bytes its JSON has."""
        return self.num_tokens * (LOGPROB_CHARS if with_logprobs else TOKEN_CHARS)


NO_ANSWER = ChatChoice(Message("assistant", ""), "stop", None, IntColumn(()), FloatColumn(()))
"""Of a completion that is being generated."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The content of a response, whatever the format of the API.

    Attributes:
        created: Unix time in seconds.
        token_bytes: returns the bytes of one token id, for log-probs.
    """

    request: ChatRequest
    completion: Completion
    model: str
    created: int
    token_bytes: Callable[[int], bytes]
