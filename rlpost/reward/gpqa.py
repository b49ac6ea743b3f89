r"""The reward ``gpqa``: the letter that a response chooses, or the text of the choice.

Input: a response; a label that is a letter, a position (0 is A) or the text of a choice; what the metadata tells of
the choices. Output: 1 or 0. The letter is the last one that is named as the answer (``The answer is C``,
``Answer: (C)``, ``\boxed{C}``), else the last that is called correct, else the last option or choice that is named,
else the last capital that stands alone and is not the word I.
Metadata as in slime: ``choices`` (list or object), ``valid_letters``, ``correct_letter``, ``correct_answer``.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlpost.errors import DataError
from rlpost.reward.answers import answer_after_thinking

LETTERS = string.ascii_uppercase[:10]

_CLEAR = r"([A-Z]\b|[a-z](?=[\s.)\]},;:*$]*(?:\n|$)))"  # a capital, or a small letter with nothing behind it
_AROUND = r"[\s:=\-*_(\[{\"'$\\]{0,12}"
_COMMANDS = r"(?:(?:boxed|text|textbf|mathrm|mathbf|option|choice|letter|the)\b" + _AROUND + "){0,4}"
_IS = rf"\b{_AROUND}(?:(?i:is|would be|should be|must be)\b)?"
_BEHIND = rf"{_AROUND}(?i:{_COMMANDS}){_CLEAR}"
_NAMED = re.compile(rf"(?:\b(?i:answer){_IS}|\\boxed\b){_BEHIND}")
_CALLED_CORRECT = re.compile(r"\b([A-Z])\b\W{0,4}\s{0,4}is\s{1,4}(?:the\s{1,4})?(?:correct|right)", re.IGNORECASE)
_OPTION = re.compile(rf"\b(?i:option|choice){_IS}{_BEHIND}")
_ALONE = re.compile(r"\b(?!I['\u2019 ][a-z])([A-Z])\b")


def gpqa(response: str, label: str | None, metadata: Mapping[str, Any]) -> float:
    """1 when the response chooses the right letter or, without a letter to compare, says the right text; else 0.

    Raises:
        DataError: ``choices`` or ``valid_letters`` in the metadata is no list.
    """
    choices = _listed(metadata, "choices")
    letters = _letters(metadata, choices)
    text = answer_after_thinking(response)
    wanted, given = _wanted(label, metadata, letters, choices), _chosen(text, letters)
    if wanted is not None and given is not None:
        return float(given == wanted)
    texts = [metadata.get("correct_answer"), metadata.get("answer_text")]
    if wanted is None or len(_plain(label or "")) > 1:
        texts.append(label)  # a letter is no text: every "a" of a sentence would say it
    if wanted is not None and letters.index(wanted) < len(choices):
        texts.append(choices[letters.index(wanted)])
    said = f" {_plain(text)} "
    return float(any(f" {_plain(str(each))} " in said for each in texts if each is not None and _plain(str(each))))


def _listed(metadata: Mapping[str, Any], key: str) -> list[str]:
    given = metadata.get(key) or ()
    if not isinstance(given, Iterable):
        raise DataError(f"gpqa: {key!r} in the metadata is {given!r}; it must be a list or an object")
    return [str(one) for one in (given.values() if isinstance(given, Mapping) else given)]


def _letters(metadata: Mapping[str, Any], choices: Sequence[str]) -> list[str]:
    named = [letter.strip().upper() for letter in _listed(metadata, "valid_letters")]
    return named or list(string.ascii_uppercase[: len(choices)] if choices else LETTERS)


def _wanted(
    label: str | None, metadata: Mapping[str, Any], letters: Sequence[str], choices: Sequence[str]
) -> str | None:
    """The right letter, if it can be known."""
    named = metadata.get("correct_letter")
    if isinstance(named, str) and named.strip().upper() in letters:
        return named.strip().upper()
    label = (label or "").strip()
    if label.strip("()").upper() in letters:
        return label.strip("()").upper()
    plain = [_plain(choice) for choice in choices]
    if _plain(label) in plain:
        return letters[plain.index(_plain(label))] if plain.index(_plain(label)) < len(letters) else None
    if label.isdecimal() and int(label) < len(letters):
        return letters[int(label)]
    return None


def _chosen(text: str, letters: Sequence[str]) -> str | None:
    if (whole := _plain(text).upper()) in letters:
        return whole
    for pattern in (_NAMED, _CALLED_CORRECT, _OPTION, _ALONE):
        found = [letter.upper() for letter in pattern.findall(text) if letter.upper() in letters]
        if found:
            return found[-1]
    return None


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()
