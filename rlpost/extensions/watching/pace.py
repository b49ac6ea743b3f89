"""Recent values of metrics: the throughput and the pace that every view shows. Pure.

Input: lines of ``metrics.jsonl``. Output: one value over the newest steps. ``status``, ``list``,
``report`` and ``compare`` all use these definitions; the driver's log and ``metrics.jsonl`` have
the values of single steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

PACE_STEPS = 20
"""Number of newest steps that a recent value is computed from."""
THROUGHPUT, STEP_S = "time/tokens_per_s", "time/step_s"
PHASES = (
    ("generate", "time/generate_s"),
    ("train", "time/train_s"),
    ("sync", "time/sync_s"),
    ("evaluate", "time/eval_s"),
)
"""Labels of the phases of a step, and the metrics with their seconds."""
Line = Mapping[str, float]


def finite(line: Line, name: str, default: float = 0.0) -> float:
    """Return a value of a line; ``default`` where it is missing or not a finite number."""
    value = line.get(name)
    if isinstance(value, (int, float)) and math.isfinite(value):
        return float(value)
    return default


def is_timed(line: Line) -> bool:
    """Whether a line has the seconds of its step."""
    return finite(line, STEP_S, -1.0) >= 0


def throughput(lines: Sequence[Line], num_steps: int = PACE_STEPS) -> float | None:
    """Return tokens per second over the newest steps: all their tokens over all their seconds.

    Not the mean of the rates of the steps, in which a short step counts as much as a long one.
    None without a step.

    >>> throughput([{"time/tokens_per_s": 100.0, "time/step_s": 1.0},
    ...             {"time/tokens_per_s": 10.0, "time/step_s": 9.0}])
    19.0
    """
    rated = [line for line in lines if is_timed(line) and finite(line, THROUGHPUT, -1.0) >= 0]
    steps = rated[-num_steps:]
    seconds = sum(line[STEP_S] for line in steps)
    if not seconds:
        return None
    return sum(line[THROUGHPUT] * line[STEP_S] for line in steps) / seconds


def recent(lines: Sequence[Line], name: str, num_steps: int = PACE_STEPS) -> float | None:
    """Return the mean of a metric over the newest lines that have it; None where none has.

    Of ``time/tokens_per_s`` it is ``throughput``. Of ``time/step_s`` values that are not finite are
    left out; of every other metric they make the mean NaN or infinite.
    """
    if name == THROUGHPUT:
        return throughput(lines, num_steps)
    if name == STEP_S:
        lines = [line for line in lines if is_timed(line)]
    values = [line[name] for line in lines if name in line][-num_steps:]
    return fmean(values) if values else None


def mean_phases(lines: Sequence[Line]) -> dict[str, float]:
    """Return mean seconds of each phase; evaluations are spread over all steps."""
    trained = [line for line in lines if is_timed(line)]
    means = {}
    for label, name in PHASES:
        if total := sum(finite(line, name) for line in trained):
            means[label] = total / len(trained)
    return means
