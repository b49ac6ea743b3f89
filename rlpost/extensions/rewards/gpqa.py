r"""The reward ``gpqa``: grade a multiple-choice answer by its letter, or by the text of the choice.

Input: a response; a label that is a letter, a position (0 is A) or the text of a choice; and
metadata as in slime: ``choices`` (list or object), ``valid_letters``, ``correct_letter``,
``correct_answer``. Output: 1 or 0.

The chosen letter is the last one of the first of these kinds that occurs:

    1. named as the answer: ``The answer is C``, ``Answer: (C)``, ``\boxed{C}``
    2. called correct: ``C is correct``
    3. named as an option or choice: ``option C``
    4. a single capital letter, except the words I and, at the start of a sentence, A

A letter that is denied (``not A``, ``A is wrong``) is not chosen. What follows the letter may be the
text of its choice: ``C is not conserved`` denies nothing, nor does ``Answer: C is wrong``.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Mapping, Sequence

from rlpost.errors import DataError
from rlpost.extensions.rewards.answer_form import (
    UNSPACED,
    answer_after_thinking,
    has_box,
    with_word_boundaries,
)
from rlpost.tasks.number_text import plain_text
from rlpost.tasks.reward.answer_extraction import last_boxed

LETTERS = string.ascii_uppercase[:10]
NONE = ""
"""Chosen instead of a letter by ``A or B``."""
PAIR_CHARACTERS = 60  # between two letters at most

# a capital letter, or a small letter that ends its line
_CLEAR = r"([A-Z]\b|[a-z](?=[\s.)\]},;:*$]*(?:\n|$)))"
_AROUND = r"[\s:=\-*_(\[{\"'$\\]{0,12}"
_COMMANDS = (
    r"(?:(?:boxed|text|textbf|mathrm|mathbf|option|choice|letter|the)\b" + _AROUND + "){0,4}"
)
_IS = rf"\b{_AROUND}(?:(?i:is|would be|should be|must be)\b)?"
_BEHIND = rf"{_AROUND}(?i:{_COMMANDS}){_CLEAR}"
_ANSWER = r"(?:答案|答え|정답|คำตอบ)\s?(?:是|为|為|は|은|는|คือ)?"
_NAMED = re.compile(rf"(?:\b(?i:answer){_IS}|{_ANSWER}|\\boxed\b){_BEHIND}")
_CALLED_CORRECT = re.compile(
    r"\b([A-Z])\b\W{0,4}\s{0,4}is\s{1,4}(?:the\s{1,4})?(?:correct|right)", re.IGNORECASE
)
_OPTION = re.compile(rf"\b(?i:option|choice){_IS}{_BEHIND}")
_BEHIND_A_CHOICE = (
    r"(?:and|as|because|can|does|has|is|must|or|should|since|then|was|would|[a-z]+(?<![aisu])s)\b"
)
"""Words that follow a chosen letter but no article, verbs such as ``gives`` among them."""
_ARTICLE = rf"(?:^|(?<=[.!?\n] )|(?<=\n))A (?!{_BEHIND_A_CHOICE})[a-z]"
"""``A short check`` at the start of a sentence."""
_ALONE = re.compile(rf"\b(?!I['\u2019 ][a-z])(?!{_ARTICLE})([A-Z])\b")

_DENIED = re.compile(
    r"(?i:(?:\b(?:not|cannot\s+be|isn['\u2019]t|rather\s+than|instead\s+of)|不是|而非|并非)\s{0,3}"
    r"(?:(?:the|option|choice|answer|letter)\s+){0,2})[*($]{0,4}([A-Z])\b(?!\s+(?:alone|only)\b)"
    r"|\b([A-Z])\b[*)$.]{0,4}\s{0,3}ではな"
)
_BE = r"(?:is|was|are|must\s+be|would\s+be)"
_CALLED_WRONG = re.compile(
    rf"\b([A-Z])\b[*)$.]{{0,4}}\s{{0,3}}(?i:{_BE}(?:\s+not|n['\u2019]t)\s+(?:(?:the|an?)\s+)?"
    rf"(?:correct|right|valid|answer)\b(?!-)|{_BE}\s+(?:(?:the|an?)\s+)?"
    r"(?:in(?:correct|valid)|wrong|false)\b|不对|错误|不正确)"
)
_STATED = re.compile(r"[:=\n]|\bis\b|\bbe\b|boxed|[是为為は은는]|คือ")
"""Between ``answer`` and a letter: what follows the letter may be the text of its choice."""
_WORD = re.compile(rf"(?:(?<!\w)-)?\d+(?:\.\d+)?|[{UNSPACED}]|(?:(?![{UNSPACED}])[^\W\d_])+")
_LETTERS = re.compile("[A-Z]")
_RIGHT = r"(?:\s+is\s+(?:the\s+)?(?:correct|right))?"
_LETTER = r"(?<![A-Za-z\\])([A-Z])(?![A-Za-z])"
_CLOSE, _OPEN = r"[\s*$)}\].]{0,6}", r"[\s*$({\[]{0,6}(?:\\?[a-z]+[\s*$({\[]{1,6}){0,3}"
_LIST_END = r"(?=[\s*$({\[]*[A-Z][\s.)}$*]*$)"
_JOINED = rf"(?:,?\s*\bor\b|\s*\band\b(?!.{{0,9}}\bis\b)|[/&]|,{_LIST_END})"
_WORD_I = r"(?!['\u2019 ](?:am|think|believe|m)\b)"
_PAIR = re.compile(rf"{_LETTER}{_RIGHT}{_CLOSE}{_JOINED}{_OPEN}{_LETTER}{_WORD_I}")
"""Two letters of which neither is chosen: ``A or B``."""


def gpqa(response: str, label: str | None, metadata: Mapping[str, object]) -> float:
    """Return 1 if the response chooses the right letter, else 0.

    Without two letters to compare, the response is right if it contains the text of the right
    choice.

    Raises:
        DataError: ``choices`` or ``valid_letters`` in the metadata is not a list.
    """
    choices = _listed(metadata, "choices")
    letters = _letters(metadata, choices)
    text = with_word_boundaries(answer_after_thinking(response))
    right_letter, chosen_letter = _wanted(label, metadata, letters, choices), _chosen(text, letters)
    if right_letter is not None and chosen_letter is not None:
        return float(chosen_letter == right_letter)  # alternatives (NONE) differ from each letter
    texts = [metadata.get("correct_answer"), metadata.get("answer_text")]
    if right_letter is None or len(_plain(label or "")) > 1:
        texts.append(label)  # not a letter: every "a" of a sentence would match it
    if right_letter is not None and letters.index(right_letter) < len(choices):
        texts.append(choices[letters.index(right_letter)])
    accepted = [_plain(plain_text(each)) for each in texts if each is not None]
    plain_response = f" {_plain(text)} "
    others = [plain for choice in choices if (plain := _plain(choice)) not in accepted]
    return float(
        any(
            f" {each} " in plain_response and not _is_offered_with(each, others, plain_response)
            for each in accepted
            if each
        )
    )


def _is_offered_with(right: str, others: Sequence[str], response: str) -> bool:
    """Whether a response names another choice as an alternative to the right one."""
    return any(
        f" {one} or {two} " in response
        for other in others
        for one, two in ((right, other), (other, right))
    )


def _listed(metadata: Mapping[str, object], key: str) -> list[str]:
    """Return the entries of a list, or the values of an object, as strings."""
    given = metadata.get(key) or ()
    if not isinstance(given, Iterable):
        raise DataError(
            f"gpqa: {key!r} in the metadata is {given!r}; it must be a list or an object"
        )
    entries = given.values() if isinstance(given, Mapping) else given
    return [plain_text(entry) for entry in entries]


def _letters(metadata: Mapping[str, object], choices: Sequence[str]) -> list[str]:
    named = [letter.strip().upper() for letter in _listed(metadata, "valid_letters")]
    if named:
        return named
    return list(string.ascii_uppercase[: len(choices)] if choices else LETTERS)


def _wanted(
    label: str | None,
    metadata: Mapping[str, object],
    letters: Sequence[str],
    choices: Sequence[str],
) -> str | None:
    """Return the right letter, or None if label and metadata do not determine one."""
    named = metadata.get("correct_letter")
    if isinstance(named, str) and named.strip().upper() in letters:
        return named.strip().upper()
    label = (label or "").strip()
    if label.strip("()").upper() in letters:
        return label.strip("()").upper()
    position = _position(label, choices)
    if position is not None:
        return letters[position] if position < len(letters) else None
    if label.isdecimal() and int(label) < len(letters):
        return letters[int(label)]
    return None


def _position(label: str, choices: Sequence[str]) -> int | None:
    """Return the position of the choice with this text, or None.

    Choices that differ only in signs (``10^-4``, ``10^4``) have the same words, so words decide only
    where one choice has them.
    """
    stripped = [choice.strip() for choice in choices]
    if label in stripped:
        return stripped.index(label)
    words = _plain(label)
    same = [place for place, choice in enumerate(choices) if words and _plain(choice) == words]
    return same[0] if len(same) == 1 else None


def _chosen(text: str, letters: Sequence[str]) -> str | None:
    """Return the chosen letter, NONE if it is one of two alternatives, None without a letter."""
    if (whole := _plain(text).upper()) in letters:
        return whole
    if has_box(text) and last_boxed(text) is None:
        return NONE
    denied = _denied(text)
    for pattern in (_NAMED, _CALLED_CORRECT, _OPTION, _ALONE):
        matches = [
            letter
            for letter in pattern.finditer(text)
            if letter[1].upper() in letters and letter.start(1) not in denied
        ]
        if matches:
            is_alternative = _is_alternative(text, matches[-1].start(1), letters)
            return NONE if is_alternative else matches[-1][1].upper()
    return None


def _denied(text: str) -> set[int]:
    """Return the positions of letters that a text denies."""
    stated = {
        named.start(1)
        for named in _NAMED.finditer(text)
        if _STATED.search(text[named.start() : named.start(1)])
    }
    called_wrong = {match.start(1) for match in _CALLED_WRONG.finditer(text)}
    denied = {match.start(match.lastindex or 0) for match in _DENIED.finditer(text)}
    return denied | (called_wrong - stated)


def _is_alternative(text: str, position: int, letters: Sequence[str]) -> bool:
    """Whether the letter at a position is joined to another valid letter."""
    start = max(0, position - PAIR_CHARACTERS)
    for first in _LETTERS.finditer(text, start, position + 1):
        pair = _PAIR.match(text, first.start())
        if pair is None or pair[1] == pair[2] or not {pair[1], pair[2]} <= set(letters):
            continue
        if position in (pair.start(1), pair.start(2)):
            return True
    return False


def _plain(text: str) -> str:
    """Return the words and numbers of a text, separated by a space.

    Numbers keep sign and decimal point. A letter of a script without spaces is a word.
    """
    return " ".join(_WORD.findall(with_word_boundaries(text).lower().replace("\u2212", "-")))
