"""Plots as the numbers that the page's script draws (``templates/plots.js``). Pure.

Input: curves. Output: one empty ``<svg>`` with its numbers in the attribute ``data-plot``. Its
colours are classes of the page's style sheet.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

from rlpost.extensions.watching.series import MAX_POINTS, SMOOTH_FROM, Point, smooth, thin

WIDTH, HEIGHT = 420, 200
_BOX = [48, 12, 10, 26, WIDTH, HEIGHT]  # margins: left, right, top, bottom; size
NUM_COLOURS = 6
MAX_DOTS = 60
SOFT_POINTS = 100  # of a smoothed curve
STACKED_STEPS = 150  # of a stacked plot; more are averaged in groups of equal size


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a plot.

    ``colour`` counts from 0; ``dots`` shows every point of few; ``soften`` draws a smoothed curve
    over a faint one when there are many points. ``lost`` are steps without a finite value, with the
    word for it; they are marked at the edge of the plot. ``run`` counts the runs of a comparison.
    """

    label: str
    points: Sequence[Point]
    colour: int = 0
    dots: bool = False
    soften: bool = True
    lost: Sequence[tuple[float, str]] = ()
    run: int = 0


def plot(
    curves: Sequence[Curve],
    *,
    title: str,
    is_stacked: bool = False,
    num_points: int = MAX_POINTS,
) -> str:
    """Return the plot of curves over steps, each of at most ``num_points`` points.

    A stacked curve without a value at a step counts as 0 there.
    """
    data: dict[str, object] = {"box": _BOX}
    if is_stacked:
        curves, num_points = _stacked(curves), MAX_POINTS
        data["stacked"] = 1
    data["curves"] = [_data(curve, num_points) for curve in curves]
    text = escape(json.dumps(data, separators=(",", ":"), ensure_ascii=False), quote=False)
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" '
        f"""tabindex="0" data-plot='{text.replace("'", "&#39;")}'><g class="drawn"></g>"""
        f'<path class="cursor" d=""/></svg>'
    )


def _stacked(curves: Sequence[Curve]) -> list[Curve]:
    """The curves at the same steps, as means over groups of steps."""
    steps = sorted({x for curve in curves for x, _ in curve.points})
    size = max(1, -(-len(steps) // STACKED_STEPS))
    groups = [steps[n : n + size] for n in range(0, len(steps), size)]
    found = []
    for curve in curves:
        of_step = dict(curve.points)
        means = []
        for group in groups:
            means.append((group[0], sum(of_step.get(step, 0.0) for step in group) / len(group)))
        found.append(replace(curve, points=means, soften=False))
    return found


def _data(curve: Curve, num_points: int) -> dict[str, object]:
    """The numbers of a curve for the page's script."""
    data: dict[str, object] = {
        "label": curve.label,
        "colour": curve.colour % NUM_COLOURS,
        "points": _packed(thin(curve.points, num_points)),
    }
    if curve.soften and len(curve.points) >= SMOOTH_FROM:
        smoothed = smooth(curve.points, len(curve.points) / 40)
        data["soft"] = _packed(thin(smoothed, SOFT_POINTS))
    if curve.dots and len(curve.points) <= MAX_DOTS:  # more would be a band that hides the curve
        data["dots"] = 1
    if curve.lost:
        data["lost"] = [[x, word] for x, word in _some(curve.lost, num_points)]
    if curve.run:
        data["run"] = curve.run
    return data


def _some(lost: Sequence[tuple[float, str]], most: int) -> Sequence[tuple[float, str]]:
    """At most ``most`` of them, evenly spread, the first and the last among them."""
    if len(lost) <= most:
        return lost
    return [lost[n * (len(lost) - 1) // (most - 1)] for n in range(most)]


def _packed(curve: Sequence[Point]) -> list[list[float]]:
    return [[_brief(x), _brief(float(f"{y:.5g}"))] for x, y in curve]


def _brief(value: float) -> float:
    """A whole number without ``.0``, which a page of many points would repeat."""
    return int(value) if value == int(value) and abs(value) < 1e15 else value
