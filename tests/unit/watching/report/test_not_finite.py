"""NaN, infinity and null of any metric are marked on every plot, and no view fails on them."""

from __future__ import annotations

import json
import math
import re

import pytest

from common.run_folder import RunFolder
from rlpost.cli.main import main
from rlpost.extensions.watching.report.page import report_page
from rlpost.extensions.watching.report.panels import drawn_names, other_panels, panels
from rlpost.extensions.watching.report.plots import plot
from rlpost.extensions.watching.report.run_facts import read_facts
from rlpost.extensions.watching.watch import page, read_view
from rlpost.observe.writer import MetricsWriter, read_metrics
from tests.unit.watching.report.runs import make_run

WORDS = {"NaN": "NaN", "Infinity": "∞", "-Infinity": "-∞", "null": "NaN"}
STEPS = range(30, 34)


def poisoned(run: RunFolder, word: str) -> set[str]:
    """Replace every metric of four steps by a word of JSON; return their names."""
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    names: set[str] = set()
    texts = []
    for line in lines:
        values = {name: json.dumps(value) for name, value in line.items()}
        if line["step"] in STEPS:
            names |= set(line) - {"step"}
            values |= dict.fromkeys(set(line) - {"step"}, word)
        texts.append("{" + ", ".join(f"{json.dumps(k)}: {v}" for k, v in values.items()) + "}\n")
    run.metrics.write_text("".join(texts))
    return names


@pytest.mark.parametrize("word", WORDS)
def test_every_plot_marks_a_value_that_is_not_finite_and_every_view_works(tmp_path, capsys, word):
    run = make_run(tmp_path / "a", num_steps=60, preempted_at=(20,))
    other = make_run(tmp_path / "b", num_steps=40, preempted_at=())
    names = poisoned(run, word)
    html, lines = report_page(read_facts(run)), read_metrics(run.metrics)
    others = other_panels([("a", lines)], drawn_names(lines))
    shown = [*panels(lines), *(panel for group in others for panel in group.panels)]
    curves = [curve for panel in shown for curve in panel.curves if curve.lost]
    assert len(curves) == len(names)
    assert {tuple(curve.lost) for curve in curves} == {
        tuple((float(step), WORDS[word]) for step in STEPS)
    }
    plots = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    marked = [plot for plot in plots if '"lost":' in plot]
    assert len(marked) == sum(any(curve.lost for curve in panel.curves) for panel in shown)
    for verb in (["status"], ["status", "--json"], ["list"], ["report"], ["compare"]):
        words = [*verb, "--runs-dir", str(tmp_path)] if verb == ["list"] else [*verb, str(run.root)]
        words += [str(other.root)] if verb == ["compare"] else []
        assert main(words) in (0, 3), verb
        assert "Traceback" not in capsys.readouterr().err


def test_phases_are_drawn_when_all_values_but_those_of_one_step_are_not_finite():
    phases = {"time/step_s": 3.0, "time/generate_s": 1.0, "time/train_s": 2.0}
    lines = [{"step": 1, **phases}]
    lines += [{"step": step, **dict.fromkeys(phases, math.nan)} for step in (2, 3)]
    (stacked,) = (panel for panel in panels(lines) if panel.is_stacked)
    drawn = plot(stacked.curves, title=stacked.title, is_stacked=True)
    assert drawn.count('[[2.0,"NaN"],[3.0,"NaN"]]') == 2


def test_the_live_page_says_how_many_values_are_not_finite(tmp_path):
    from rich.console import Console

    run = make_run(tmp_path / "a", num_steps=60, preempted_at=())
    poisoned(run, "null")
    console = Console(width=100, record=True)
    console.print(page(read_view(run, None, None), 100))
    assert "4 not finite, the last NaN at step 33" in console.export_text()


def test_a_mirror_gets_nan_for_a_value_that_is_none(tmp_path):
    seen = []
    writer = MetricsWriter(tmp_path / "m", also=lambda step, metrics: seen.append(metrics))
    writer.write(1, {"x": None, "y": 1.0})
    assert math.isnan(seen[0]["x"]) and seen[0]["y"] == 1.0
    assert json.loads((tmp_path / "m").read_text()) == {"step": 1, "x": None, "y": 1.0}
    assert math.isnan(read_metrics(tmp_path / "m")[0]["x"])
