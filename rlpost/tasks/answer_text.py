"""The text of an answer as rewards see it, from its token ids. Pure.

Input: the ids of an answer, and the ids of the tokens that mark its parts. Output: text without
special tokens, in which ``<think>`` and ``</think>`` enclose what is not the answer, whichever
tokens the model marks it with. Marks are found by id, so text that only looks like one is text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

BEGIN_OF_THOUGHT, END_OF_THOUGHT = "<think>", "</think>"
ANALYSIS, FINAL = "analysis", "final"
"""Channels of Harmony: the thought, and the answer (github.com/openai/harmony)."""

Decode = Callable[[Sequence[int]], str]
"""Text of ids without special tokens."""


@dataclass(frozen=True, slots=True)
class Channels:
    """The tokens of Harmony, the format of gpt-oss.

    An answer is a series of messages ``<|channel|>NAME<|message|>TEXT<|end|><|start|>ROLE``.
    """

    start: int
    channel: int
    message: int
    ends: frozenset[int]
    """``<|end|>``, ``<|return|>`` after the last message, ``<|call|>`` after a tool call."""

    @classmethod
    def of(cls, ids: Mapping[str, int]) -> Channels | None:
        """Return the tokens of a vocabulary; None if it lacks some."""
        names = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]
        if not all(name in ids for name in names):
            return None
        start, channel, message, *ends = (ids[name] for name in names)
        return cls(start, channel, message, frozenset(ends))

    def text(self, token_ids: Sequence[int], decode: Decode) -> str:
        """Return the text of an answer whose prompt ends after ``<|start|>assistant``."""
        text, header, part = "", "", list[int]()
        is_header = False  # the part is a role or the name of a channel
        for token in (*token_ids, None):
            if token is not None and token not in (
                self.start,
                self.channel,
                self.message,
                *self.ends,
            ):
                part.append(token)
                continue
            if is_header:
                header = decode(part) if token == self.message else ""
            elif part:
                if header == FINAL and END_OF_THOUGHT not in text:
                    text += BEGIN_OF_THOUGHT + END_OF_THOUGHT  # graders look for the mark
                text += _message(header, decode(part), is_whole=token is not None)
                header = ""
            is_header = token in (self.start, self.channel)
            part = []
        return text


def _message(header: str, body: str, *, is_whole: bool) -> str:
    """Return the text of a message; a truncated thought stays open."""
    name = header.partition(" ")[0]
    if name == ANALYSIS:
        return f"{BEGIN_OF_THOUGHT}{body}{END_OF_THOUGHT if is_whole else ''}"
    return body if name in ("", FINAL) else f"{header}{body}"


@dataclass(frozen=True, slots=True)
class ThoughtTokens:
    """``<think>`` and ``</think>`` of a vocabulary where they are special tokens."""

    begin: int | None
    end: int | None

    def text(self, token_ids: Sequence[int], decode: Decode) -> str:
        """Return the text of an answer with the marks of its thought."""
        marks = {self.begin: BEGIN_OF_THOUGHT, self.end: END_OF_THOUGHT}
        text, part = "", list[int]()
        for token in token_ids:
            if token in marks:
                text += decode(part) + marks[token]
                part = []
            else:
                part.append(token)
        return text + decode(part)
