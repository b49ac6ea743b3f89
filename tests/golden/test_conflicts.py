"""Settings that exclude each other, and what each check says of them.

``conflicts.md`` holds both the flags (lines that begin with ``$``) and the messages, which
``--update-golden`` rewrites. ``test_mistakes`` covers what newcomers type, through the command line.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

from rlpost.config import flags
from rlpost.config.checks.algorithm import algorithm_problems
from rlpost.config.checks.batch import batch_problems
from rlpost.config.checks.distillation import distillation_problems
from rlpost.config.checks.layout import layout_problems
from rlpost.config.checks.lora import adapter_engine_problems, lora_problems
from rlpost.config.checks.no_effect import no_effect_problems
from rlpost.config.checks.optimizer import optimizer_problems
from rlpost.config.checks.precision import precision_problems
from rlpost.config.checks.rollout import debug_problems, eval_problems, rollout_problems
from rlpost.config.checks.routing import routing_problems
from rlpost.config.load import load
from rlpost.config.tree import Config
from rlpost.extensions.fleet.fleet_checks import fleet_problems

CATALOGUE = "conflicts.md"
CHECKS: dict[str, Callable[[Config], list[str]]] = {
    check.__name__: check
    for check in (
        adapter_engine_problems,
        algorithm_problems,
        batch_problems,
        debug_problems,
        distillation_problems,
        eval_problems,
        fleet_problems,
        layout_problems,
        lora_problems,
        no_effect_problems,
        optimizer_problems,
        precision_problems,
        rollout_problems,
        routing_problems,
    )
}
SECTION = re.compile(r"## `(?P<check>\w+)`(?: with `(?P<given>.*)`)?")
"""The heading of a section: its check, and flags that all of its commands have."""


def config_of(words: str) -> Config:
    values = flags.parse(flags.make_parser("test", ""), shlex.split(words))[1]
    return load([], values, base=Path("/HERE")).config


def named(message: str) -> str:
    """The settings that a message says are in conflict."""
    return re.split(r"[:;]", message)[0]


def test_each_conflict_has_the_one_message_that_was_reviewed(
    golden: Callable[[str, str], None],
) -> None:
    lines: list[str] = []
    check = given = ""
    for line in Path(__file__).with_name(CATALOGUE).read_text().splitlines():
        if section := SECTION.fullmatch(line):
            check, given = section["check"], section["given"] or ""
        if line.startswith("    $ "):
            config = config_of(f"{given} {line.removeprefix('    $ ')}")
            (message,) = CHECKS[check](config)
            lines += [line, f"    {message}"]
            others = [one for other in CHECKS if other != check for one in CHECKS[other](config)]
            assert not [one for one in others if named(one) == named(message)], (line, others)
        elif not line.startswith("    "):
            lines.append(line)
    golden(CATALOGUE, "\n".join(lines) + "\n")


def test_the_catalogue_has_conflicts_for_every_check() -> None:
    text = Path(__file__).with_name(CATALOGUE).read_text()
    sections = {
        match["check"]: section
        for section in text.split("\n\n## ")[1:]
        if (match := SECTION.match(f"## {section}"))
    }
    assert sections.keys() == CHECKS.keys()
    assert all("    $ " in section for section in sections.values())
