"""Where the final answer stands in a response. Pure text work.

Input: a response. Output: the part of it that is graded, or None when it has none.
"""

from __future__ import annotations

BEGIN_OF_THOUGHT, END_OF_THOUGHT = "<think>", "</think>"
BOXES = ("\\boxed", "\\fbox")


def after_thinking(response: str) -> str:
    """What follows the last ``</think>``, all of it without one; nothing of a thought that is opened there and never
    closed: it was cut off. Where the prompt opens the thought the response shows no such opening, and all counts."""
    text = response.rpartition(END_OF_THOUGHT)[2]
    return "" if BEGIN_OF_THOUGHT in text else text


def answer_after_thinking(response: str) -> str:
    r"""The same, but of a thought that was cut off its last box, as ``\boxed{...}``: a box is an answer anywhere."""
    text = after_thinking(response)
    if text:
        return text
    boxed = last_boxed(response.rpartition(END_OF_THOUGHT)[2])
    return "" if boxed is None else f"\\boxed{{{boxed}}}"


def last_boxed(response: str) -> str | None:
    r"""The content of the last ``\boxed{...}``, braces within it balanced; of the last ``\fbox{...}`` without one.

    ``\boxed 5`` holds ``5``. None when there is no box or the last one never closes: an answer that was cut off.
    """
    for command in BOXES:
        start = response.rfind(command)
        if start >= 0:
            return _group(response[start + len(command) :])
    return None


def _group(text: str) -> str | None:
    """What stands in the braces at the start of ``text``, or its first word when there are none."""
    text = text.lstrip()
    if not text.startswith("{"):
        word = text.split("$")[0].split()
        return word[0] if word else None
    depth = 0
    for at, letter in enumerate(text):
        if letter == "{":
            depth += 1
        elif letter == "}":
            depth -= 1
            if depth == 0:
                return text[1:at]
    return None
