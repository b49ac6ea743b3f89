r"""The reward ``dapo``: 1 when the last ``Answer:`` line says the label, else -1.

Input: a response whose last line reads ``Answer: ...``, as the prompts of DAPO-Math-17k ask for, and a label which
is a whole number there. Output: 1 or -1. Spelling is evened out as in Minerva (arXiv 2206.14858, appendix D.1) and
only the end of a response is looked at: the verdicts of DAPO's own grader (arXiv 2503.14476; verl and slime have it
as ``math_dapo``). Its grader crashes on a label that is no whole number; here a fraction is compared by its value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

LOOKED_AT = 300  # letters at the end of a response
RIGHT, WRONG = 1.0, -1.0

_LATEX_FRACTION = re.compile(r"(-?)\\[dt]?frac\{(\d+)\}\{(\d+)\}", re.ASCII)
_FRACTION = re.compile(r"-?(?:\d+(?:/\d+)?|\d*\.\d+)", re.ASCII)

# In this order: what an earlier one leaves is what a later one sees.
REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
UNITS = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples"),
)
MARKS = (
    *("\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}"),
    *("\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots", "<|im_end|>", "<|endoftext|>"),
)


def dapo(response: str, label: str | None, metadata: Mapping[str, Any]) -> float:
    """1 when what follows the last ``Answer:`` is the label, else -1."""
    found = re.findall(r"(?i)Answer\s*:\s*([^\n]+)", response[-LOOKED_AT:])
    return same_number(found[-1] if found else None, label, metadata)


def same_number(answer: str | None, label: str | None, metadata: Mapping[str, Any] | None = None) -> float:
    """1 when an answer that was cut out already is the label, else -1."""
    if answer is None or label is None:
        return WRONG
    given, wanted = even_spelling(answer[-LOOKED_AT:]), _wanted(label)
    return RIGHT if given == wanted or _same_fraction(given, wanted) else WRONG


def _same_fraction(given: str, wanted: str) -> bool:
    """Whether a label that is a fraction or a decimal, as no label of DAPO's data is, has the value of the answer."""
    if wanted.isdecimal() or (value := _value(wanted)) is None:
        return False  # a whole number is compared by its digits, as there
    return _value(given) == value


def _value(text: str) -> Fraction | None:
    for mark in ("\\(", "\\)", "\\[", "\\]"):
        text = text.replace(mark, "")
    plain = _LATEX_FRACTION.sub(r"\1\2/\3", text.strip().rstrip("."))
    try:
        return Fraction(plain) if _FRACTION.fullmatch(plain) else None
    except ZeroDivisionError:
        return None


def even_spelling(answer: str) -> str:
    """An answer without units, articles, dollar signs and LaTeX around it."""
    answer = answer.split("=")[-1]
    for before, after in REPLACED:
        answer = answer.replace(before, after)
    for gone in (*UNITS, *MARKS):
        answer = answer.replace(gone, "")
    if within := re.search(r"\$[^$\n]*\$", answer):
        answer = within[0]  # mathematics within a sentence
    for command in ("text", "textbf", "overline"):
        answer = re.sub(rf"\\{command}\{{(.*?)\}}", r"\1", answer)
    answer = re.sub(r"\\boxed\{(.*)\}", r"\1", answer)
    answer = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", answer)
    answer = re.sub(r"sqrt([^{])", r"sqrt{\1}", answer)
    answer = answer.replace("$", "")
    digits = answer.replace(",", "")
    return (digits if digits.isdigit() else answer).strip()


def _wanted(label: str) -> str:
    label = even_spelling(label)
    try:
        return str(int(label))
    except ValueError:
        pass
    try:
        number = float(label)
    except ValueError:
        return label  # no number, as in other data sets
    return str(int(number)) if number.is_integer() else label
