"""Recent values of metrics: the throughput and the pace that every view shows. Pure.

Input: lines of ``metrics.jsonl``. Output: one value over the newest steps. ``status``, ``list``,
``report`` and ``compare`` all use these definitions; the driver's log and ``metrics.jsonl`` have
the values of single steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from rlpost.observe.writer import eval_rewards

PACE_STEPS = 20
"""Number of newest steps that a recent value is computed from."""
THROUGHPUT, STEP_S = "time/tokens_per_s", "time/step_s"
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


def progress_line(
    step: int,
    num_steps: int,
    metrics: Mapping[str, float],
    *,
    steps_done: int,
    elapsed_s: float,
    is_supervised: bool = False,
) -> str:
    """Return ``step 12/60  reward 0.531  ...  eta 0:42``.

    The estimate uses the mean duration of the ``steps_done`` steps of this attempt. The loss is
    ``train/pg_loss``, which moves; ``train/loss`` is near 0 where advantages add up to 0. Supervised
    training (``is_supervised``) has no reward; its line has the tokens of the responses.
    """
    parts = [f"step {step}/{num_steps}"]
    if not is_supervised:
        parts.append(f"reward {metrics['reward/mean']:.3f}")
    parts += [
        f"{name.removesuffix('/reward_mean')} {metrics[name]:.3f}" for name in eval_rewards(metrics)
    ]
    if is_supervised:
        parts.append(f"{metrics['rollout/num_tokens']:,.0f} tokens")
    else:
        parts.append(f"len {metrics['rollout/response_length_mean']:.1f}")
    if "train/loss" in metrics:  # not with --debug-rollout-only
        name = "train/pg_loss" if "train/pg_loss" in metrics else "train/loss"
        loss = f"{name.removeprefix('train/')} {metrics[name]:+.4f}"
        parts += [loss, f"grad {metrics['train/grad_norm']:.3f}"]
    parts += [
        f"{metrics['time/tokens_per_s']:,.0f} tok/s",
        f"{metrics['time/step_s']:.2f} s",
        f"eta {duration(elapsed_s / max(1, steps_done) * (num_steps - step))}",
    ]
    return "  ".join(parts)


def nothing_to_learn(metrics: Mapping[str, float], num_groups: int) -> bool:
    """Whether no group of a step has two different rewards, so that group-relative advantages are 0."""
    return num_groups > 0 and metrics.get("rollout/zero_std_groups", 0) >= num_groups


def duration(seconds: float) -> str:
    """Format seconds as ``1:02:03`` or ``2:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
