"""Notes beside a plan about time: recomputation without need, and weights to read at the start. Pure.

Input: settings, an estimate and the bytes that engines read. Output: a line for the user, or None.
"""

from __future__ import annotations

from rlpost.config.plan.estimate import Sizes, estimate
from rlpost.config.plan.shape import Shape
from rlpost.config.tree import Config
from rlpost.config.wording import with_values

START_S = 240
"""Seconds of a start in which nothing is read: imports, kernels, CUDA graphs (an estimate)."""
USUAL_GBPS = 1.0
"""What one node reads from most shared file systems, beside others."""


def recompute_note(config: Config, shape: Shape, sizes: Sizes) -> str | None:
    """Return that all layers are recomputed although their activations fit."""
    if config.perf.recompute_granularity != "full":
        return None
    without = with_values(
        config, recompute_granularity=None, recompute_method=None, recompute_num_layers=None
    )
    result = estimate(without, shape, **sizes)
    if result.problems:
        return None
    peak = max(phase.total for phase in result.phases)
    return (
        "--recompute-granularity full takes about a fourth of the time of training, and the plan fits "
        f"without it: {peak / 1e9:.1f} of {sizes['gpu_bytes'] / 1e9:.1f} GB of a GPU; use "
        "--recompute-granularity none, --recompute-method none and --recompute-num-layers none"
    )


def loading_note(config: Config, name: str, num_bytes: int) -> str | None:
    """Return that the weights of ``name`` must be read fast to meet the deadline of the start."""
    seconds = config.cluster.bringup_deadline_s - START_S
    if seconds > 0 and num_bytes / seconds <= USUAL_GBPS * 1e9:
        return None
    within = f"{num_bytes / max(1, seconds) / 1e9:.1f} GB/s" if seconds > 0 else "no time"
    needed = START_S + num_bytes / (USUAL_GBPS * 1e9 / 2)
    return (
        f"{name}: {num_bytes / 1e9:.0f} GB of weights are read at the start, and --bringup-deadline-s "
        f"{config.cluster.bringup_deadline_s} leaves {within} to a node for them; use "
        f"--bringup-deadline-s {-(-int(needed) // 600) * 600} unless its storage is faster"
    )
