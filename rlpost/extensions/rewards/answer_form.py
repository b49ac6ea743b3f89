r"""Wrapping, hedges and words of an answer. Pure.

Input: an extracted answer and the label. Output: the answer without bold type, final dot and
introduction; whether it offers alternatives; whether its words contradict those of the label.
"""

from __future__ import annotations

import re

from rlpost.tasks.answer_text import END_OF_THOUGHT
from rlpost.tasks.reward.answer_extraction import BOXES, after_thinking, braced, last_boxed

TAIL_CHARACTERS = 120
"""Of a response, searched for alternatives; bounds the time of the search."""

_BOLD = ("\\textbf", "\\mathbf", "\\boldsymbol", "\\bm", "\\bf", "\\boxed", "\\fbox")
_DELIMITERS = (("**", "**"), ("__", "__"), ("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_INTRODUCTION = re.compile(
    r"^(?:\\text\{\s*)?(?:so |thus |therefore,? )?(?:the )?(?:final )?answer(?: is\b:?|:)\s*\}?",
    re.IGNORECASE,
)

_MAYBE = r"(?:maybe|perhaps|possibly|alternatively|probably)"
_HEDGE = re.compile(
    rf"(?<![A-Za-z\\])(?:or|and|either|{_MAYBE})(?![A-Za-z])|\\(?:lor|vee|land|wedge)\b",
    re.IGNORECASE,
)
_SEVERAL = re.compile(r"[,;]|\\pm\b|\\mp\b|\\cup\b")
_THOUSANDS = re.compile(r"(?<=\d),(?:\\!)?\s*(?=\d{3}(?!\d))")
_VALUE = r"[*$\\(]{0,4}-?[\d.,/]*\d[\w^{}%]*[*$\\)]{0,4}"
_JOINED = (
    rf"(?:(?:\s+[A-Za-z]+)?,?\s+or(?:\s+{_MAYBE})?|,?\s+and(?:\s+{_MAYBE})?|,?\s+{_MAYBE}|,\s+or)"
)
_ALTERNATIVES = re.compile(
    rf"({_VALUE}){_JOINED}\s+({_VALUE})(?:\s+[A-Za-z]+){{0,2}}[\s.!*$)]*$", re.IGNORECASE
)

_TEXT = re.compile(r"\\(?:text|mbox|mathrm|textrm|textit)\s*\{([^{}]*)\}")
_BASE = re.compile(r"_\{?(\d+)\}?\s*$")
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u30ff\u3400-\u9fff\uac00-\ud7a3\uf900-\ufaff"
)
"""Ranges of scripts whose words touch numbers and Latin letters: Thai, Lao, Burmese, Khmer, Kana,
Han, Hangul."""
_TOUCHING = re.compile(
    rf"(?<=[0-9A-Za-z.%!])(?=[{UNSPACED}])|(?<=[{UNSPACED}])(?=[-\u2212+$\\]?[0-9A-Za-z.])"
)
_OR = re.compile("或者|或是|或|または|หรือ|또는|혹은")
# without the last one, U+FF5E, which means "about"
_FULL_WIDTH = {code: code - 0xFF01 + ord("!") for code in range(0xFF01, 0xFF5E)}
_PLAIN_UNIT = re.compile(
    r"^((?:\\?\$)?-?[\d.,]*\d)\s+(?!(?:hundred|thousand|[a-z]+illion|dozen|percent|factorial|squared|cubed)\b)"
    rf"([a-z]{{2,}}(?: [a-z]{{2,}}){{0,2}}|(?![十百千万萬亿億半])[{UNSPACED}]{{1,4}})$"
)
_WORD = re.compile(rf"[a-z]+|\d+|[{UNSPACED}]+")
_UNCOUNTED = {"square", "sq", "cubic", "unit", "of", "the", "a", "an", "per", "in"}
_NEGATIONS = {"not", "no", "non", "never"}
_LONG_UNITS = {
    "mm": "millimeter", "cm": "centimeter", "m": "meter", "km": "kilometer", "g": "gram",
    "kg": "kilogram", "s": "second", "sec": "second", "min": "minute", "h": "hour", "hr": "hour",
    "ft": "foot", "feet": "foot", "inche": "inch", "deg": "degree", "metre": "meter",
    "centimetre": "centimeter", "kilometre": "kilometer",
}  # fmt: skip


def with_word_boundaries(text: str) -> str:
    r"""Return a text in which numbers and Latin letters are words of their own in every script.

    Python's ``\w`` and ``\b`` take Han, Kana, Hangul and Thai for letters of the same word, so nothing
    would find the 42 of ``共42元``; a space is put between both. Full-width characters become ASCII,
    and words for "or" English, so that alternatives are found.
    """
    return _OR.sub(" or ", _TOUCHING.sub(" ", text.translate(_FULL_WIDTH)))


def answer_after_thinking(response: str) -> str:
    r"""Like ``after_thinking``, but return the last ``\boxed{...}`` of a truncated thought.

    A box is an answer anywhere.
    """
    text = after_thinking(response)
    if text:
        return text
    boxed = last_boxed(response.rpartition(END_OF_THOUGHT)[2])
    return "" if boxed is None else f"\\boxed{{{boxed}}}"


def has_box(response: str) -> bool:
    """Whether a response has a box, closed or not."""
    return any(command in response for command in BOXES)


def bare(answer: str) -> str:
    """Return an answer without bold type, math delimiters, introduction and final dot."""
    before = None
    while before != answer:
        before = answer
        answer = _INTRODUCTION.sub("", answer.strip()).strip()
        if answer.endswith((".", "\u3002")) and not answer.endswith(("..", ".m.")):
            answer = answer[:-1].rstrip()
        for start, end in _DELIMITERS:
            inner = answer[len(start) : -len(end)]
            is_wrapped = answer.startswith(start) and answer.endswith(end)
            if is_wrapped and inner and start not in inner and not inner.endswith("\\"):
                answer = inner
        for command in _BOLD:
            if answer.startswith(command):
                answer = _unwrapped(answer, command)
    return answer


def unit_as_text(answer: str) -> str:
    r"""Write the plain words after a number as the data sets do: ``5 apples``, ``5\text{ apples}``."""
    return _PLAIN_UNIT.sub(r"\1\\text{ \2}", answer)


def _unwrapped(answer: str, command: str) -> str:
    """Return the content of a command whose braces hold the whole answer."""
    rest = answer[len(command) :].strip()
    inner = braced(rest) if rest.startswith("{") else None
    return inner if inner is not None and len(inner) + len("{}") == len(rest) else answer


def is_hedged(answer: str, label: str) -> bool:
    """Whether an answer offers alternatives (``5 or 7``) and the label is a single value."""
    return bool(_HEDGE.search(answer)) and is_single(label)


def is_single(label: str) -> bool:
    """Whether a label is one value, not a list or alternatives."""
    label = _THOUSANDS.sub("", label)
    return not (_HEDGE.search(label) or _SEVERAL.search(label))


def ends_in_alternatives(text: str) -> bool:
    """Whether a text without a box ends in two different values: ``it is 3 or 4``."""
    found = _ALTERNATIVES.search(text[-TAIL_CHARACTERS:])
    return found is not None and found[1].strip("*$\\()") != found[2].strip("*$\\().")


def contradicts(answer: str, label: str) -> bool:
    r"""Whether the words or number bases of an answer exclude that it equals the label.

    ``10 \text{ p.m.}`` is not ``10 \text{ a.m.}`` and ``12_5`` not ``12_6``. A unit may be left
    out, and an adjective: ``7 \text{ red apples}`` may be ``7 \text{ apples}``.
    """
    bases = [found[1] for found in map(_BASE.search, (answer, label)) if found]
    if len(bases) == 2 and bases[0] != bases[1]:
        return True
    given, wanted = _words(answer), _words(label)
    if given and wanted:
        return not (given <= wanted or wanted <= given) or bool((given ^ wanted) & _NEGATIONS)
    return _is_statement(answer) != _is_statement(label)


def _is_statement(text: str) -> bool:
    r"""Whether a letter is followed by words: ``x \text{ is odd}`` is more than ``x``."""
    words = _TEXT.findall(text)
    rest = _TEXT.sub("", text).strip()
    return bool(words) and bool(re.fullmatch(r"[A-Za-z]", rest))


def _words(text: str) -> set[str]:
    joined = " ".join(_TEXT.findall(text)).lower().replace(".", "")
    words = {word.removesuffix("s") or word for word in _WORD.findall(joined)}
    return {_LONG_UNITS.get(word, word) for word in words} - _UNCOUNTED
