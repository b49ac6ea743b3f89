r"""The reward ``dapo``: 1 if the last ``Answer:`` line equals the label, else -1.

Input: a response whose last line reads ``Answer: ...``, as the prompts of DAPO-Math-17k request,
and a label (an integer in that data set). Output: 1 or -1.

Both are normalized as in Minerva (arXiv 2206.14858, appendix D.1), and only the end of a response
is read. The results are those of DAPO's own grader (arXiv 2503.14476; ``math_dapo`` in verl and
slime), with these differences: bold type and a final dot do not matter, the colon may be
full-width, alternatives are wrong, a label with leading zeros equals itself, and a label that is
not an integer is no error; fractions are compared by value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

from rlpost.extensions.rewards.answer_form import bare, is_hedged

GRADED_CHARACTERS = 300  # at the end of a response
RIGHT, WRONG = 1.0, -1.0

_LATEX_FRACTION = re.compile(r"(-?)\\[dt]?frac\{(\d+)\}\{(\d+)\}", re.ASCII)
_DECIMAL = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)", re.ASCII)
_FRACTION = re.compile(r"-?(?:\d+(?:/\d+)?|\d*\.\d+)", re.ASCII)

# Applied in this order.
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
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots",
    "sue", "points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds",
    "meters", "meals", "edges", "students", "childrentickets", "multiples",
)  # fmt: skip
MARKS = (
    "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}",
    "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots",
    "<|im_end|>", "<|endoftext|>",
)  # fmt: skip


def dapo(response: str, label: str | None, metadata: Mapping[str, object]) -> float:
    """Return 1 if the text after the last ``Answer:`` is the label, else -1."""
    return same_number(_last_answer(response), label, metadata)


def graded_answer(response: str) -> str | None:
    """Return the normalized text after the last ``Answer:``; None without one."""
    answer = _last_answer(response)
    return None if answer is None else normalized(answer)


def _last_answer(response: str) -> str | None:
    answers: list[str] = re.findall(
        r"(?i)Answer\s*[:\uff1a]\s*([^\n]+)", response[-GRADED_CHARACTERS:]
    )
    return answers[-1] if answers else None


def same_number(
    answer: str | None, label: str | None, metadata: Mapping[str, object] | None = None
) -> float:
    """Return 1 if an extracted answer is the label, else -1."""
    if answer is None or label is None or is_hedged(answer, label):
        return WRONG
    given = normalized(bare(answer[-GRADED_CHARACTERS:].strip("* ")))
    spelling, expected = normalized(bare(label)), _expected(label)
    return RIGHT if given in (spelling, expected) or _same_fraction(given, expected) else WRONG


def _same_fraction(given: str, expected: str) -> bool:
    """Whether the label is a fraction or a decimal and the answer has its value.

    DAPO's data has integers only, which are compared by their digits, as in its grader.
    """
    if expected.isdecimal():
        return False
    value = _value(expected)
    return value is not None and _value(given) == value


def _value(text: str) -> Fraction | None:
    for mark in ("\\(", "\\)", "\\[", "\\]"):
        text = text.replace(mark, "")
    plain = _LATEX_FRACTION.sub(r"\1\2/\3", text.strip().rstrip("."))
    try:
        return Fraction(plain) if _FRACTION.fullmatch(plain) else None
    except ZeroDivisionError:
        return None


def normalized(answer: str) -> str:
    """Return an answer without units, articles, dollar signs and surrounding LaTeX."""
    answer = answer.split("=")[-1]
    for before, after in REPLACED:
        answer = answer.replace(before, after)
    for removed in (*UNITS, *MARKS):
        answer = answer.replace(removed, "")
    within = set(re.findall(r"\$[^$\n]*\$", answer))
    if len(within) == 1:
        answer = within.pop()  # inline math in a sentence; several are alternatives
    for command in ("text", "textbf", "overline"):
        answer = re.sub(rf"\\{command}\{{(.*?)\}}", r"\1", answer)
    answer = re.sub(r"\\boxed\{(.*)\}", r"\1", answer)
    answer = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", answer)
    answer = re.sub(r"sqrt([^{])", r"sqrt{\1}", answer)
    answer = answer.replace("$", "")
    digits = answer.replace(",", "")
    return (digits if digits.isdigit() else answer).strip()


def _expected(label: str) -> str:
    label = normalized(bare(label))
    if not _DECIMAL.fullmatch(label):
        return label  # not a number, as in other data sets
    number = Fraction(label)
    return str(number) if number.denominator == 1 else label
