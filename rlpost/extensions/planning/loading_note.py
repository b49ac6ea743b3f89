"""A note beside a plan: weights to read at the start within the deadline. Pure.

Input: settings and the bytes that engines read. Output: a line for the user, or None.
"""

from __future__ import annotations

from rlpost.config.tree import Config

START_S = 240
"""Seconds of a start in which nothing is read: imports, kernels, CUDA graphs (an estimate)."""
USUAL_GBPS = 1.0
"""What one node reads from most shared file systems, beside others."""


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
