"""Regression gates: which change of a metric fails."""

from __future__ import annotations

import math

import pytest

from rlpost.cli.main import main
from rlpost.errors import ConfigError
from rlpost.extensions.watching.report.compare import outcome, parse_gate
from tests.unit.watching.report.runs import make_run

NAMES = ("base", "new")


def fails(gate: str, before: list[float], after: list[float], num_steps: int = 20) -> bool:
    lines = [[{"step": n, "x": value} for n, value in enumerate(of)] for of in (before, after)]
    return outcome(parse_gate(gate), *lines, names=NAMES, num_steps=num_steps).fails


@pytest.mark.parametrize(
    ("gate", "after", "expected"),
    [
        ("x:-2%", 0.481, True),
        ("x:-4%", 0.481, False),
        ("x:-2%", 0.9, False),  # an increase passes a bound on decreases
        ("x:+2%", 0.52, True),
        ("x:+0.03", 0.52, False),
        ("x:+0.01", 0.52, True),
        ("x:-0%", 0.5, False),
        ("x:-0%", 0.4999, True),
        ("x:+0", 0.5001, True),
        ("x:-50%", math.nan, True),
        ("x:-50%", math.inf, True),
    ],
)
def test_a_change_beyond_the_bound_in_its_direction_fails(gate, after, expected):
    assert fails(gate, [0.5], [after]) is expected


def test_a_share_of_a_negative_baseline_is_one_of_its_magnitude():
    assert fails("x:-10%", [-1.0], [-1.2])
    assert not fails("x:-30%", [-1.0], [-1.2])


def test_the_means_of_the_last_steps_are_compared():
    assert fails("x:-5%", [9.0, 1.0, 1.0], [9.0, 0.8, 1.0], num_steps=2)
    assert not fails("x:-5%", [9.0, 1.0, 1.0], [9.0, 0.0, 1.0], num_steps=1)


@pytest.mark.parametrize("text", ["x", "x:2%", "x:-", "x:-2 %", ":-2%", "x:-a"])
def test_a_gate_of_another_form_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match=r"for instance reward/mean:-2%"):
        parse_gate(text)


def test_a_metric_that_a_run_has_not_and_a_share_of_zero_are_refused():
    with pytest.raises(ConfigError, match=r"new has no x in metrics.jsonl"):
        outcome(parse_gate("x:-1%"), [{"step": 1, "x": 1.0}], [{"step": 1}], names=NAMES)
    with pytest.raises(ConfigError, match=r"baseline base is 0; give a change in the unit"):
        fails("x:-1%", [0.0], [1.0])


def test_compare_exits_with_1_where_a_gate_fails(tmp_path, capsys):
    words = ["compare"]
    for name, seed in (("a", 0), ("b", 1)):
        make_run(tmp_path / name, num_steps=30, preempted_at=(), seed=seed)
        words.append(str(tmp_path / name))
    assert main([*words, "--fail-if", "reward/mean:-50%"]) == 0
    assert "passes reward/mean:-50%" in capsys.readouterr().out
    assert main([*words, "--fail-if", "reward/mean:-50%", "--fail-if", "time/step_s:+0"]) == 1
    assert "FAILS  time/step_s:+0: 96.2 -> 96.4 (+0.183), b" in capsys.readouterr().out
    assert main([*words, "--fail-if", "reward/mean:-50%", "--last", "0"]) == 2
    assert "--last 0: must be at least 1" in capsys.readouterr().err
