"""Extract the final answer from a response. Pure.

Input: a response. Output: the part that is graded, or None if there is none.
"""

from __future__ import annotations

BEGIN_OF_THOUGHT, END_OF_THOUGHT = "<think>", "</think>"
BOXES = ("\\boxed", "\\fbox")


def after_thinking(response: str) -> str:
    """Return the text after the last ``</think>``, or the whole response if there is no such tag.

    A truncated thought (opened and never closed) is no answer: the result is empty. If the prompt
    opens the thought, the response has no opening tag and counts as a whole.
    """
    text = response.rpartition(END_OF_THOUGHT)[2]
    return "" if BEGIN_OF_THOUGHT in text else text


def answer_after_thinking(response: str) -> str:
    r"""Like ``after_thinking``, but return the last ``\boxed{...}`` of a truncated thought.

    A box is an answer anywhere.
    """
    text = after_thinking(response)
    if text:
        return text
    boxed = last_boxed(response.rpartition(END_OF_THOUGHT)[2])
    return "" if boxed is None else f"\\boxed{{{boxed}}}"


def last_boxed(response: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}``, or else of the last ``\fbox{...}``.

    ``\boxed 5`` holds ``5``. None if there is no box or the last one never closes (a truncated
    answer).
    """
    for command in BOXES:
        start = response.rfind(command)
        if start >= 0:
            return _group(response[start + len(command) :])
    return None


def _group(text: str) -> str | None:
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
