"""Lines of the driver's log: the progress of a step, and what a resume kept. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from common.ledger import Entry
from rlpost.observe.writer import eval_rewards


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


def kept_words(entry: Entry) -> str:
    """Return what a driver continued of groups in generation.

    >>> kept_words({"answers": 312, "turns": 1204, "begun_again": 9})
    '312 answers and 1,204 turns kept, 9 answers begun again'
    """
    answers, turns, again = (
        int(entry.get(name, 0)) for name in ("answers", "turns", "begun_again")
    )
    words = f"{answers:,} answers and {turns:,} turns kept"
    return f"{words}, {again:,} answers begun again" if again else words


def duration(seconds: float) -> str:
    """Format seconds as ``1:02:03`` or ``2:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
