"""Pass flags that are not settings through to SGLang or Megatron-core by name.

Input: the arguments of a command line. Output: the arguments of rlpost, and by group the values of
the others: true for a flag without a value, a list for several values.

Names of Megatron-core's options are checked where it is installed, else by the driver before
training. Names and values of SGLang's options are always checked (``rlpost.engines.server_args``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from rlpost.config.extensions import without_effect
from rlpost.config.megatron_options import OURS, option_names
from rlpost.config.other_flags import meant
from rlpost.config.published_flags import (
    FALSE_OF_FIELD,
    OTHER_NAME_OF_FIELD,
    OTHER_NAME_OF_SETTING,
    SPEC,
    SPECS_OF_FAMILIES,
)
from rlpost.config.server_arg_values import server_arg_table
from rlpost.errors import suggestion

ALIKE = 0.9
"""Similarity from which an unknown flag counts as a misspelt setting.

Used only if Megatron-core is not installed.
"""


@dataclass(slots=True)
class Split:
    """The words of a command line by what becomes of them."""

    own: list[str] = field(default_factory=list)
    """The flags of rlpost with their values, and words that no flag takes."""
    passed: dict[str, dict[str, object]] = field(default_factory=dict)
    """Values for SGLang and Megatron-core by group and name."""
    unknown: list[str] = field(default_factory=list)
    """Flags without a meaning; their values are dropped."""
    refused: list[str] = field(default_factory=list)
    """A line for each flag of Megatron-LM that is refused."""
    notes: list[str] = field(default_factory=list)
    """A line for each accepted flag that has no effect here."""


def split(words: Sequence[str], known: Collection[str], switches: Collection[str] = ()) -> Split:
    """Separate the words of a command line.

    Args:
        words: the command line without the recipe.
        known: the flags of rlpost.
        switches: those of them with a truth value; ``--no-X`` turns ``--X`` off.
    """
    result = Split()
    texts: dict[str, dict[str, list[str]]] = {}
    values = result.own
    for word in words:
        if not word.startswith("--"):
            values.append(word)
            continue
        name, equals, value = word.partition("=")
        name = OTHER_NAME_OF_SETTING.get(name[2:], name)
        switch = name.replace("--no-", "--", 1)
        if name in known:
            result.own.append(f"{name}{equals}{value}")
            values = result.own
        elif switch in switches and not equals:
            result.own.append(f"{switch}=false")
            values = result.own
        else:
            values = [value] if equals else []
            _sort(name, values, known=known, result=result, texts=texts)
    specs = texts.pop("", {}).get("spec", [])
    if any(word.startswith(SPECS_OF_FAMILIES) for word in specs[:1]):
        result.notes.append(f"--spec has no effect: {SPEC}")
    elif specs:
        result.refused.append(
            f"--spec {' '.join(specs)}: layers cannot be replaced; write a family (docs/extending.md)"
        )
    for group, options in texts.items():
        result.passed[group] = {
            key: _values(key, option_texts) for key, option_texts in options.items()
        }
    return result


def _sort(
    flag: str,
    values: list[str],
    *,
    known: Collection[str],
    result: Split,
    texts: dict[str, dict[str, list[str]]],
) -> None:
    """Add a flag of another program; ``values`` takes the words that follow it."""
    name = flag[2:].replace("_", "-")
    key = OTHER_NAME_OF_FIELD.get(name, name.replace("-", "_"))
    if name in FALSE_OF_FIELD:
        values.append("false")
        texts.setdefault("megatron", {})[FALSE_OF_FIELD[name]] = values
    elif name == "spec":
        texts.setdefault("", {})[name] = values
    elif note := without_effect(name):
        result.notes.append(f"{flag} has no effect: {note}")
    elif name in OTHER_NAME_OF_FIELD:
        texts.setdefault("megatron", {})[key] = values
    elif group := owner(key, known):
        texts.setdefault(group, {})[key] = values
    else:
        result.unknown.append(flag)


def owner(key: str, known: Collection[str]) -> str | None:
    """Return the group of a pass-through option, or None if it has none.

    If Megatron-core is not installed, a name that does not resemble a flag of rlpost counts as
    Megatron's.
    """
    if meant(key) is not None:  # another program's name for a setting
        return None
    if key.startswith("sglang_"):
        return "sglang"
    names = option_names()
    if names is None:
        return None if suggestion("--" + key.replace("_", "-"), known, cutoff=ALIKE) else "megatron"
    return "megatron" if key in names or key in OURS else None


def _values(key: str, texts: Sequence[str]) -> object:
    """Return the value of a flag: true without values, one value, or a list."""
    if not texts:
        return True
    parsed = list(texts) if _is_text(key) else [_literal(text) for text in texts]
    return parsed[0] if len(parsed) == 1 else parsed


def _is_text(key: str) -> bool:
    """Whether SGLang expects a string, so that ``--sglang-revision 007`` is not converted to 7."""
    if not key.startswith("sglang_"):
        return False
    table = server_arg_table()
    arg = table.args.get(table.name_of(key.removeprefix("sglang_")))
    return arg is not None and arg.kind in ("str", "any")


def _literal(text: str) -> object:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(text.lower(), text)
