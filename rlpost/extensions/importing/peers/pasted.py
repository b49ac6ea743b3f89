"""Answer a key of another stack that is given on the command line of rlpost. Pure."""

from __future__ import annotations

import re

from rlpost.config.flags import flag
from rlpost.config.wording import flag_text
from rlpost.extensions.importing.peers.nemo_rl import NEMO_RL
from rlpost.extensions.importing.peers.row import Given, Needless, NotHere, Row
from rlpost.extensions.importing.peers.verl import VERL

_KEY = re.compile(r"(?:-{0,2}|\+{0,2}|~)([A-Za-z_]\w*(?:\.\w+)+)(?:=(.*))?", re.DOTALL)


def answer_to(word: str) -> str | None:
    """Return an error for ``a.b=VALUE`` of verl or NeMo-RL: its flags here, or why there are none.

    None for a word that is no key of them.
    """
    match = _KEY.fullmatch(word)
    if match is None:
        return None
    key, text = match[1], match[2]
    for stack in (VERL, NEMO_RL):
        found = stack.find(key)
        if found is not None:
            said = _said(*found, key, text)
            return f"{key}: a key of {stack.name}; {said} (`rlpost import` reads a whole script)"
    return None


def _said(row: Row, tail: str, key: str, text: str | None) -> str:
    looked: list[str] = []

    def look(name: str) -> object:
        looked.append(name)
        return None

    try:
        settings = row.convert(Given(key, _value(text), tail, look)) if text is not None else {}
    except (NotHere, Needless) as error:
        if not looked:
            kind = "no setting is needed: " if isinstance(error, Needless) else "not here: "
            return f"{kind}{error}"
        settings = {}
    if settings and not looked:
        words = " ".join(flag_text(name, value) for name, value in settings.items())
        return f"use {words}"
    names = " ".join(flag(name) for name in row.settings)
    if names:
        return f"use {names}" + (f": {row.note}" if row.note else "")
    return row.note or "it has no setting here"


def _value(text: str | None) -> object:
    plain = (text or "").strip("'\"")
    words = {"true": True, "false": False, "null": None}
    if plain.lower() in words:
        return words[plain.lower()]
    for kind in (int, float):
        try:
            return kind(plain)
        except ValueError:
            pass
    return plain
