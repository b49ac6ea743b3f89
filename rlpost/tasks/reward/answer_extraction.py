"""Extract the final answer from a response. Pure.

Input: a response. Output: the part that is graded, or None if there is none.
"""

from __future__ import annotations

import re

from rlpost.tasks.answer_text import BEGIN_OF_THOUGHT, END_OF_THOUGHT

BOXES = ("\\boxed", "\\fbox")
_BETWEEN_ALTERNATIVES = re.compile(
    r"(?:[\s,.;/&$()*\\\[\]]|\b(?:or|and|either|maybe|perhaps|possibly|alternatively|also|text)\b|[{}])*",
    re.IGNORECASE,
)


def after_thinking(response: str) -> str:
    """Return the text after the last ``</think>``, or the whole response if there is no such tag.

    A truncated thought (opened and never closed) is no answer: the result is empty. If the prompt
    opens the thought, the response has no opening tag and counts as a whole.
    """
    text = response.rpartition(END_OF_THOUGHT)[2]
    return "" if BEGIN_OF_THOUGHT in text else text


def behind_thought(text: str) -> str:
    """Return the text after the last ``</think>``; empty if that begins with another thought.

    Unlike ``after_thinking``, which is strict because a policy is trained on the result, it keeps a
    text that mentions ``<think>`` after other words.
    """
    text = text.rpartition(END_OF_THOUGHT)[2]
    return "" if text.lstrip().startswith(BEGIN_OF_THOUGHT) else text


def last_boxed(response: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}``, or else of the last ``\fbox{...}``.

    ``\boxed 5`` holds ``5``. None if there is no box, if the last one never closes (a truncated
    answer), or if it is one of several alternatives: ``\boxed{3} or \boxed{4}``.
    """
    for command in BOXES:
        start = response.rfind(command)
        if start < 0:
            continue
        content = braced(response[start + len(command) :])
        return None if content is None or _is_alternative(response[:start], content) else content
    return None


def _is_alternative(before: str, content: str) -> bool:
    """Whether only punctuation or ``or`` and the like separate a box from another before it."""
    start = before.rfind(BOXES[0])
    if start < 0:
        return False
    previous = before[start + len(BOXES[0]) :].lstrip()
    other = braced(previous)
    if other is None or other.strip() == content.strip():
        return False
    between = previous.partition(other)[2].removeprefix("}")
    return _BETWEEN_ALTERNATIVES.fullmatch(between) is not None


def braced(text: str) -> str | None:
    """Return the content of the braces that ``text`` begins with; without them, its first word."""
    text = text.lstrip()
    if not text.startswith("{"):
        word = text.split("$")[0].split()
        return word[0] if word else None
    depth = 0
    for position, character in enumerate(text):
        if character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return text[1:position]
    return None
