"""Expand braces of a word of a shell script: ``a{b,c}`` is ``ab ac``, ``{1..3}`` is ``1 2 3``. Pure."""

from __future__ import annotations

import re

from rlpost.errors import ConfigError
from rlpost.extensions.importing.shell_syntax import closing, quote_end

MOST_BRACES, MOST_WORDS = 50, 10_000
_NUMBERS = re.compile(r"(-?\d{1,9})\.\.(-?\d{1,9})(?:\.\.(-?\d{1,9}))?")


def braces(raw: str, line: int) -> list[str]:
    """Return the words that a word with quotes and variables becomes, as bash has them.

    Raises ConfigError for too many.

    >>> braces("{a,b}{1..2}", 1)
    ['a1', 'a2', 'b1', 'b2']
    """
    at, num_braces = 0, 0
    while at < len(raw):
        if raw[at] != "{":
            at = _behind(raw, at, line)
            continue
        num_braces += 1
        if num_braces > MOST_BRACES:
            raise ConfigError(f"line {line}: more than {MOST_BRACES} braces in a word")
        parts, end = _alternatives(raw, at, line)
        if not parts:
            at += 1
            continue
        heads = [one for part in parts for one in braces(part, line)]
        tails = braces(raw[end:], line)
        if len(heads) * len(tails) > MOST_WORDS:
            raise ConfigError(f"line {line}: braces make more than {MOST_WORDS:,} words")
        return [raw[:at] + head + tail for head in heads for tail in tails]
    return [raw]


def _behind(raw: str, at: int, line: int) -> int:
    """Return the position behind a letter, a quoted part or an expansion."""
    if raw[at] == "\\":
        return at + 2
    if raw[at] in "'\"`":
        return quote_end(raw, at, line)
    if raw.startswith(("${", "$("), at):
        return closing(raw, at + 1, line)
    return at + 1


def _alternatives(raw: str, start: int, line: int) -> tuple[list[str], int]:
    """Return the texts between the brace at ``start`` and its end, and the position behind it.

    No texts for a brace that stays as it is.
    """
    parts: list[str] = []
    begin, depth, at = start + 1, 0, start + 1
    while at < len(raw):
        letter = raw[at]
        if letter == "}" and not depth:
            if parts:
                return [*parts, raw[begin:at]], at + 1
            return _sequence(raw[begin:at], line), at + 1
        if letter == "," and not depth:
            parts.append(raw[begin:at])
            begin = at + 1
        depth += {"{": 1, "}": -1}.get(letter, 0)
        at = _behind(raw, at, line)
    return [], start


def _sequence(text: str, line: int) -> list[str]:
    match = _NUMBERS.fullmatch(text)
    if match is None:
        return []
    first, last, size = int(match[1]), int(match[2]), abs(int(match[3] or 1)) or 1
    if abs(last - first) // size > MOST_WORDS:
        raise ConfigError(f"line {line}: braces make more than {MOST_WORDS:,} words")
    step = size if last >= first else -size
    return [str(number) for number in range(first, last + (1 if step > 0 else -1), step)]
