"""Several runs side by side on one page. Pure: facts in, HTML text out."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rlpost.errors import ConfigError
from rlpost.extensions.watching.pace import PACE_STEPS, STEP_S, THROUGHPUT, recent
from rlpost.extensions.watching.report.html import colour_class, curve_points, render
from rlpost.extensions.watching.report.page import key_figures
from rlpost.extensions.watching.report.panels import compared_names, compared_panels, other_panels
from rlpost.extensions.watching.report.run_facts import RunFacts
from rlpost.extensions.watching.series import short
from rlpost.extensions.watching.timeline import hours_of_steps, timeline
from rlpost.observe.writer import eval_rewards


def compare_page(runs: Sequence[RunFacts]) -> str:
    """Return the whole page (``templates/compare.html``)."""
    names = labels(runs)
    lines = [(name, run.lines) for name, run in zip(names, runs, strict=True)]
    main = compared_panels(lines)
    others = other_panels(lines, compared_names(lines))
    return render(
        "compare.html",
        title="compare " + ", ".join(names),
        heading=" · ".join(names),
        names=names,
        colours=[(name, colour_class(number)) for number, name in enumerate(names)],
        figures=figures(runs),
        panels=main,
        others=others,
        num_points=curve_points(main, *(group.panels for group in others)),
        hours=[hours_of_steps(run.events, run.lines) for run in runs],
        settings=differing_settings(runs),
    )


def comparison(runs: Sequence[RunFacts]) -> dict[str, object]:
    """Return the figures of the page for programs.

    Returns: ``runs``, one object a run in the given order (``tokens_per_s`` and ``step_s`` are
    those of ``rlpost.extensions.watching.pace``; None means not known), and ``settings``: for each setting
    that differs its values in that order.
    """
    return {"runs": [_figures_of(run) for run in runs], "settings": differing_settings(runs)}


def _figures_of(run: RunFacts) -> dict[str, object]:
    newest = run.lines[-1] if run.lines else {}
    evals = {}
    for name in eval_rewards(*run.lines):
        evals[name.split("/")[1]] = [line[name] for line in run.lines if name in line]
    history = timeline(run.events, run.written)
    return {
        "name": run.name,
        "folder": run.folder,
        "step": int(newest.get("step", 0)),
        "num_steps": run.num_steps,
        "reward": newest.get("reward/mean"),
        "evals": evals,
        "tokens_per_s": recent(run.lines, THROUGHPUT),
        "step_s": recent(run.lines, STEP_S),
        "num_attempts": len(history.attempts) if history else 0,
        "num_preemptions": history.num_preemptions if history else 0,
        "goodput": asdict(spent) if (spent := run.goodput) is not None else None,
    }


def differing_settings(runs: Sequence[RunFacts]) -> dict[str, list[object]]:
    """The settings in which runs differ; a value is None where a run has no such setting."""
    by_run = []
    for run in runs:
        by_run.append({setting.key: json.loads(setting.value) for setting in run.settings})
    differing = {}
    for key in dict.fromkeys(itertools.chain.from_iterable(by_run)):
        row = [settings.get(key) for settings in by_run]
        if any(value != row[0] for value in row):
            differing[key] = row
    return differing


def labels(runs: Sequence[RunFacts]) -> list[str]:
    """The names of runs; folders where a name stands for several."""
    count = Counter(run.name for run in runs)
    return [run.name if count[run.name] == 1 else run.folder for run in runs]


def figures(runs: Sequence[RunFacts]) -> dict[str, list[str]]:
    """Return the key figures by name, with one value per run; empty where a run has none."""
    by_run = []
    for run in runs:
        run_figures = {name: value for value, name in key_figures(run.lines, run.num_steps)}
        history = timeline(run.events, run.written)
        if history is not None:
            run_figures |= {
                "attempts": str(len(history.attempts)),
                "preemptions": str(history.num_preemptions),
            }
        if (spent := run.goodput) is not None:
            run_figures["goodput"] = spent.headline
            if spent.cost is not None:
                run_figures["cost"] = f"{spent.cost:.2f}"
        by_run.append(run_figures)
    rows = {}
    for name in dict.fromkeys(itertools.chain.from_iterable(by_run)):
        rows[name] = [run_figures.get(name, "") for run_figures in by_run]
    return rows


_FORM = re.compile(r"(?P<name>[^:]+):(?P<sign>[+-])(?P<size>\d+(?:\.\d+)?(?:e-?\d+)?)(?P<share>%?)")


@dataclass(frozen=True, slots=True)
class Gate:
    """A bound on the change of a metric from a baseline.

    Attributes:
        text: as it was given.
        name: a name of ``metrics.jsonl``.
        sign: -1 bounds a decrease, +1 an increase.
        bound: the largest such change that passes, at least 0.
        is_share: the bound is a share of the baseline's magnitude, else in the metric's unit.
    """

    text: str
    name: str
    sign: int
    bound: float
    is_share: bool


@dataclass(frozen=True, slots=True)
class GateOutcome:
    """A gate applied to one run. ``change`` is a share or in the metric's unit, as the bound."""

    gate: str
    run: str
    baseline: float
    value: float
    change: float
    fails: bool

    @property
    def line(self) -> str:
        """The outcome as a line of text."""
        word = "FAILS " if self.fails else "passes"
        shown = f"{self.change:+.3g}"
        if self.gate.endswith("%"):
            shown = f"{self.change * 100:+.3g}%"
        return f"{word} {self.gate}: {short(self.baseline)} -> {short(self.value)} ({shown}), {self.run}"


def parse_gate(text: str) -> Gate:
    """Parse ``reward/mean:-2%`` or ``time/step_s:+1.5``. Raises ConfigError.

    >>> parse_gate("reward/mean:-2%")
    Gate(text='reward/mean:-2%', name='reward/mean', sign=-1, bound=0.02, is_share=True)
    """
    found = _FORM.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"--fail-if {text}: must be METRIC:-DECREASE or METRIC:+INCREASE, with or without %; "
            "for instance reward/mean:-2%"
        )
    size = float(found["size"]) / (100 if found["share"] else 1)
    sign = -1 if found["sign"] == "-" else 1
    return Gate(text, found["name"], sign, size, bool(found["share"]))


def outcome(
    gate: Gate,
    baseline: Sequence[Mapping[str, float]],
    lines: Sequence[Mapping[str, float]],
    *,
    names: tuple[str, str],
    num_steps: int = PACE_STEPS,
) -> GateOutcome:
    """Apply a gate to the means of the newest ``num_steps`` lines that have its metric.

    A value that is not finite fails. ``names`` are those of the baseline and the run, for messages.

    Raises:
        ConfigError: a run has no such metric, or a share of a baseline of 0 or not finite is asked
            for.
    """
    values = []
    for name, run_lines in zip(names, (baseline, lines), strict=True):
        value = recent(run_lines, gate.name, num_steps)
        if value is None:
            raise ConfigError(
                f"--fail-if {gate.text}: {name} has no {gate.name} in metrics.jsonl; "
                "docs/metrics.md lists the names"
            )
        values.append(value)
    before, after = values
    if not math.isfinite(before) or (gate.is_share and before == 0):
        raise ConfigError(
            f"--fail-if {gate.text}: {gate.name} of the baseline {names[0]} is {before:g}; "
            "give a change in the unit of the metric, without %, or another baseline"
        )
    change = (after - before) / abs(before) if gate.is_share else after - before
    fails = not math.isfinite(after) or gate.sign * change > gate.bound
    return GateOutcome(gate.text, names[1], before, after, change, fails)
