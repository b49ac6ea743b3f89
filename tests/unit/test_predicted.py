"""Predicted seconds beside measured ones, with measurements that are made up."""

from __future__ import annotations

from dataclasses import replace

from rlpost.config.plan.cards import CARDS
from tests.gpu.test_benchmarks import benchmark_step
from tests.predicted import compared_table, kernel_seconds, step_seconds

H100 = CARDS["H100"]


def test_the_table_has_predicted_and_measured_seconds_and_their_ratio():
    rows = [("a product", 0.0015, 0.003), ("a step", 2.0, 1.0)]
    assert compared_table(rows) == [
        "",
        "rlpost plan beside this GPU     predicted     measured  ratio",
        "a product                         1.50 ms      3.00 ms   2.00",
        "a step                         2000.00 ms   1000.00 ms   0.50",
    ]
    assert compared_table([]) == []


def test_every_prediction_follows_its_rate():
    """Twice the rates of a card halve all seconds but those of the host's link."""
    fast = replace(H100, tflops=2 * H100.tflops, memory_gbps=2 * H100.memory_gbps)
    slower, faster = kernel_seconds(H100), kernel_seconds(fast)
    unchanged = {name for name in slower if faster[name] == slower[name]}
    assert unchanged == {"copy of 1 GB from pinned memory"}
    assert all(slower[name] == 2 * faster[name] for name in slower.keys() - unchanged)


def test_a_step_of_the_benchmark_takes_longer_with_more_layers():
    step = benchmark_step("large")
    assert sum(step.lengths) > step.max_tokens > 0
    more = replace(step, layers=2 * step.layers)
    assert step_seconds(step, H100) < step_seconds(more, H100) < 2.1 * step_seconds(step, H100)
