"""Render settings as text: the resolved tree with origins, and the reference of all flags. Pure.

Input: a ``Loaded`` tree, or nothing.
Output: TOML that loads back to the same settings; Markdown for ``docs/settings.md``.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Mapping, Sequence

from pydantic.fields import FieldInfo

from rlpost.config.flags import fields, flag, groups, kinds
from rlpost.config.groups.base import Group, is_path
from rlpost.config.load import Loaded

_WIDTH = 48


def resolved(loaded: Loaded, comments: Mapping[str, Sequence[str]] | None = None) -> str:
    """Every setting as one line of TOML, followed by the origin of its value.

    A setting without a value becomes a comment, because TOML has no null. The text, used as a
    recipe, gives the same tree. ``comments`` are additional lines by table.
    """
    blocks = []
    for name in groups():
        group: Group = getattr(loaded.config, name)
        lines = [f"[{name}]"]
        for key, value in {**dict(group), **(group.model_extra or {})}.items():
            origin = loaded.origins.get(f"{name}.{key}", "default")
            text = f"# {key} is not set" if value is None else f"{key} = {toml_value(value)}"
            lines.append(f"{text:<{_WIDTH}}  # {_one_line(origin)}")
        blocks.append("\n".join([*lines, *(comments or {}).get(name, ())]))
    return "\n\n".join(blocks) + "\n"


def toml_value(value: object) -> str:
    """A value as TOML; entries of a table that are None are left out.

    >>> toml_value(("a", 1, True))
    '["a", 1, true]'
    """
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


def reference() -> str:
    """All settings as a Markdown page."""
    count = len(fields())
    lines = [
        "# Settings",
        "",
        "<!-- Written by tools/make_docs.py from rlpost/config/groups; change it there. -->",
        "",
        f"{count} settings in {len(groups())} tables. A TOML key, its flag and the Config attribute share one name:",
        "`rollout_batch_size` in `[rollout]` of a recipe is the flag `--rollout-batch-size`. Flags override the",
        "cluster profile (`--cluster`), which overrides the recipe, which overrides the model file (`--model`), which",
        "overrides the defaults. `none` unsets a value where the default is no value; a flag without words (`[]` in a",
        "file) empties a list. `python -m rlpost check RECIPE --print-config` prints every value and its origin.",
    ]
    for name, group in groups().items():
        lines += [
            "",
            f"## [{name}]",
            "",
            _paragraph(group.__doc__),
        ]
        if group.model_fields:
            lines += ["", "| flag | value | default | |", "|---|---|---|---|"]
        for key, field in group.model_fields.items():
            cells = (f"`{flag(key)}`", _type(field), _default(field), _paragraph(field.description))
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _paragraph(text: str | None) -> str:
    return " ".join((text or "").split())


def _one_line(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _type(field: FieldInfo) -> str:
    """The type of a setting in plain words."""
    if is_path(field):
        return "path"
    words = []
    for kind in kinds(field.annotation):
        if typing.get_origin(kind) is typing.Literal:
            words += [f"`{word}`" for word in typing.get_args(kind)]
        elif typing.get_origin(kind) is tuple:
            words.append(f"{_NAMES.get(typing.get_args(kind)[0], 'text')}, any number")
        elif typing.get_origin(kind) is dict:
            words.append("table")
        else:
            words.append(_NAMES.get(kind, getattr(kind, "__name__", str(kind))))
    return ", ".join(words)


_NAMES: dict[object, str] = {int: "whole number", float: "number", str: "text", bool: "switch"}


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True) if not field.is_required() else None
    return "" if default in (None, "", (), {}) else f"`{toml_value(default)}`"
