r"""The reward ``deepscaler``: the box after the thought equals the label, as text or by sympy.

Input: a response with ``</think>`` or ``###Response`` before its answer, and the label. Output: 1
or 0.

The results are those of the grader of the DeepScaleR release
(github.com/agentica-project/deepscaler, rewards/math_utils), which slime's ``rm_hub/deepscaler.py``
includes as well. It first compares both texts in the normal form of the MATH data set, then by
sympy. Unlike there, bold type and a final dot do not matter, and alternatives, other words and other
number bases are wrong. An answer that sympy would first have to reduce (a fraction) or evaluate (to an integer) is
wrong.

Call it only in a process with a time limit (``rlpost.tasks.reward.pool``), because sympy runs on the
model's output.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation

import sympy
from pylatexenc.latex2text import LatexNodes2Text
from sympy.parsing import sympy_parser as parser

from rlpost.extensions.rewards.answer_form import (
    answer_after_thinking,
    bare,
    contradicts,
    is_hedged,
    unit_as_text,
)
from rlpost.tasks.answer_text import END_OF_THOUGHT
from rlpost.tasks.reward.answer_extraction import last_boxed

RESPONSE_MARK = "###Response"
UNITS = (
    "degree", "cm", "centimeter", "meter", "mile", "second", "minute", "hour", "day", "week",
    "month", "year", "foot", "feet", "inch", "yard",
)  # fmt: skip
MAGNITUDES = {"million": "*10^6", "billion": "*10^9", "trillion": "*10^12"}
BRACKETS = "()[]"
SYMBOLS = {"√": "sqrt", "π": "pi", "∞": "inf", "\u222a": "U", "·": "*", "\u00d7": "*"}
MAX_INTEGER_DIGITS = 1000

_UNIT = re.compile(f"(?:{'|'.join(sorted(UNITS, key=len, reverse=True))})(?:es)?s? *(?:\\^[0-9]+)?")
_TEXT = re.compile(r"^\\text\{(.+?)\}$")
_UNIT_OF_TEXT = "\\text{ "  # with a space: the MATH data set has it only before a unit
_ENDS_TEXT = re.compile(r"^[^{}]*\}(?:\^\{?\d\}?)?\.?$")
_THOUSANDS = re.compile(r"(\d),(\d\d\d)(?=\D|$)")
_FRACTION = re.compile(r"^-?[0-9]+.?/0*[1-9][0-9]*.?$")
# Python code in a text that sympy would evaluate: strings, which it evaluates again, attributes,
# names with _, brackets and braces.
_CODE = re.compile(r"[^\w\s+\-*/^().,!=]|_|\.(?=\s*[^\W\d])|(?<!\d)\.(?!\d)")
_INDEXED = re.compile(r"(?<!\w)([0-9]*)([a-z]_[0-9]+)(?!\w)")
_DOT_BEFORE_NAME = re.compile(r"(?<![\w.])([0-9]+)\.(?=e[+-]?[0-9]|([^\W\d_]))")
_TOO_LARGE = re.compile(r"\^[{(]|\^[0-9]+\^|\^[0-9][0-9]+")


def deepscaler(response: str, label: str | None, metadata: Mapping[str, object]) -> float:
    """Return 1 if the last box after the thought, or after the mark, equals the label."""
    if END_OF_THOUGHT in response:
        answer = last_boxed(answer_after_thinking(response))
    elif RESPONSE_MARK in response:
        answer = last_boxed(response.split(RESPONSE_MARK)[1])
    else:
        return 0.0
    return answer_equals(answer, label, metadata)


def answer_equals(
    answer: str | None, label: str | None, metadata: Mapping[str, object] | None = None
) -> float:
    r"""Return 1 if an extracted answer equals the label, without a ``\boxed{...}`` around it."""
    truth = last_boxed(label) if label is not None and "\\boxed" in label else label
    if answer is None or not truth:
        return 0.0
    if is_hedged(answer, truth) or contradicts(
        unit_as_text(bare(answer)), unit_as_text(bare(truth))
    ):
        return 0.0
    pairs = [(answer, truth), (unit_as_text(bare(answer)), unit_as_text(bare(truth)))]
    return float(any(plain_form(a) == plain_form(b) or equal_by_sympy(a, b) for a, b in pairs))


def plain_form(answer: str) -> str:
    r"""Return the normal form in which the MATH data set (arXiv 2103.03874) compares answers.

    An answer with more than one ``\text{ ...}`` is not changed: the data set's own code raises an
    error there.
    """
    answer = answer.strip()
    if wrapped := _TEXT.match(answer):
        answer = wrapped[1].strip()
    unwrapped = answer
    for removed in ("\n", "\\!"):
        answer = answer.replace(removed, "")
    answer = answer.replace("\\\\", "\\").replace("tfrac", "frac").replace("dfrac", "frac")
    for removed in ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$"):
        answer = answer.replace(removed, "")
    before_unit, *units = answer.split(_UNIT_OF_TEXT)
    if len(units) > 1 or (units and not _ENDS_TEXT.search(units[0])):
        return unwrapped  # more than a unit, such as ``5 \text{ or } 7``
    answer = before_unit
    answer = answer.replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if answer.startswith("."):
        answer = "0" + answer
    left, equals, right = answer.partition("=")
    if equals and len(left) <= 2 and "=" not in right:
        answer = right  # x = 5
    answer = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", answer).replace(" ", "")
    answer = re.sub(r"\\frac([^{])([^{])", r"\\frac{\1}{\2}", answer)
    answer = re.sub(r"\\frac([^{])(?=\{)", r"\\frac{\1}", answer)
    if answer == "0.5":
        return "\\frac{1}{2}"
    if ratio := re.fullmatch(r"(0|-?[1-9]\d*)/(0|-?[1-9]\d*)", answer, flags=re.ASCII):
        return f"\\frac{{{ratio[1]}}}{{{ratio[2]}}}"
    return answer


def equal_by_sympy(answer: str, truth: str) -> bool:
    """Whether both are equal without units and formatting; tuples compare by element."""
    wanted, given = _expression(truth), _expression(answer)
    if wanted == given:
        return True
    if not given or not wanted:
        return False
    wanted_parts, given_parts = _parts(wanted), _parts(given)
    if len(wanted_parts) != len(given_parts):
        return False
    if len(wanted_parts) > 1 and (wanted[0], wanted[-1]) != (given[0], given[-1]):
        return False  # an open interval does not equal a closed one
    return all(_same_part(*pair) for pair in zip(wanted_parts, given_parts, strict=True))


def _expression(text: str) -> str:
    """Convert an answer to sympy's notation where possible."""
    if wrapped := _TEXT.match(text):
        text = wrapped[1]
    text = text.replace("\\%", "").replace("\\$", "").replace("$", "").replace("%", "")
    text = text.replace(" or ", " , ").replace(" and ", " , ")
    for word, factor in MAGNITUDES.items():
        text = text.replace(word, factor)
    text = re.sub(r"\^ *\\circ", "", _UNIT.sub("", text))
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    text = re.sub(r",\\! *", "", text)
    text = _integer(text) or text
    if "\\" in text:
        text = _from_latex(text)
    text = re.sub(r"- *", "-", text)
    text = re.sub(r"^-(\d+) +(\d+)/(\d+)$", r"-\1-\2/\3", text.strip())
    text = re.sub(r"([0-9]) +([0-9])", r"\1+\2", text)  # a mixed number
    text = text.replace(" ", "").replace("{", "").replace("}", "").lower()
    return _integer(_THOUSANDS.sub(r"\1\2", text)) or text


def _from_latex(text: str) -> str:
    text = (
        text.replace("\\tfrac", "\\frac").replace("\\dfrac", "\\frac").replace("\\frac", " \\frac")
    )
    try:
        text = LatexNodes2Text().latex_to_text(text)
    except Exception:  # pylatexenc raises many types on invalid LaTeX
        return text
    for symbol, word in SYMBOLS.items():
        text = text.replace(symbol, word)
    return text.strip()


def _integer(text: str) -> str | None:
    """Return the integer that a text means within 1e-7 (such as ``2.0`` or ``2e3``), or None."""
    try:
        number = Decimal(text.strip())
        if not number.is_finite() or number.adjusted() > MAX_INTEGER_DIGITS:
            return None
        nearest = number.to_integral_value()
        is_near = abs(number - nearest) <= Decimal("1e-7") and (nearest != 0 or number == 0)
        return str(int(nearest)) if is_near else None
    except (InvalidOperation, ValueError):
        return None


def _parts(text: str) -> list[str]:
    """Return the elements of a tuple or an interval; anything else is a single element."""
    while (shorter := _THOUSANDS.sub(r"\1\2", text)) != text:
        text = shorter
    inner = text[1:-1]
    is_enclosed = len(text) > 2 and text[0] in BRACKETS and text[-1] in BRACKETS
    is_nested = any(bracket in inner for bracket in BRACKETS)
    if is_enclosed and not is_nested:
        return [part.strip() for part in inner.split(",")]
    return [text]


def _same_part(wanted: str, given: str) -> bool:
    if _FRACTION.match(wanted) and _FRACTION.match(given):
        return wanted == given  # a fraction must be reduced like the label
    if (_integer(wanted) is None) != (_integer(given) is None):
        return False  # an integer must be evaluated
    return _difference_is_zero(wanted, given)


def _difference_is_zero(truth: str, answer: str) -> bool:
    """Whether sympy simplifies the difference of two expressions to 0.

    sympy's parser runs its input with Python's ``eval``, without builtins, and what is in a string
    again with all of them; so only text of numbers, letters, operators and parentheses reaches it.
    """
    text = f"({truth})-({answer})"
    arithmetic = _arithmetic(text)
    if _CODE.search(arithmetic):
        return False
    letters = {
        letter for letter in text.replace("sqrt", "").replace("frac", "") if letter.isalpha()
    }
    if len(letters) > 2 or _TOO_LARGE.search(text):
        return False  # words instead of an expression, or nested powers
    try:
        return bool(_simplified(arithmetic) == 0)
    except Exception:  # sympy raises many types on invalid expressions
        return False


def _arithmetic(text: str) -> str:
    """Write ``a_1`` as an unused letter, which sympy reads as one symbol, and ``2.x`` as ``2 x``."""
    unused = (letter for letter in map(chr, range(0x4E00, 0x4F00)) if letter not in text)
    indexed = sorted({match[2] for match in _INDEXED.finditer(text)})
    plain = dict(zip(indexed, unused, strict=False))
    text = _INDEXED.sub(lambda match: match[1] + plain.get(match[2], match[2]), text)
    return _DOT_BEFORE_NAME.sub(lambda match: match[1] + (" " if match[2] else ""), text)


def _simplified(text: str) -> object:
    names = {name: value for name, value in vars(sympy).items() if not name.startswith("_")}
    steps = (*parser.standard_transformations, parser.implicit_multiplication_application)
    found = parser.parse_expr(
        text.replace("^", "**"),
        local_dict={},
        global_dict={**names, "__builtins__": {}},
        transformations=steps,
    )
    return sympy.simplify(found)
