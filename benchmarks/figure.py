"""Line charts of the documentation, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def draw_lines(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    path: Path,
    *,
    title: str,
    ylabel: str,
    top: float | None = None,
) -> None:
    """Write a chart of values by step as an image file; equal lines give equal files.

    Args:
        lines: points (step, value) of each line, by its label.
        path: the file; its suffix selects the format.
        title: title of the chart.
        ylabel: label of the axis of values, which begins at 0.
        top: its upper end; chosen by matplotlib unless given.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "rlpost"
    figure, axes = plt.subplots(figsize=(8, 4.5))
    for label, points in lines.items():
        axes.plot(*zip(*points, strict=True), label=label)
    axes.set(xlabel="step", ylabel=ylabel, title=title)
    axes.set_ylim(0, top)
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
