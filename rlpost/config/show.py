"""Render settings as TOML with the origin of each value. Pure.

Input: a ``Loaded`` tree. Output: TOML that loads back to the same settings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from pydantic import BaseModel

from rlpost.config.flags import groups
from rlpost.config.groups.base import Group
from rlpost.config.load import Loaded
from rlpost.config.masking import mask

_WIDTH = 48


def resolved(
    loaded: Loaded,
    comments: Mapping[str, Sequence[str]] | None = None,
    *,
    is_private: bool = False,
) -> str:
    """Every setting as one line of TOML, followed by the origin of its value.

    A setting without a value becomes a comment, because TOML has no null. The text, used as a
    recipe, gives the same tree, unless it holds masked values (``masking``), which are refused.
    ``comments`` are additional lines by table. With ``is_private`` no value is masked: for a file
    that only the user can read.
    """
    blocks = []
    for name in groups():
        group: Group = getattr(loaded.config, name)
        lines = [f"[{name}]"]
        for key, value in {**dict(group), **(group.model_extra or {})}.items():
            origin = loaded.origins.get(f"{name}.{key}", "default")
            if isinstance(value, BaseModel):  # a group of engines
                value = value.model_dump(mode="json")
            shown = toml_value(value if is_private else mask(key, value))
            text = f"# {key} is not set" if value is None else f"{key} = {shown}"
            lines.append(f"{text:<{_WIDTH}}  # {one_line(origin)}")
        blocks.append("\n".join([*lines, *(comments or {}).get(name, ())]))
    return "\n\n".join(blocks) + "\n"


def toml_value(value: object) -> str:
    """A value as TOML; entries of a table that are None are left out.

    >>> toml_value(("a", 1, True))
    '["a", 1, true]'
    """
    if isinstance(value, BaseModel):  # a group of engines
        return toml_value(value.model_dump(mode="json"))
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # otherwise a JSON string is a TOML string
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        entries = [
            f"{toml_value(key)} = {toml_value(entry)}"
            for key, entry in value.items()
            if entry is not None
        ]
        return "{" + ", ".join(entries) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return repr(value)


def one_line(text: str) -> str:
    """Return a text with ``?`` for each letter that does not print, such as an end of line."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
