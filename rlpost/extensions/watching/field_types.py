"""Compare values from JSON with the types that a dataclass declares. Pure.

Input: a dataclass of numbers, texts, lists, mappings and other such dataclasses, and the values of
its fields, which others may have written. Output: nothing, or the first value of another type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from types import UnionType
from typing import get_args, get_origin, get_type_hints


def check_fields(kind: type, values: Mapping[str, object]) -> None:
    """Raise TypeError unless each field of ``kind`` has a value of the type that it declares."""
    for name, hint in get_type_hints(kind).items():
        if not _fits(values[name], hint):
            raise TypeError(f"{name} is {values[name]!r:.60}")


def _fits(value: object, hint: object) -> bool:
    """Return whether a JSON value has the type of a field."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind is UnionType:
        return any(_fits(value, part) for part in parts)
    if kind is list:
        return isinstance(value, list) and all(_fits(one, parts[0]) for one in value)
    if kind is dict:
        is_dict = isinstance(value, dict)
        return is_dict and all(_fits(one, parts[1]) for one in value.values())  # type: ignore[attr-defined]
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        is_whole = isinstance(value, dict) and value.keys() == hints.keys()
        return is_whole and all(_fits(value[name], one) for name, one in hints.items())  # type: ignore[index]
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value) is hint
