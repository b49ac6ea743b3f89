r"""The reward ``gsm8k``: the last number of a response equals the number of the label.

Input: a response, and a label that is a number or a worked solution that ends in ``#### 42``, as in
the data set (arXiv 2110.14168). Output: 1 or 0.

The number of a response follows its last ``####``, else is in its last ``\boxed{}``, else is its
last number. Alternatives (``3 or 4``, two numbers in a box) are no answer. Numbers are compared by
value, without units and thousands separators. What is written as one number is one: a quotient
(``41/42`` is not 42), a mixed number, a power, a number with an exponent (``1e5`` is not 1).
Digits with commas or dots at other places (``2,1259``, ``1.234.567``) are not a number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

from rlpost.extensions.rewards.answer_form import (
    answer_after_thinking,
    ends_in_alternatives,
    has_box,
    is_hedged,
    with_word_boundaries,
)
from rlpost.tasks.reward.answer_extraction import last_boxed

MARK = "####"
MAX_NUMBER_LENGTH = 300  # characters

# separators of digit groups: in LaTeX {,}  \,  ,\!  \!  and narrow spaces and apostrophes
_GAP = re.compile(
    r"(\d)(?:(?:\{,\}|\\,|,\\!|\\!)(?=\d)|[\u00a0\u2009\u202f'\u2019](?=\d{3}(?!\d)))"
)
_DECIMAL = r"-?\$?(?:\d+(?:,\d+)*(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{1,3})?(?!\.?\d)"
_NUMBER = re.compile(rf"(?<![\w.])(?<!\d,){_DECIMAL}(?:\s*/\s*{_DECIMAL})*")
# 2 \times 10^{3}, 10^3
_TEN = re.compile(
    r"(?<![\w.,])(?:(\d+(?:\.\d+)?)\s*(?:\\times|\\cdot|[x*\u00d7\u00b7])\s*)?10\s*\^\s*"
    r"(?:\{\s*(-?\d{1,3})\s*\}|(-?\d{1,3}))(?![.,]?\d)"
)
_POWER = re.compile(
    r"(?<![\w.,])(\d{1,3})\s*\^\s*(?:\{\s*(\d{1,2})\s*\}|(\d{1,2}))(?![.,]?\d)", re.ASCII
)
_MIXED = re.compile(
    r"(?<![\w.,/])(\d{1,9})(?:\s+(\d{1,9})/(\d{1,9})|\s*\\[dt]?frac\{(\d{1,9})\}\{(\d{1,9})\})(?![\d.,/])",
    re.ASCII,
)
_FRACTION = re.compile(rf"\\[dt]?frac\s*\{{\s*({_DECIMAL})\s*\}}\s*\{{\s*({_DECIMAL})\s*\}}")
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?")
# of a unit: m^2, \text{ cm}^{2}
_EXPONENT = re.compile(
    r"([A-Za-z]|\\(?:text|mathrm)\s*\{[^{}\d]*\})\s*\^\s*(?:\{\s*-?\d+\s*\}|-?\d+)"
)
# a minus sign or en dash before a number
_DASH = re.compile("[\u2212\u2013]" + r"(?=\s*\$?\.?\d)")


def gsm8k(response: str, label: str | None, metadata: Mapping[str, object]) -> float:
    """Return 1 if response and label end in the same number, else 0."""
    text = with_word_boundaries(answer_after_thinking(response))
    if MARK in text:
        marked = text.rpartition(MARK)[2].strip().partition("\n")[0]
        given = None if ends_in_alternatives(marked) else _first(marked)
    elif has_box(text):
        given = _only(last_boxed(text) or "")
    else:
        given = None if ends_in_alternatives(text) else _last(text)
    return _same(given, label)


def number_in_box(answer: str, label: str | None, metadata: Mapping[str, object]) -> float:
    """Return 1 if the only number of an extracted answer is the label's, else 0."""
    return _same(_only(with_word_boundaries(answer)), label)


def _same(given: Fraction | None, label: str | None) -> float:
    if given is None or label is None:
        return 0.0
    label = with_word_boundaries(label)
    expected = _first(label.rpartition(MARK)[2]) if MARK in label else _last(label)
    return float(given == expected)


def _only(answer: str) -> Fraction | None:
    """Return the number of an answer, after its last equals sign; None if there are several."""
    if is_hedged(answer, label=""):
        return None
    values = set(map(_value, _numbers(answer.rpartition("=")[2])))
    return values.pop() if len(values) == 1 else None


def _first(text: str) -> Fraction | None:
    return next(map(_value, _numbers(text)), None)


def _last(text: str) -> Fraction | None:
    return next(map(_value, reversed(_numbers(text))), None)


def _numbers(text: str) -> list[str]:
    """Return the numbers of a text in order, with commas; a quotient of numbers is one number."""
    text = _DASH.sub("-", _GAP.sub(r"\1", text.replace("\\$", "$")))
    text = _EXPONENT.sub(r"\1", text)
    text = _POWER.sub(_power, _TEN.sub(_power_of_ten, text))
    text = _FRACTION.sub(r"\1/\2", _MIXED.sub(_improper, text))
    found = _NUMBER.findall(re.sub(r"(?:(?<=^)|(?<=[\s(=$:]))- (?=\$?\d)", "-", text))
    return [number for number in found if len(number) <= MAX_NUMBER_LENGTH]


def _power_of_ten(found: re.Match[str]) -> str:
    return f"{found[1] or 1}e{found[2] or found[3]}"


def _power(found: re.Match[str]) -> str:
    return str(int(found[1]) ** int(found[2] or found[3]))


def _improper(found: re.Match[str]) -> str:
    """Return a mixed number as one fraction: ``2 1/2`` is 5/2. Others are a product, or two numbers."""
    whole, numerator, denominator = (
        int(found[1]),
        int(found[2] or found[4]),
        int(found[3] or found[5]),
    )
    is_mixed = numerator < denominator
    return f"{whole * denominator + numerator}/{denominator}" if is_mixed else found[0]


def _value(number: str) -> Fraction | None:
    """Return the value of a number, or None if it has none: ``2,1259``, ``1/0``, ``8/4/2``."""
    numerator, *denominators = (
        _decimal(part.strip()) for part in number.replace("$", "").split("/")
    )
    if not denominators or numerator is None:
        return numerator
    if len(denominators) > 1 or not denominators[0]:
        return None
    return numerator / denominators[0]


def _decimal(text: str) -> Fraction | None:
    if "," in text and not _THOUSANDS.fullmatch(text.removeprefix("-")):
        return None
    return Fraction(text.replace(",", ""))
