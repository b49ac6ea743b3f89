"""Put the report of a run where people look for it: ``RUN/report/report.html``, and its recipe beside it.

In: a run folder. Out: two files, each whole at any moment.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from rlpost.config.show import toml_value
from rlpost.report.facts import Setting, read_facts
from rlpost.report.page import report_page
from slurm.run_folder import RunFolder, write_atomic

logger = logging.getLogger(__name__)

FILE_NAME, RECIPE_NAME = "report.html", "recipe.toml"


def write_report(run: RunFolder) -> Path:
    """Write the page of what is known now, and the recipe that its last section names. Raises OSError."""
    run.report.mkdir(mode=0o700, exist_ok=True)
    facts = read_facts(run)
    path = run.report / FILE_NAME
    write_atomic(run.report / RECIPE_NAME, recipe(facts.settings))
    write_atomic(path, report_page(facts))
    return path


def try_to_write_report(run: RunFolder) -> None:
    """The same while training waits: whatever is wrong with the page is a warning, for the run must go on."""
    try:
        write_report(run)
    except Exception as error:
        logger.warning("no report this time: %s: %s", type(error).__name__, error)


def recipe(settings: Sequence[Setting]) -> str:
    """What differs from the defaults, as a recipe that comes to the same settings; TOML has no null, and nothing that
    a default sets can be unset by one."""
    tables: dict[str, list[str]] = {}
    for one in settings:
        value = json.loads(one.value)
        if one.differs and value is not None:
            table, _, key = one.key.partition(".")
            tables.setdefault(table, []).append(f"{key} = {toml_value(value)}")
    return "\n".join(f"[{table}]\n" + "\n".join(lines) + "\n" for table, lines in tables.items())
