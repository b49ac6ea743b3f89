r"""The reward ``math``: grade a response with the library math-verify.

Input: a response and a label in LaTeX or plain notation. Output: 1 or 0. The library prefers a
``\boxed{}``, then LaTeX, then a plain number (github.com/huggingface/Math-Verify). It compares
sets, intervals, matrices, relations and percentages as such.

Call it only in a process with a time limit (``rlpost.tasks.reward.pool``), because sympy runs on the
model's output. That limit replaces the library's own alarms.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy import Expr, Float

from rlpost.extensions.rewards.answer_form import (
    UNSPACED,
    answer_after_thinking,
    bare,
    contradicts,
    ends_in_alternatives,
    has_box,
    is_hedged,
    is_single,
    unit_as_text,
    with_word_boundaries,
)
from rlpost.tasks.reward.answer_extraction import braced, last_boxed

_MARKED = re.compile(r"\\boxed|\\\(|\\\[|\$")
# thousands separator; the library reads a product
_THIN_SPACE = re.compile(r"(?<=\d)(?:,?\\!\s*|\\[,;: ]|~)(?=\d{3}(?!\d))")
_PERCENT = re.compile(r"\\?%")
_BOX_SPACE = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
_END_IN_BOLD = re.compile(r"\*\*([^*\n]+)\*\*[\s.]*$")
_MIXED = re.compile(r"(?<![\d./])(\d+) +(\d+)/(\d+)(?![\d./])")
_SEVERAL = re.compile(rf"\d\s*[{UNSPACED}][^\d]*\d")
"""``3小时30分``, of which the library would read the last number."""
_REPEATING = re.compile(r"(?<![\d.])(\d*)\.(\d*)\\overline\{(\d+)\}", re.ASCII)

SMALL = 1e-5
"""Below it, the library's rounding to 6 decimals hides a difference."""
SAME_SMALL = 1e-3  # relative difference of rounded small numbers
DIGITS = 40


def math(response: str, label: str | None, metadata: Mapping[str, object]) -> float:
    """Return 1 if response and label agree, else 0."""
    return _agree(answer_after_thinking(response), label)


def boxed_math(answer: str, label: str | None, metadata: Mapping[str, object]) -> float:
    """Return 1 if an extracted answer agrees with the label, else 0."""
    return _agree(f"\\boxed{{{answer}}}", label) if answer else 0.0


def _agree(text: str, label: str | None) -> float:
    if not label or not label.strip():
        return 0.0
    text, label = with_word_boundaries(text), with_word_boundaries(label)
    text = _BOX_SPACE.sub(r"\\boxed", text)
    truth = last_boxed(label) if has_box(label) else label
    # several boxes are elements of one answer, or attempts of which the last counts
    candidates = [text] if text.count("\\boxed") > 1 and _closes(text) else []
    if has_box(text):
        answer = last_boxed(text)
    elif ends_in_alternatives(text) and is_single(label):
        return 0.0
    else:
        bold = _END_IN_BOLD.search(text)
        answer = bold[1] if bold else None
        if answer is None:
            candidates.append(text)
    label = _notation(bare(truth or label))
    if answer is not None:
        answer = _notation(bare(answer))
        if _plain(answer) == _plain(label):
            return 1.0
        if not (is_hedged(answer, label) or contradicts(answer, label) or _SEVERAL.search(answer)):
            candidates.append(f"\\boxed{{{answer}}}")
    return float(any(_equal_as_any_percentage(label, _notation(each)) for each in candidates))


def _closes(text: str) -> bool:
    """Whether the last box has its closing brace."""
    return braced(text[text.rfind("\\boxed") + len("\\boxed") :]) is not None


def _notation(text: str) -> str:
    """Replace notation that the library does not read or reads as something else."""
    text = text.replace("\u00b0", "^\\circ").replace("\\degree", "^\\circ")
    text = _THIN_SPACE.sub("", unit_as_text(text))
    text = re.sub(r"\\\$|\$(?=\d[^$]*$)", "", text)  # of a price
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    text = _REPEATING.sub(_fraction, text)
    return text.removeprefix("~")


def _fraction(found: re.Match[str]) -> str:
    """Return the fraction of a repeating decimal: ``0.1\\overline{6}`` is 15/90."""
    whole, fixed, repeated = found[1] or "0", found[2], found[3]
    numerator = int(whole + fixed + repeated) - int(whole + fixed)
    return f"\\frac{{{numerator}}}{{{(10 ** len(repeated) - 1) * 10 ** len(fixed)}}}"


def _plain(text: str) -> str:
    return re.sub(r"\s+", "", text)


def _equal_as_any_percentage(label: str, text: str) -> bool:
    if _equal(label, text):
        return True
    # The library accepts 50% as 50 and as 0.5, but 12.5% only as 0.125.
    if "%" not in label + text:
        return False
    return _equal(_PERCENT.sub(" ", label), _PERCENT.sub(" ", text))


def _equal(label: str, text: str) -> bool:
    targets = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    gold = parse(
        label if _MARKED.search(label) else f"\\boxed{{{label}}}", targets, parsing_timeout=None
    )
    given = parse(text, targets, parsing_timeout=None) if gold else None
    if not given or not verify(gold, given, timeout_seconds=None):
        return False
    return not _differ_below_rounding(gold[0], given[0])


def _differ_below_rounding(gold: object, answer: object) -> bool:
    """Whether two small numbers differ, which the library rounds to the same number."""
    if not (isinstance(gold, Expr) and isinstance(answer, Expr)):
        return _any_part_differs(gold, answer)
    if not (gold.is_number and answer.is_number):
        return _any_part_differs(gold, answer)
    one, other = gold.doit().evalf(DIGITS), answer.doit().evalf(DIGITS)
    if not (one.is_Float and other.is_Float):
        return False
    largest = max(abs(one), abs(other))
    if largest == 0 or not largest < SMALL:
        return False
    tolerance = SAME_SMALL if gold.has(Float) or answer.has(Float) else 10.0 ** (10 - DIGITS)
    return bool(abs(one - other) > tolerance * largest)


def _any_part_differs(gold: object, given: object) -> bool:
    """The same for the ends of an interval or the elements of a tuple or set."""
    parts, others = getattr(gold, "args", ()), getattr(given, "args", ())
    if type(gold) is not type(given) or len(parts) != len(others):
        return False
    return any(map(_differ_below_rounding, parts, others))
