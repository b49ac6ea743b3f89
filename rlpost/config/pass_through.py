"""Pass flags that are not settings through to SGLang or Megatron-core by name.

Input: the arguments of a command line. Output: the arguments of rlpost, and by group the values of
the others: true for a flag without a value, a list for several values.

Names of Megatron-core's options are checked where it is installed, else by the driver before
training. Names and values of SGLang's options are always checked (``rlpost.rollout.server_args``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rlpost.config.abbreviations import meant
from rlpost.config.megatron_options import ALIASES, OURS, option_names
from rlpost.config.server_arg_table import server_arg_table
from rlpost.errors import suggestion

ALIKE = 0.9
"""Similarity from which an unknown flag counts as a misspelt setting.

Used only if Megatron-core is not installed.
"""


def split(
    words: Sequence[str], known: Collection[str]
) -> tuple[list[str], dict[str, dict[str, object]]]:
    """Separate pass-through flags and their values from ``words``."""
    rest: list[str] = []
    found: dict[str, dict[str, list[str]]] = {}
    values: list[str] | None = None
    for word in words:
        if not word.startswith("--"):
            target = rest if values is None else values
            target.append(word)
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
    extras: dict[str, dict[str, object]] = {}
    for group, extra in found.items():
        extras[group] = {key: _values(key, texts) for key, texts in extra.items()}
    return rest, extras


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
    return "megatron" if key in names or key in ALIASES or key in OURS else None


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
