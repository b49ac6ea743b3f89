"""docs/migrating.md: how to come from slime, verl or NeMo-RL, with a table of their keys.

Input: ``migrating.md`` beside this file (the text), and the rows of ``rlpost.extensions.importing.peers``. Output:
Markdown. A line ``{{verl}}`` or ``{{NeMo-RL}}`` of the text is replaced by that stack's tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlpost.config.flags import flag
from rlpost.config.show import toml_value
from rlpost.extensions.importing.imported import flags_of, imported
from rlpost.extensions.importing.peers import row
from rlpost.extensions.importing.peers.nemo_rl import NEMO_RL
from rlpost.extensions.importing.peers.row import Row, Stack
from rlpost.extensions.importing.peers.verl import VERL

TEXT = Path(__file__).with_suffix(".md")


def migrating_page() -> str:
    """Return the page."""
    text = TEXT.read_text()
    for stack in (VERL, NEMO_RL):
        text = text.replace(f"{{{{{stack.name}}}}}", "\n".join(_tables(stack)))
    return text


def _tables(stack: Stack) -> Iterator[str]:
    yield f"Keys of {stack.name} with a setting here:"
    yield ""
    yield f"| {stack.name} | rlpost | |"
    yield "|---|---|---|"
    for one in stack.rows:
        if _sets(one):
            here = " ".join(f"`{flag(name)}`" for name in one.settings) or "by its name"
            yield f"| {_keys(one)} | {here} | {_cell(one.note)} |"
    yield ""
    yield f"Defaults of {stack.name} that are others here; an import sets them:"
    yield ""
    yield f"| {stack.name} | its default | flags |"
    yield "|---|---|---|"
    for answer in imported((), row.defaults(stack, {})).defaults:
        value = "null" if answer.value is None else toml_value(answer.value)
        yield f"| `{answer.key}` | `{value}` | `{flags_of(answer.settings)}` |"
    yield ""
    yield f"Keys of {stack.name} that need no setting, or have none, and what to do:"
    yield ""
    yield f"| {stack.name} | why |"
    yield "|---|---|"
    for one in stack.rows:
        if not _sets(one):
            yield f"| {_keys(one)} | {_cell(one.note)} |"


def _sets(one: Row) -> bool:
    return bool(one.settings) or one.note.startswith(("the option", "the setting"))


def _keys(one: Row) -> str:
    return "<br>".join(f"`{key}`" for key in one.keys)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
