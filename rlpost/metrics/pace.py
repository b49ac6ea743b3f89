"""Recent values of metrics: the throughput and the pace that every view shows. Pure.

Input: lines of ``metrics.jsonl``. Output: one value over the newest steps. ``status``, ``list``,
``report`` and ``compare`` all use these definitions; the driver's log and ``metrics.jsonl`` have
the values of single steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

PACE_STEPS = 20
"""Steps, the newest ones, that a recent value is computed from."""
THROUGHPUT, STEP_S = "time/tokens_per_s", "time/step_s"
Line = Mapping[str, float]


def throughput(lines: Sequence[Line], num_steps: int = PACE_STEPS) -> float | None:
    """Return tokens per second over the newest steps: all their tokens over all their seconds.

    Not the mean of the rates of the steps, in which a short step counts as much as a long one.
    None without a step.

    >>> throughput([{"time/tokens_per_s": 100.0, "time/step_s": 1.0},
    ...             {"time/tokens_per_s": 10.0, "time/step_s": 9.0}])
    19.0
    """
    steps = [line for line in lines if THROUGHPUT in line and STEP_S in line][-num_steps:]
    seconds = sum(line[STEP_S] for line in steps)
    if not seconds:
        return None
    return sum(line[THROUGHPUT] * line[STEP_S] for line in steps) / seconds


def recent(lines: Sequence[Line], name: str, num_steps: int = PACE_STEPS) -> float | None:
    """Return the mean of a metric over the newest lines that have it; None where none has.

    Of ``time/tokens_per_s`` it is ``throughput``.
    """
    if name == THROUGHPUT:
        return throughput(lines, num_steps)
    values = [line[name] for line in lines if name in line][-num_steps:]
    return fmean(values) if values else None
