r"""The reward ``gsm8k``: the number that a response ends in is the label's.

Input: a response, and a label that is a number or a worked solution with ``#### 42`` at its end, as in the data set
(arXiv 2110.14168). Output: 1 or 0. The number of a response stands after its last ``####``, else in its last
``\boxed{}``, else it is the last number there is; numbers are compared by value, without units and thousands marks.
A quotient is one number (``41/42`` is not 42), and digits whose commas mark no thousands (``2,1259``) are none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from rlpost.reward.answers import answer_after_thinking, last_boxed

MARK = "####"
LONGEST = 300  # digits and marks of one number

_GAP = re.compile(r"(\d)(?:\{,\}|\\,|,\\!|\\!)(?=\d)")
_DECIMAL = r"-?\$?(?:\d+(?:,\d+)*(?:\.\d+)?|\.\d+)"
_NUMBER = re.compile(rf"(?<![\w.])(?<!\d,){_DECIMAL}(?:\s*/\s*{_DECIMAL})*")
_FRACTION = re.compile(rf"\\[dt]?frac\s*\{{\s*({_DECIMAL})\s*\}}\s*\{{\s*({_DECIMAL})\s*\}}")
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?")
_DASH = re.compile("[\u2212\u2013]" + r"(?=\s*\$?\.?\d)")


def gsm8k(response: str, label: str | None, metadata: Mapping[str, Any]) -> float:
    """1 when response and label end in the same number, else 0."""
    text = answer_after_thinking(response)
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


def _same(given: Fraction | None, label: str | None) -> float:
    if given is None or label is None:
        return 0.0
    return float(given == (_first(label.rpartition(MARK)[2]) if MARK in label else _last(label)))


def _first(text: str) -> Fraction | None:
    return next(map(_value, _numbers(text)), None)


def _last(text: str) -> Fraction | None:
    return next(map(_value, reversed(_numbers(text))), None)


def _numbers(text: str) -> list[str]:
    """The numbers of a text in order, each with its commas; a quotient of numbers is one number."""
    text = _DASH.sub("-", _GAP.sub(r"\1", text.replace("\\$", "$")))
    text = _FRACTION.sub(r"\1/\2", text)
    found = _NUMBER.findall(re.sub(r"(?:(?<=^)|(?<=[\s(=$:]))- (?=\$?\d)", "-", text))
    return [word for word in found if len(word) <= LONGEST]


def _value(number: str) -> Fraction | None:
    """What a number is; None when it is none after all: ``2,1259``, ``1/0``, ``8/4/2``."""
    over, *under = (_decimal(part.strip()) for part in number.replace("$", "").split("/"))
    if not under or over is None:
        return over
    return over / under[0] if len(under) == 1 and under[0] else None


def _decimal(text: str) -> Fraction | None:
    if "," in text and not _THOUSANDS.fullmatch(text.removeprefix("-")):
        return None
    return Fraction(text.replace(",", ""))
