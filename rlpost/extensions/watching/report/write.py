"""Write the report of a run, ``RUN/report/report.html``, and the recipe beside it.

Input: a run folder. Output: two files, each replaced atomically.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from common.files import write_atomic
from common.run_folder import RunFolder
from rlpost.config.show import toml_value
from rlpost.extensions.watching.report.page import report_page
from rlpost.extensions.watching.report.run_facts import RecipeSetting, read_facts

RECIPE_NAME = "recipe.toml"


def write_report(run: RunFolder) -> Path:
    """Write the page, and the recipe that its last section names. Raises OSError."""
    run.report.mkdir(mode=0o700, exist_ok=True)
    facts = read_facts(run)
    write_atomic(run.report / RECIPE_NAME, recipe(facts.settings))
    write_atomic(run.report_page, report_page(facts))
    return run.report_page


def recipe(settings: Sequence[RecipeSetting]) -> str:
    """Return the settings that differ from their defaults as a recipe.

    The recipe resolves to the same settings. TOML has no null, so a value that a default sets
    cannot be unset by a recipe.
    """
    tables: dict[str, list[str]] = {}
    for one in settings:
        value = json.loads(one.value)
        if one.differs and value is not None:
            table, _, key = one.key.partition(".")
            tables.setdefault(table, []).append(f"{key} = {toml_value(value)}")
    return "\n".join(f"[{table}]\n" + "\n".join(lines) + "\n" for table, lines in tables.items())
