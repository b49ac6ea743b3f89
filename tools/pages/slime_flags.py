"""docs/slime-flags.md: every flag of slime and its counterpart.

Input: the list of slime's flags, the settings tree, ``rlpost.compat.slime.flags``. Output: Markdown.
"""

from __future__ import annotations

from pathlib import Path

from rlpost.cli.secret_flags import KEY_FLAGS
from rlpost.compat.slime.flags import LACKING
from rlpost.config import pass_through
from rlpost.config.flags import fields, flag

LIST = Path(__file__).with_suffix(".txt")
_BEGIN = """\
# Flags of slime

<!-- Written by tools/make_docs.py from rlpost/compat/slime/flags.py; change it there. -->

The flags that [slime](https://github.com/THUDM/slime) adds to those of Megatron-LM and SGLang, at commit
624b824 of 21 August 2026. A flag that rlpost accepts means the same in both. Any other is an error with
the replacement in the last table: no flag is accepted and ignored. Megatron-LM's own flags and
`--sglang-*` are passed through ([actor](actor.md), [engines](engines.md)).
"""


def slime_flags() -> list[str]:
    """The names of slime's flags, without dashes."""
    return [line for line in LIST.read_text().splitlines() if line and not line.startswith("#")]


def slime_flags_page() -> str:
    """The page."""
    names = slime_flags()
    own = [name for name in names if name.replace("-", "_") in fields() or f"--{name}" in KEY_FLAGS]
    passed = [name for name in names if name not in own and pass_through.owner(_key(name), ())]
    lacking = [name for name in names if name in LACKING]
    lines = [_BEGIN]
    lines += [f"## The same here ({len(own)})\n", _listed(own), ""]
    lines += [f"## Passed to Megatron-core or SGLang ({len(passed)})\n", _listed(passed), ""]
    lines += [f"## Not here ({len(lacking)})\n", "| flag | what to do |", "|---|---|"]
    lines += [f"| `{flag(name)}` | {_cell(LACKING[name])} |" for name in lacking]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    return name.replace("-", "_")


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{flag(name)}`" for name in names)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
