r"""The reward ``gsm8k``: the number that a response ends in is the label's.

Comes in: a response, and a label that is a number or a worked solution with ``#### 42`` at its end, as in the data set
(arXiv 2110.14168). Goes out: 1 or 0. The number of a response stands after its last ``####``, else in its last
``\boxed{}``, else it is the last number there is; numbers are compared by value, without units and thousands marks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from rlpost.reward.answers import after_thinking, last_boxed

MARK = "####"
LONGEST = 300  # digits and marks of one number

_GAP = re.compile(r"(\d)(?:\{,\}|\\,|,\\!|\\!)(?=\d)")
_NUMBER = re.compile(r"(?<![\w.])-?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|(?<![\w.])-?\$?\.\d+")
_DASH = re.compile("[\u2212\u2013]" + r"(?=\s*\$?\.?\d)")


def gsm8k(response: str, label: str | None, metadata: Mapping[str, Any]) -> float:
    """1 when response and label end in the same number, else 0."""
    text = after_thinking(response)
    if MARK in text:
        given = _first(text.rpartition(MARK)[2])
    elif (boxed := last_boxed(text)) is not None:
        given = _last(boxed)
    else:
        given = _last(text)
    return _same(given, label)


def number_in_box(answer: str, label: str | None, metadata: Mapping[str, Any]) -> float:
    """1 when an answer that was cut out already holds the label's number, else 0."""
    return _same(_last(answer), label)


def _same(given: Decimal | None, label: str | None) -> float:
    if given is None or label is None:
        return 0.0
    return float(given == (_first(label.rpartition(MARK)[2]) if MARK in label else _last(label)))


def _numbers(text: str) -> list[Decimal]:
    text = _DASH.sub("-", _GAP.sub(r"\1", text.replace("\\$", "$")))
    found = _NUMBER.findall(re.sub(r"(?:(?<=^)|(?<=[\s(=$:]))- (?=\$?\d)", "-", text))
    return [Decimal(re.sub(r"[,$]", "", word)) for word in found if len(word) <= LONGEST]


def _first(text: str) -> Decimal | None:
    return next(iter(_numbers(text)), None)


def _last(text: str) -> Decimal | None:
    return next(reversed(_numbers(text)), None)
