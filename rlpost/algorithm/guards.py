"""Guards: detect failing training from the metrics of a step. Pure.

Input: the metrics of optimizer steps, and thresholds. Output: warnings, or a TrainingError. Each
message has the values, their bounds, the usual causes and the setting of the bound.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlpost.errors import TrainingError
from rlpost.types import MicroBatch, TrainBatch

MIN_NORMS = 5
"""Minimum number of previous gradient norms for the detection of a spike."""
MAX_NORMS = 50


@dataclass(frozen=True, slots=True)
class Bounds:
    """Thresholds of the guards, with the names of [grpo]; 0 disables a guard."""

    guard_initial_kl: float
    guard_rollout_logprob_diff: float
    guard_grad_norm_factor: float


def check_finite(metrics: Mapping[str, float], where: str = "") -> None:
    """Raise TrainingError when a metric is NaN or infinite; ``where`` names the step and its loss."""
    broken = [f"{name} = {value}" for name, value in metrics.items() if not math.isfinite(value)]
    if broken:
        prefix = f"{where}: " if where else ""
        raise TrainingError(
            f"{prefix}{', '.join(broken)}: not a number of a healthy step. No weights of this step are saved; the "
            "last checkpoint holds good ones. Lower --lr or --clip-grad, correct the loss if it is a custom one, or "
            "look for broken rewards and log-probs in --save-debug-rollout-data"
        )


def check_initial_kl(metrics: Mapping[str, float], bound: float, *, is_fresh: bool) -> None:
    """Check the KL divergence before the first update of a rollout.

    Raise TrainingError if it is above ``bound``. Checked against the policy of the rollout, and, in
    the first step from the reference weights (``is_fresh``), also against the reference.
    """
    suspects = {
        "train/ppo_kl": "the log-probs of the rollout's policy come from other weights or another forward pass"
    }
    if is_fresh:
        suspects["train/ref_kl"] = (
            "the reference does not hold the weights that training starts from"
        )
    for name, reason in suspects.items():
        value = metrics.get(name, 0.0)
        if bound and abs(value) > bound:
            raise TrainingError(
                f"{name} = {value:.3g} before any update, where it must be near 0 (bound {bound:g}, "
                f"--guard-initial-kl): {reason}"
            )


def mismatch_warning(metrics: Mapping[str, float], bound: float) -> str | None:
    """Return a warning if engines and trainer disagree about the log-probs of the same tokens."""
    name = "train/rollout_logprob_abs_diff"
    value = metrics.get(name, 0.0)
    if not bound or value <= bound:
        return None
    ratio = metrics.get("train/rollout_ratio", math.nan)
    return (
        f"{name} = {value:.3g} is above {bound:g} (--guard-rollout-logprob-diff), mean ratio {ratio:.3g}: engines and "
        "trainer disagree about the same tokens. Check precision, temperature and the weight sync, and, with "
        "asynchronous generation, how far a step moves the weights; --use-tis corrects an unavoidable mismatch"
    )


def spike_warning(norm: float, before: Sequence[float], factor: float) -> str | None:
    """Return a warning if a gradient norm exceeds ``factor`` times the previous ones' median."""
    if not factor or len(before) < MIN_NORMS:
        return None
    median = statistics.median(before)
    if norm <= factor * median:
        return None
    times = f"{norm / median:.3g} times" if median > 0 else "not"
    return (
        f"train/grad_norm = {norm:.3g} is {times} the median of the last {len(before)} steps, {median:.3g} (bound "
        f"{factor:g} times, --guard-grad-norm-factor). --clip-grad bounds its effect; check the rewards and lengths "
        "of the step"
    )


def check_tokens(batches: Sequence[TrainBatch]) -> str | None:
    """Return a warning if some micro-batches of an optimizer step have no loss-masked token.

    Raises:
        TrainingError: the whole step has none; the loss would be divided by zero.
    """
    if batches[0].num_tokens == 0:
        raise TrainingError(
            f"an optimizer step of {batches[0].num_samples} samples has no token to learn from: every loss mask is 0; "
            "check the function that sets the masks, with --save-debug-rollout-data"
        )
    micro_batches = [micro for batch in batches for micro in batch.micro_batches]
    empty = sum(not _has_tokens(micro) for micro in micro_batches)
    if not empty:
        return None
    return (
        f"{empty} of {len(micro_batches)} micro-batches of an optimizer step have no token to learn from (loss masks "
        "are 0): they cost a pass without contributing to the gradient"
    )


class Guards:
    """Checks each optimizer step.

    Keeps recent gradient norms, and whether the run is in its first step.
    """

    def __init__(self, bounds: Bounds, *, is_fresh: bool) -> None:
        """Create guards; ``is_fresh`` if the policy still has the reference weights."""
        self._bounds = bounds
        self._is_fresh = is_fresh
        self._norms: list[float] = []

    def after_step(self, metrics: Mapping[str, float], *, is_first: bool) -> list[str]:
        """Return warnings about an optimizer step; ``is_first``: of its rollout.

        Raises:
            TrainingError: a metric is not finite, or the initial KL is above its bound.
        """
        bounds = self._bounds
        check_finite(metrics)
        if is_first:
            check_initial_kl(metrics, bounds.guard_initial_kl, is_fresh=self._is_fresh)
        self._is_fresh = False
        norm = metrics.get("train/grad_norm", 0.0)
        warnings = [
            mismatch_warning(metrics, bounds.guard_rollout_logprob_diff) if is_first else None,
            spike_warning(norm, self._norms, bounds.guard_grad_norm_factor),
        ]
        self._norms = [*self._norms, norm][-MAX_NORMS:]
        return [warning for warning in warnings if warning is not None]


def _has_tokens(micro_batch: MicroBatch) -> bool:
    return any(sample.loss_mask.total() for sample in micro_batch)
