"""What ``rlpost submit --resume`` changes in a run, and what that costs. Pure.

Input: the text of ``run.json`` of the earlier submission, and the settings now. Output: notes, one
line each, before anything is submitted.
"""

from __future__ import annotations

from rlpost.config.extensions import command
from rlpost.config.load import read_dump
from rlpost.config.masking import mask
from rlpost.config.tree import Config
from rlpost.config.wording import value_text
from rlpost.durable.result_settings import compare, result_settings

MAX_SHOWN = 12
GENERATED = (
    "these decide what is generated, so the answers in the journal are not used and are generated "
    "again"
)
TRAINED = (
    "these decide how answers are trained, so what newer weights than the checkpoint's generated is "
    "generated again"
)


def change_notes(earlier: str, config: Config) -> list[str]:
    """Return what a resume changes; empty if nothing, or if ``earlier`` is damaged."""
    try:
        before, gone = read_dump(earlier)
    except (ValueError, TypeError, AttributeError):  # damaged, or of another version
        return []
    old, new = before.model_dump(mode="json"), config.model_dump(mode="json")
    changed = [
        (table, key)
        for table, values in new.items()
        if isinstance(values, dict)
        for key, value in values.items()
        if old.get(table, {}).get(key) != value
    ]
    if not changed:
        return gone
    lines = [_line(key, old[table].get(key), new[table][key]) for table, key in changed]
    rest = len(lines) - MAX_SHOWN
    more = f" and {rest} more" if rest > 0 else ""
    notes = [*gone, f"--resume changes {', '.join(lines[:MAX_SHOWN])}{more}"]
    results = compare(result_settings(before).to_json(), result_settings(config).to_json())
    for named, words in ((results.generated, GENERATED), (results.trained, TRAINED)):
        if named:
            keys = ", ".join(line.partition(": ")[0] for line in named[:MAX_SHOWN])
            notes.append(f"{keys}: {words}; {command('journal RUN')} shows how many")
    return notes


def _line(key: str, before: object, now: object) -> str:
    values = [value_text(mask(key, value)) or "none" for value in (before, now)]
    return f"--{key.replace('_', '-')} {values[0]} -> {values[1]}"
