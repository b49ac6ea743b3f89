"""The reward curve as a picture, from ``metrics.jsonl``."""

from __future__ import annotations

from pathlib import Path

from rlpost.metrics.writer import eval_rewards, read_metrics


def plot_rewards(metrics_path: Path, picture: Path) -> None:
    """Draw the mean reward of each step and every evaluation into ``picture`` (PNG)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = read_metrics(metrics_path)
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120)
    trained = [(line["step"], line["reward/mean"]) for line in lines if "reward/mean" in line]
    axes.plot(
        *zip(*trained, strict=True), linewidth=1.2, alpha=0.7, label="training prompts, sampled"
    )
    for name in sorted({name for line in lines for name in eval_rewards(line)}):
        points = [(line["step"], line[name]) for line in lines if name in line]
        axes.plot(
            *zip(*points, strict=True),
            marker="o",
            linewidth=2,
            label=f"{name.split('/')[1]}, evaluation",
        )
    axes.set(xlabel="step", ylabel="mean reward", title="Reward")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture)
    plt.close(figure)
