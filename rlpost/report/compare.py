"""Several runs over each other as a page. Pure: facts in, HTML text out; the invariants are those of ``page``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rlpost.report.facts import RunFacts
from rlpost.report.html import Cell, card, document, filter_tools, key, section, table, text
from rlpost.report.page import key_figures, plots
from rlpost.report.panels import compared_panels
from rlpost.report.svg import NUM_COLOURS
from rlpost.report.timeline import timeline


def compare_page(runs: Sequence[RunFacts]) -> str:
    """The whole page."""
    names = labels(runs)
    heading = f"<header><h1>{text(' · '.join(names))}</h1></header>"
    colours = key([(name, f"c{number % NUM_COLOURS}") for number, name in enumerate(names)])
    panels = compared_panels([(name, run.lines) for name, run in zip(names, runs, strict=True)])
    parts = [
        section("figures", "Figures", card(f'<div class="scroll">{_figures(names, runs)}</div>')),
        section("plots", "Plots", plots(panels)),
        section("recipe", "Settings that differ", _settings(names, runs)),
    ]
    return document("compare " + ", ".join(names), [heading, colours, *parts])


def labels(runs: Sequence[RunFacts]) -> list[str]:
    """The names of runs; folders where a name stands for several."""
    count = Counter(run.name for run in runs)
    return [run.name if count[run.name] == 1 else run.folder for run in runs]


def _figures(names: Sequence[str], runs: Sequence[RunFacts]) -> str:
    figures = []
    for run in runs:
        of_run = {name: value for value, name in key_figures(run.lines, run.setting("rollout.num_rollout"))}
        told = timeline(run.events, run.written)
        if told is not None:
            of_run |= {"attempts": str(len(told.attempts)), "preemptions": str(told.num_preemptions)}
        figures.append(of_run)
    wanted = list(dict.fromkeys(name for of_run in figures for name in of_run))
    rows: list[list[Cell]] = [[name, *(of_run.get(name, "") for of_run in figures)] for name in wanted]
    return table(("", *names), rows)


def _settings(names: Sequence[str], runs: Sequence[RunFacts]) -> str:
    values = [{one.key: one.value for one in run.settings} for run in runs]
    keys = list(dict.fromkeys(one for of_run in values for one in of_run))
    rows: list[list[Cell]] = []
    for one in keys:
        of_runs = [of_run.get(one, "") for of_run in values]
        if len(set(of_runs)) > 1:
            rows.append([one, *((value, "wide") for value in of_runs)])
    if not rows:
        return '<p class="soft">None: these runs have the same recipe.</p>'
    shown = table(("setting", *names), rows, body="settings", attributes=["data-row"] * len(rows))
    return filter_tools("settings", "search settings") + card(f'<div class="scroll">{shown}</div>')
