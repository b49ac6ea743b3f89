"""docs/settings.md: every setting with its flag, type, default and meaning.

Input: the tree of settings, whose docstrings are the meanings. Output: the text of the page.
"""

from __future__ import annotations

import typing

from pydantic.fields import FieldInfo

from rlpost.config.flags import fields, flag, groups, kinds
from rlpost.config.groups.base import is_path
from rlpost.config.groups.engines import EngineGroup, EnginesConfig
from rlpost.config.show import toml_value

_NAMES: dict[object, str] = {int: "whole number", float: "number", str: "text", bool: "switch"}


def settings_page() -> str:
    """All settings as a Markdown page."""
    count = len(fields())
    lines = [
        "# Settings",
        "",
        "<!-- Written by tools/make_docs.py from rlpost/config/groups; change it there. -->",
        "",
        f"{count} settings in {len(groups())} tables. A TOML key, its flag and the Config attribute share one name:",
        "`rollout_batch_size` in `[rollout]` of a recipe is the flag `--rollout-batch-size`. Flags override the",
        "cluster profile (`--cluster`), which overrides the recipe, which overrides the defaults. `none` unsets a",
        "value where the default is no value; a flag without words (`[]` in a file) empties a list. Megatron's",
        "MODEL_ARGS (`--num-layers`, ...) are flags too, which must [agree with config.json](actor.md#model_args).",
        "`python -m rlpost check RECIPE --print-config` prints every value and its origin.",
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
        lines += [_row(flag(key), field) for key, field in group.model_fields.items()]
        if group is EnginesConfig:
            lines += ["", "| key of [engines.NAME] | value | default | |", "|---|---|---|---|"]
            lines += [_row(key, field) for key, field in EngineGroup.model_fields.items()]
    return "\n".join(lines) + "\n"


def _row(name: str, field: FieldInfo) -> str:
    cells = (f"`{name}`", _type(field), _default(field), _paragraph(field.description))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _paragraph(text: str | None) -> str:
    return " ".join((text or "").split())


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


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True) if not field.is_required() else None
    return "" if default in (None, "", (), {}) else f"`{toml_value(default)}`"
