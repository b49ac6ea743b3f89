"""Describe values that the settings refuse, from the faults that pydantic finds. Pure."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Mapping, Sequence

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from rlpost.config.flags import flag, groups, kinds
from rlpost.config.groups.engines import EngineGroup, EnginesConfig
from rlpost.config.toml_faults import spelling
from rlpost.config.wording import COMMAND_LINE, listed, near_path, value_text
from rlpost.errors import suggestion

_PLAIN = {
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_type": "must be a whole number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "string_type": "must be a text",
}
"""pydantic's types of faults, and what is needed."""
_OUT_OF_BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")


def describe_fault(fault: ErrorDetails, origins: Mapping[str, str]) -> str:
    """Describe an invalid value: its flag, the value, its origin, the constraint."""
    where = [str(part) for part in fault["loc"]]
    origin = origins.get(".".join(where[:2]), COMMAND_LINE)
    named = flag(where[1]) if len(where) > 1 else f"[{where[0]}]"
    given = fault["input"]
    text = value_text(given) if isinstance(given, (str, int, float, tuple, list)) else repr(given)
    source = "" if origin == COMMAND_LINE else f" ({near_path(origin)})"
    if where[0] == "engines":
        key = f"{where[2]} {text or repr(text)} in " if len(where) > 2 else ""
        return f"{key}[{'.'.join(where[:2])}]{source}: {_needed(fault)}"
    return f"{named} {text or repr(text)}{source}: {_needed(fault)}"


def _needed(fault: ErrorDetails) -> str:
    """Return the constraint in plain English."""
    field = _field(fault["loc"])
    limits = _limits(field) if field is not None else ""
    if limits and fault["type"] in _OUT_OF_BOUNDS:
        is_optional = field is not None and type(None) in typing.get_args(field.annotation)
        return f"must be {limits}" + ("; none unsets it" if is_optional else "")
    plain = spelling(fault["type"], fault["input"]) or _PLAIN.get(fault["type"])
    if plain is not None:
        return plain + (f", {limits}" if limits else "")
    if fault["type"] == "literal_error" and field is not None:
        words = _words(field)
        return f"must be {listed(words)}{suggestion(str(fault['input']), words)}"
    message: str = fault["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return message[0].lower() + message[1:]


def _field(place: Sequence[object]) -> FieldInfo | None:
    """The setting at a place of the tree."""
    group: type[BaseModel] | None = groups().get(str(place[0])) if len(place) > 1 else None
    if group is EnginesConfig:
        return EngineGroup.model_fields.get(str(place[2])) if len(place) > 2 else None
    return None if group is None else group.model_fields.get(str(place[1]))


def _words(field: FieldInfo) -> list[str]:
    literal = [
        kind for kind in kinds(field.annotation) if typing.get_origin(kind) is typing.Literal
    ]
    return [str(word) for kind in literal for word in typing.get_args(kind)]


def _limits(field: FieldInfo) -> str:
    """``1 or more``, ``more than 0 and at most 1``: the bounds that a number has."""
    found = _bounds([*field.metadata, field.annotation])
    is_whole = int in _numbers(field.annotation)
    texts = []
    if (low := found.get("gt")) is not None:
        texts.append(f"{low + 1} or more" if is_whole else f"more than {low:g}")
    if (low := found.get("ge")) is not None:
        texts.append(f"{int(low) if is_whole else format(low, 'g')} or more")
    if (high := found.get("lt")) is not None:
        texts.append(f"at most {high - 1}" if is_whole else f"less than {high:g}")
    if (high := found.get("le")) is not None:
        texts.append(f"at most {high:g}")
    unit = " bytes" if (field.description or "").startswith("Bytes") and texts else ""
    return " and ".join(texts) + unit


def _bounds(parts: Iterable[object]) -> dict[str, float]:
    """The bounds in the metadata of a field, or of a part of its annotation."""
    found: dict[str, float] = {}
    for part in parts:
        inner = [
            *getattr(part, "__metadata__", ()),
            *typing.get_args(part),
            *getattr(part, "metadata", ()),
        ]
        found |= _bounds([one for one in inner if not isinstance(one, str)]) if inner else {}
        for name in ("gt", "ge", "lt", "le"):
            if (bound := getattr(part, name, None)) is not None and not callable(bound):
                found[name] = bound
    return found


def _numbers(annotation: object) -> set[type]:
    """Return the plain types within an annotation."""
    inner = typing.get_args(annotation)
    if inner:
        return set().union(*map(_numbers, inner))
    return {annotation} if isinstance(annotation, type) else set()
