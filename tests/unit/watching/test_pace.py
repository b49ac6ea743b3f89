"""Recent values of metrics, which every view shows alike."""

import pytest

from rlpost.extensions.watching.pace import PACE_STEPS, recent, throughput
from rlpost.extensions.watching.report.compare import comparison
from rlpost.extensions.watching.report.page import key_figures
from rlpost.extensions.watching.report.run_facts import read_facts
from rlpost.extensions.watching.run_status import status_of
from rlpost.extensions.watching.series import short
from rlpost.observe.writer import read_metrics
from tests.unit.watching.report.runs import make_run


def test_throughput_is_all_tokens_over_all_seconds():
    lines = [{"time/tokens_per_s": 100.0, "time/step_s": 1.0}]
    lines += [{"time/tokens_per_s": 10.0, "time/step_s": 9.0}, {"eval/x/reward_mean": 1.0}]
    assert throughput(lines) == pytest.approx((100 * 1 + 10 * 9) / 10)
    assert throughput(lines, 1) == pytest.approx(10)
    assert throughput([]) is None


def test_a_recent_value_is_the_mean_over_the_newest_lines_that_have_it():
    lines = [{"x": 4.0}, {"x": 1.0}, {"y": 3.0}, {"x": 2.0}]
    assert recent(lines, "x", 2) == 1.5
    assert recent(lines, "z") is None


def test_status_report_and_compare_show_the_same_throughput(tmp_path):
    run = make_run(tmp_path / "run", num_steps=40)
    lines = read_metrics(run.metrics)
    last = lines[-PACE_STEPS:]
    seconds = sum(line["time/step_s"] for line in last)
    expected = sum(line["time/tokens_per_s"] * line["time/step_s"] for line in last) / seconds
    assert status_of(run, None, None).tokens_per_s == pytest.approx(expected)
    facts = read_facts(run)
    (shown,) = comparison([facts])["runs"]
    assert shown["tokens_per_s"] == pytest.approx(expected)
    assert (f"{short(expected)} tok/s", "throughput") in key_figures(facts.lines, 40)
