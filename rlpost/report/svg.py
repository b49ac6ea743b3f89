"""Plots as SVG text: curves and stacked areas.

Pure; the page's style sheet sets the colours by class.

Input: points. Output: one ``<svg>``, as wide as its container. The attribute ``data-plot`` holds
the numbers for the page's tooltips, which a bitmap of matplotlib could not have.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from rlpost.report.series import SMOOTH_FROM, Point, short, smooth, thin, ticks

WIDTH, HEIGHT = 420, 200
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 10, 26
NUM_COLOURS = 6


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a plot.

    ``colour`` counts from 0; ``dots`` shows every point; ``soften`` draws a smoothed curve over a
    faint one when there are many points.
    """

    label: str
    points: Sequence[Point]
    colour: int = 0
    dots: bool = False
    soften: bool = True


@dataclass(frozen=True, slots=True)
class Axes:
    """Maps values to positions in the plot."""

    xs: Sequence[float]
    ys: Sequence[float]

    def x(self, value: float) -> float:
        """Pixels from the left."""
        low, high = self.xs[0], self.xs[-1]
        return LEFT + (value - low) / ((high - low) or 1.0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Pixels from the top."""
        low, high = self.ys[0], self.ys[-1]
        return HEIGHT - BOTTOM - (value - low) / ((high - low) or 1.0) * (HEIGHT - TOP - BOTTOM)


def line_plot(curves: Sequence[Curve], *, title: str, resumed: Sequence[float] = ()) -> str:
    """Draw curves over steps, with a dashed line where a later attempt resumed."""
    everything = [point for curve in curves for point in curve.points]
    axes = _axes(everything, from_zero=False)
    drawn = [_grid(axes), *(_resume(axes, step) for step in resumed)]
    for curve in curves:
        few, colour = thin(curve.points), f"c{curve.colour % NUM_COLOURS}"
        softened = curve.soften and len(curve.points) >= SMOOTH_FROM
        drawn.append(_path(axes, few, f"line {colour}{' faint' if softened else ''}"))
        if softened:
            drawn.append(
                _path(axes, thin(smooth(curve.points, len(curve.points) / 40)), f"line {colour}")
            )
        if curve.dots or len(few) == 1:
            drawn += [
                f'<circle class="dot {colour}" cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="3"/>'
                for x, y in few
            ]
    return _svg(
        title, drawn, axes, [(curve.label, curve.colour, thin(curve.points)) for curve in curves]
    )


def stacked_plot(curves: Sequence[Curve], *, title: str, resumed: Sequence[float] = ()) -> str:
    """Draw stacked areas; a curve without a value at a step counts as 0 there."""
    steps = sorted({x for curve in curves for x, _ in curve.points})
    groups = [steps[n : n + _per_group(steps)] for n in range(0, len(steps), _per_group(steps))]
    xs = [group[0] for group in groups] if len(groups) > 1 else steps[:1]
    tops, areas = [0.0] * len(groups), []
    for curve in curves:
        of_step = dict(curve.points)
        heights = [sum(of_step.get(step, 0.0) for step in group) / len(group) for group in groups]
        below, tops = tops, [low + height for low, height in zip(tops, heights, strict=True)]
        areas.append((curve, below, tops, heights))
    axes = _axes(
        [(x, top) for x, top in zip(xs, tops, strict=True)] + [(x, 0.0) for x in xs], from_zero=True
    )
    drawn = [_grid(axes)]
    for curve, below, above, _ in areas:
        edge = [(x, y) for x, y in zip(xs, above, strict=True)] + [
            (x, y) for x, y in zip(xs, below, strict=True)
        ][::-1]
        drawn.append(_path(axes, edge, f"area c{curve.colour % NUM_COLOURS}", closed=True))
    drawn += [_resume(axes, step) for step in resumed]
    shown = [
        (curve.label, curve.colour, [(x, height) for x, height in zip(xs, heights, strict=True)])
        for curve, _, _, heights in areas
    ]
    return _svg(title, drawn, axes, shown)


def _per_group(steps: Sequence[float]) -> int:
    return -(-len(steps) // 150)


def _axes(everything: Sequence[Point], *, from_zero: bool) -> Axes:
    xs, ys = [x for x, _ in everything] or [0.0], [y for _, y in everything] or [0.0]
    low = 0.0 if from_zero else min(ys)
    return Axes([min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1], ticks(low, max(ys)))


def _grid(axes: Axes) -> str:
    drawn = []
    for value in axes.ys:
        y = axes.y(value)
        drawn.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        drawn.append(
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_tick(value, axes.ys)}</text>'
        )
    low, high = axes.xs
    inside = [
        value
        for value in ticks(low, high, 5)
        if low - 1e-9 <= value <= high + 1e-9 and value == round(value)
    ]
    for value in inside:
        drawn.append(
            f'<text x="{axes.x(value):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{_tick(value, inside)}</text>'
        )
    return "".join(drawn)


def _tick(value: float, beside: Sequence[float]) -> str:
    """Format a number on an axis; a rounding error near 0 becomes 0."""
    step = abs(beside[1] - beside[0]) if len(beside) > 1 else 1.0
    return short(0.0 if abs(value) < step * 1e-6 else value)


def _resume(axes: Axes, step: float) -> str:
    if not axes.xs[0] <= step <= axes.xs[-1]:
        return ""
    text = f"<title>a later attempt resumed after step {short(step)}</title>"
    return f'<path class="resume" d="M{axes.x(step):.1f} {TOP}V{HEIGHT - BOTTOM}">{text}</path>'


def _path(axes: Axes, curve: Sequence[Point], kind: str, *, closed: bool = False) -> str:
    if not curve:
        return ""
    places = "L".join(f"{axes.x(x):.1f} {axes.y(y):.1f}" for x, y in curve)
    return f'<path class="{kind}" d="M{places}{"Z" if closed else ""}"/>'


def _svg(
    title: str, drawn: Sequence[str], axes: Axes, shown: Sequence[tuple[str, int, Sequence[Point]]]
) -> str:
    plot = {
        "box": [LEFT, RIGHT, TOP, BOTTOM, WIDTH, HEIGHT],
        "x": [axes.xs[0], axes.xs[-1]],
        "y": [axes.ys[0], axes.ys[-1]],
        "curves": [
            {"label": label, "colour": colour % NUM_COLOURS, "points": _packed(curve)}
            for label, colour, curve in shown
        ],
    }
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" tabindex="0" '
        f'data-plot="{escape(json.dumps(plot, separators=(",", ":")))}">{"".join(drawn)}'
        f'<path class="cursor" d=""/></svg>'
    )


def _packed(curve: Sequence[Point]) -> list[list[float]]:
    fewer: Callable[[float], float] = lambda value: float(f"{value:.5g}")  # noqa: E731
    return [[x, fewer(y)] for x, y in curve]
