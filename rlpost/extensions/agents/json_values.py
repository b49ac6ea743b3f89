"""JSON that every program reads: no NaN, no infinity, no half of a surrogate pair, bounded depth.

Python's ``json`` accepts more than RFC 8259 allows, and what it accepts cannot always be written
again: orjson refuses lone surrogates and integers of more than 64 bits. Pure.
"""

from __future__ import annotations

import json
import math
import re

import orjson

MAX_DEPTH = 64
"""Nested arrays and objects of a value; orjson writes 254 levels, Python's json about 1,000."""

_MAY_BE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def loads_strict(text: str) -> object:
    """Parse JSON; lone surrogates in its strings become U+FFFD.

    Raises:
        ValueError: it is no JSON, has a number that is not finite, or is nested too deeply.
    """
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError(f"more than {MAX_DEPTH} nested values") from error
    check_depth(value)
    return _without_lone_surrogates(value)


def loads_body(content: bytes) -> object:
    """Parse the body of a request; lone surrogates in its strings become U+FFFD.

    Programs in JavaScript cut texts by UTF-16 units, and send the half of an emoji as ``\\ud83d``.
    Raises ValueError.
    """
    try:
        return orjson.loads(content)
    except ValueError:
        if not _MAY_BE_SURROGATE.search(content):
            raise
    return loads_strict(content.decode())


def check_depth(value: object) -> None:
    """Raise ValueError if a value has more than MAX_DEPTH nested arrays and objects."""
    level: list[object] = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [each for one in level for each in _children(one)]
        if not level:
            return
    raise ValueError(f"more than {MAX_DEPTH} nested values")


def dumps(value: object) -> bytes:
    """Write a value. Raises ValueError or TypeError for one that is no JSON."""
    try:
        return orjson.dumps(value)
    except TypeError:  # an integer of more than 64 bits, or deeper than 254 levels
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


def canonical(value: object) -> str:
    """Return one text for all spellings of a value that a JSON round trip may give it.

    Keys are sorted. A number stands for its double, the only kind of number in JavaScript, whose
    clients write 1000.0 as 1000, -0.0 as 0, and integers from 2**53 on with other digits.
    """
    return json.dumps(_with_doubles(value), sort_keys=True)


def _with_doubles(value: object) -> object:
    if isinstance(value, dict):
        return {key: _with_doubles(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_doubles(each) for each in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value) + 0.0  # -0.0 + 0.0 is 0.0
        except OverflowError:
            return None  # JavaScript reads infinity, and writes null
    return value


def _children(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _without_lone_surrogates(value: object) -> object:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {
            _without_lone_surrogates(key): _without_lone_surrogates(each)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [_without_lone_surrogates(each) for each in value]
    return value


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not finite")
    return number


def _refuse(text: str) -> object:
    raise ValueError(f"{text} is no JSON")
