"""Recommend the save interval that loses the least time to saves and failures. Pure.

Input: the cost of a save, the times of a step, the mean time between failures. Output: an interval
in seconds and in steps, and a note where the recipe's --save-interval is far from it.

With the journal a failure loses no generation: after a resume the steps since the newest checkpoint
are trained again from what is on disk. Only the training part of a step is repeated, so the mean
time between failures counts in seconds of training, as if failures were rarer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from common.units import duration_text
from rlpost.config.tree import Config

WRITE_GBPS = 2.0
"""Assumed for a node's writes where nothing was measured."""
FAR = 4.0
"""A factor in either direction.

The time lost is flat around its minimum: four times the best interval loses 2.1 times the least,
twice loses 1.25 times (first order).
"""

WORTH_A_NOTE = 0.005  # of the time, more than with the best interval


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Durations of a step, in seconds.

    ``step_s`` is a step without evaluation and checkpoint, ``train_s`` the training in it, and
    ``save_s`` the time that training waits for a save (None: not measured). ``source`` names the
    origin of these values.
    """

    step_s: float
    train_s: float
    source: str
    save_s: float | None = None


@dataclass(frozen=True, slots=True)
class SaveInterval:
    """A recommendation. ``steps`` is None where the time of a step is not known.

    ``training_frac`` is the part of a step that a failure repeats: its training. ``seconds`` is
    wall time from the end of a save to the start of the next.
    """

    seconds: float
    save_s: float
    mtbf_s: float
    training_frac: float = 1.0
    steps: int | None = None
    source: str = ""


def optimum_s(save_s: float, mtbf_s: float) -> float:
    """Seconds of work between two saves that minimise the expected time of a run.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    Future Generation Computer Systems 22 (2006), the perturbation solution: with a save of d and a
    mean time between failures of M, sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d for d <
    2M, else M. Its first term is that of J. W. Young, "A first order approximation to the optimum
    checkpoint interval", CACM 17 (1974).

    Daly's figures 3 to 5, in minutes:

    >>> [round(optimum_s(5, mtbf), 1) for mtbf in (24 * 60, 6 * 60, 15)]
    [116.7, 56.7, 9.1]
    """
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def written_s(
    config: Config,
    checkpoint_bytes: float,
    *,
    write_gbps: float = WRITE_GBPS,
) -> float:
    """Seconds to write a checkpoint: each node that trains writes its part."""
    return checkpoint_bytes / config.actor_num_nodes / (write_gbps * 1e9)


def save_interval(
    config: Config,
    *,
    checkpoint_bytes: float,
    times: StepTimes | None = None,
    write_gbps: float = WRITE_GBPS,
) -> SaveInterval:
    """Return the interval to recommend.

    Args:
        checkpoint_bytes: of one checkpoint, all ranks together.
        times: of a step; without them all of the time between saves counts as training.
        write_gbps: what a node writes, in GB/s; used where ``times`` has no measured save.
    """
    in_full_s = written_s(config, checkpoint_bytes, write_gbps=write_gbps)
    measured_s = None if times is None else times.save_s
    save_s = in_full_s if measured_s is None else measured_s
    mtbf_s = config.cluster.node_mtbf_hours * 3600 / config.num_nodes
    training_frac = 1.0
    if times is not None and 0 < times.train_s < times.step_s:
        training_frac = times.train_s / times.step_s
    best_s = optimum_s(save_s, mtbf_s / training_frac)
    if config.checkpoint.async_save:
        best_s = max(best_s, in_full_s)  # one save at a time
    if times is None or times.step_s <= 0:
        return SaveInterval(best_s, save_s, mtbf_s)
    steps = max(1, round(best_s / times.step_s))
    return SaveInterval(steps * times.step_s, save_s, mtbf_s, training_frac, steps, times.source)


def lost_frac(best: SaveInterval, interval_s: float) -> float:
    """Fraction of time spent on saves and repeated training, to first order."""
    return best.save_s / interval_s + best.training_frac * interval_s / (2 * best.mtbf_s)


def interval_words(best: SaveInterval, given: int | None) -> str:
    """The recommendation on one line."""
    save, failures = duration_text(_round(best.save_s)), duration_text(round(best.mtbf_s))
    why = f"a save of {save}, a failure every {failures} (--node-mtbf-hours)"
    if best.steps is None:
        return f"every {duration_text(round(best.seconds))}: {why}; --step-s and --train-s give it in steps"
    recipe = "" if given is None else f"; the recipe has {given}"
    return f"{_flag(best)}: {why}, {best.source}{recipe}"


def interval_note(config: Config, best: SaveInterval) -> str | None:
    """Return a note where --save-interval is far from the best interval; None otherwise.

    Far means off by more than FAR, with a loss of more than WORTH_A_NOTE. A run without an interval
    saves at its end.
    """
    if best.steps is None:
        return None
    interval = config.checkpoint.save_interval
    steps = interval or config.rollout.num_rollout
    loses = lost_frac(best, steps * best.seconds / best.steps)
    least = lost_frac(best, best.seconds)
    is_far = not best.steps / FAR <= steps <= best.steps * FAR
    if not is_far or loses - least < WORTH_A_NOTE:
        return None
    cause = "saves" if steps < best.steps else "training that a failure repeats"
    return (
        f"--save-interval {interval or 'is not given'}: about {loses:.1%} of the time goes to {cause}; "
        f"{_flag(best)} loses {least:.1%} ({best.source}; rlpost plan shows the arithmetic)"
    )


def _flag(best: SaveInterval) -> str:
    return f"--save-interval {best.steps} ({duration_text(round(best.seconds))})"


def _round(value: float) -> float:
    return round(value, 1) if value < 10 else round(value)
