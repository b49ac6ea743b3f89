r"""The reward ``math``: what the library math-verify finds in a response equals the label.

Input: a response and a label in LaTeX or plain notation. Output: 1 or 0. A ``\boxed{}`` is preferred, then LaTeX,
then a plain number (github.com/huggingface/Math-Verify); sets, intervals, matrices, relations and percentages are
compared as such.

It runs sympy on what a model wrote: only in a process with a time limit (``rlpost.reward.pool``), which takes the
place of the library's own alarms.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlpost.reward.answers import answer_after_thinking, last_boxed

_MARKED = re.compile(r"\\boxed|\\\(|\\\[|\$")
_THIN_SPACE = re.compile(r"(?<=\d)(?:\\[,;: ]|~)(?=\d{3}(?!\d))")  # before thousands, where the library sees a product
_PERCENT = re.compile(r"\\?%")


def math(response: str, label: str | None, metadata: Mapping[str, Any]) -> float:
    """1 when response and label agree, else 0."""
    return _agree(answer_after_thinking(response), label)


def boxed_math(answer: str, label: str | None, metadata: Mapping[str, Any]) -> float:
    """1 when an answer that was cut out already agrees with the label, else 0."""
    return _agree(f"\\boxed{{{answer}}}", label) if answer else 0.0


def _agree(text: str, label: str | None) -> float:
    if not label or not label.strip():
        return 0.0
    text, label = _THIN_SPACE.sub("", text), _THIN_SPACE.sub("", label)
    pairs = [(label, text)]  # several boxes are the elements of one answer, or tries of which the last counts
    if text.count("\\boxed") > 1 and (boxed := last_boxed(text)):
        pairs.append((label, f"\\boxed{{{boxed}}}"))
    # The library takes 50% for 50 and for 0.5, but 12.5% for 0.125 alone.
    pairs += [(_PERCENT.sub(" ", gold), _PERCENT.sub(" ", given)) for gold, given in pairs if "%" in gold + given]
    return float(any(_equal(*pair) for pair in pairs))


def _equal(label: str, text: str) -> bool:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    targets = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    gold = parse(label if _MARKED.search(label) else f"\\boxed{{{label}}}", targets, parsing_timeout=None)
    given = parse(text, targets, parsing_timeout=None) if gold else None
    return bool(given) and verify(gold, given, timeout_seconds=None)
