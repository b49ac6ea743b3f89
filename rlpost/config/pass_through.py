"""Pass flags that are not settings through to SGLang or Megatron-core by name.

Input: words of a command line. Output: the words that are ours, and by group what the others give: no value is true,
several are a list. Megatron-core's names are checked where it is installed, else by the driver before training; names
and values of SGLang's always are (``rlpost.rollout.server_args``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from rlpost.config.abbreviations import meant
from rlpost.config.megatron_options import ALIASES, OURS, option_names
from rlpost.config.server_arg_table import server_arg_table
from rlpost.errors import suggestion

ALIKE = 0.9
"""How alike a word may be to one of ours before it counts as a misspelling of it, where nothing else can tell."""


def split(words: Sequence[str], known: Collection[str]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Take each ``--X [values]`` that is none of the ``known`` flags and has an owner out of ``words``."""
    rest: list[str] = []
    found: dict[str, dict[str, list[str]]] = {}
    values: list[str] | None = None
    for word in words:
        if not word.startswith("--"):
            (rest if values is None else values).append(word)
            continue
        name, given, value = word.partition("=")
        key = name[2:].replace("-", "_")
        group = None if name in known else owner(key, known)
        values = None
        if group is None:
            rest.append(word)
        else:
            values = [value] if given else []
            found.setdefault(group, {})[ALIASES.get(key, key)] = values
    return rest, {group: {key: _values(key, texts) for key, texts in extra.items()} for group, extra in found.items()}


def owner(key: str, known: Collection[str]) -> str | None:
    """The group that takes a key which is no setting of ours; None when nobody does.

    Without Megatron-core here whatever is not like a flag of ours may be Megatron's.
    """
    if key.startswith("sglang_"):
        return "sglang"
    names = option_names()
    if meant(key) is not None:  # what other programs call a setting of ours
        return None
    if names is None:
        return None if suggestion("--" + key.replace("_", "-"), known, cutoff=ALIKE) else "megatron"
    return "megatron" if key in names or key in ALIASES or key in OURS else None


def _values(key: str, texts: Sequence[str]) -> Any:
    """What a flag gives: true without values, one value, or a list."""
    if not texts:
        return True
    parsed = list(texts) if _is_text(key) else [_literal(text) for text in texts]
    return parsed[0] if len(parsed) == 1 else parsed


def _is_text(key: str) -> bool:
    """Whether SGLang takes a text, so that ``--sglang-revision 007`` stays what it is."""
    table = server_arg_table()
    arg = table.args.get(table.name_of(key.removeprefix("sglang_"))) if key.startswith("sglang_") else None
    return arg is not None and arg.kind in ("str", "any")


def _literal(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(text.lower(), text)
