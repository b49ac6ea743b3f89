r"""The reward ``math``: what the library math-verify finds in a response equals the label.

Comes in: a response and a label in LaTeX or plain notation. Goes out: 1 or 0. A ``\boxed{}`` is preferred, then LaTeX,
then a plain number (github.com/huggingface/Math-Verify); sets, intervals, matrices, relations and percentages are
compared as such.

It runs sympy on what a model wrote: only in a process with a time limit (``rlpost.reward.pool``), which takes the
place of the library's own alarms.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlpost.reward.answers import after_thinking, last_boxed

_MARKED = re.compile(r"\\boxed|\\\(|\\\[|\$")


def math(response: str, label: str | None, metadata: Mapping[str, Any]) -> float:
    """1 when response and label agree, else 0."""
    return _agree(after_thinking(response), label)


def boxed_math(answer: str, label: str | None, metadata: Mapping[str, Any]) -> float:
    """1 when an answer that was cut out already agrees with the label, else 0."""
    return _agree(f"\\boxed{{{answer}}}", label) if answer else 0.0


def _agree(text: str, label: str | None) -> float:
    if not label or not label.strip():
        return 0.0
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    targets = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    gold = parse(label if _MARKED.search(label) else f"\\boxed{{{label}}}", targets, parsing_timeout=None)
    readings = [text]  # several boxes are the elements of one answer, or tries of which the last counts
    if text.count("\\boxed") > 1 and (boxed := last_boxed(text)):
        readings.append(f"\\boxed{{{boxed}}}")
    for reading in readings if gold else ():
        given = parse(reading, targets, parsing_timeout=None)
        if given and verify(gold, given, timeout_seconds=None):
            return 1.0
    return 0.0
