"""docs/slime-flags.md: every flag of slime and of Megatron-LM, and its counterpart.

Input: the lists of these flags, the settings tree, ``rlpost.extensions.slime.flags``,
``rlpost.config.published_flags``. Output: Markdown.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rlpost.cli.secret_file import KEY_FLAGS
from rlpost.config import pass_through
from rlpost.config.flags import fields, flag
from rlpost.config.megatron_options import OURS
from rlpost.config.model_arguments import NAMES
from rlpost.config.other_flags import ABBREVIATIONS
from rlpost.config.published_flags import (
    FALSE_OF_FIELD,
    OTHER_NAME_OF_FIELD,
)
from rlpost.extensions.slime.flags import LACKING, without_effect
from rlpost.extensions.slime.megatron_flags import ACCEPTED, REFUSED

LIST = Path(__file__).with_suffix(".txt")
MEGATRON_LIST = LIST.with_name("megatron_flags.txt")
_BEGIN = """\
# Flags of slime and Megatron-LM

<!-- Written by tools/make_docs.py from rlpost/extensions/slime/flags.py,
megatron_flags.py beside it, and rlpost/config/published_flags.py; change it there. -->

The flags that [slime](https://github.com/THUDM/slime) adds to those of Megatron-LM and SGLang, at commit
624b824 of 21 August 2026, then those of Megatron-LM's training program at core_v0.16.1. A flag that is a
setting means the same in both. A flag without effect here is accepted, and a line on standard error says
why. A refused flag is an error that says what to use instead; all of a command line are named at once.
`--sglang-*` is passed to SGLang ([engines](engines.md)).
"""


def slime_flags() -> list[str]:
    """The names of slime's flags, without dashes."""
    return [line for line in LIST.read_text().splitlines() if line and not line.startswith("#")]


def megatron_flags() -> list[str]:
    """The names of Megatron-LM's flags, without dashes."""
    return [line for line in MEGATRON_LIST.read_text().splitlines() if not line.startswith("#")]


def slime_flags_page() -> str:
    """The page."""
    names = slime_flags()
    own = [name for name in names if _is_setting(name)]
    passed = [name for name in names if name not in own and pass_through.owner(_key(name), ())]
    unused = {name: note for name in names if (note := without_effect(name))}
    refused = {name: LACKING[name] for name in names if name in LACKING and name not in unused}
    lines = [_BEGIN, f"## slime: the same here ({len(own)})\n", _listed(own), ""]
    lines += [f"## slime: passed to Megatron-core or SGLang ({len(passed)})\n", _listed(passed), ""]
    lines += [f"## slime: without effect, accepted ({len(unused)})\n", *_table("why", unused), ""]
    lines += [f"## slime: refused ({len(refused)})\n", *_table("what to do", refused), ""]
    return "\n".join([*lines, *_megatron_lines()]) + "\n"


def _megatron_lines() -> list[str]:
    names = [name for name in megatron_flags() if name not in LACKING]
    settings = [name for name in names if _is_setting(name)]
    fields_of = {name: f"`{field} = false`" for name, field in FALSE_OF_FIELD.items()}
    fields_of |= {name: f"`{field}`" for name, field in OTHER_NAME_OF_FIELD.items()}
    unused = {name: ACCEPTED[name] for name in names if name in ACCEPTED}
    refused = {name: REFUSED[name] for name in names if name in REFUSED}
    others = {*settings, *fields_of, *unused, *refused, *ABBREVIATIONS}
    passed = [name for name in names if name not in others and _key(name) not in OURS]
    refused |= {name: f"it follows from {OURS[_key(name)]}" for name in names if _key(name) in OURS}
    refused |= {name: f"use {ABBREVIATIONS[name][0]}" for name in names if name in ABBREVIATIONS}
    refused = {name: text for name, text in refused.items() if name not in {*settings, *unused}}
    return [
        *(f"## Megatron-LM: settings ({len(settings)})\n", _listed(settings), ""),
        *(f"## Megatron-LM: fields of Megatron-core ({len(passed)})\n", _listed(passed), ""),
        f"## Megatron-LM: fields under another name ({len(fields_of)})\n",
        *(*_table("field", fields_of), ""),
        f"## Megatron-LM: without effect, accepted ({len(unused)})\n",
        *(*_table("why", unused), ""),
        *(f"## Megatron-LM: refused ({len(refused)})\n", *_table("what to do", refused)),
    ]


def _is_setting(name: str) -> bool:
    return _key(name) in fields() or _key(name) in NAMES or f"--{name}" in KEY_FLAGS


def _table(title: str, texts: Mapping[str, str]) -> list[str]:
    rows = [f"| `{flag(name)}` | {_cell(text)} |" for name, text in texts.items()]
    return [f"| flag | {title} |", "|---|---|", *rows]


def _key(name: str) -> str:
    return name.replace("-", "_")


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{flag(name)}`" for name in names)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
