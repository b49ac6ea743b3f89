r"""The reward ``math``: grade a response with the library math-verify.

Input: a response and a label in LaTeX or plain notation. Output: 1 or 0. The library prefers a
``\boxed{}``, then LaTeX, then a plain number (github.com/huggingface/Math-Verify). It compares
sets, intervals, matrices, relations and percentages as such.

Call it only in a process with a time limit (``rlpost.reward.pool``), because sympy runs on the
model's output. That limit replaces the library's own alarms.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rlpost.reward.answer_extraction import answer_after_thinking, last_boxed

_MARKED = re.compile(r"\\boxed|\\\(|\\\[|\$")
# thousands separator; the library reads a product
_THIN_SPACE = re.compile(r"(?<=\d)(?:\\[,;: ]|~)(?=\d{3}(?!\d))")
_PERCENT = re.compile(r"\\?%")


def math(response: str, label: str | None, metadata: Mapping[str, object]) -> float:
    """Return 1 if response and label agree, else 0."""
    return _agree(answer_after_thinking(response), label)


def boxed_math(answer: str, label: str | None, metadata: Mapping[str, object]) -> float:
    """Return 1 if an extracted answer agrees with the label, else 0."""
    return _agree(f"\\boxed{{{answer}}}", label) if answer else 0.0


def _agree(text: str, label: str | None) -> float:
    if not label or not label.strip():
        return 0.0
    text, label = _THIN_SPACE.sub("", text), _THIN_SPACE.sub("", label)
    # several boxes are elements of one answer, or attempts of which the last counts
    pairs = [(label, text)]
    if text.count("\\boxed") > 1 and (boxed := last_boxed(text)):
        pairs.append((label, f"\\boxed{{{boxed}}}"))
    # The library accepts 50% as 50 and as 0.5, but 12.5% only as 0.125.
    pairs += [
        (_PERCENT.sub(" ", gold), _PERCENT.sub(" ", given))
        for gold, given in pairs
        if "%" in gold + given
    ]
    return float(any(_equal(*pair) for pair in pairs))


def _equal(label: str, text: str) -> bool:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    targets = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    gold = parse(
        label if _MARKED.search(label) else f"\\boxed{{{label}}}", targets, parsing_timeout=None
    )
    given = parse(text, targets, parsing_timeout=None) if gold else None
    return bool(given) and verify(gold, given, timeout_seconds=None)
