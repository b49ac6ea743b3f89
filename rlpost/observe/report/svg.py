"""Plots as SVG text: curves and stacked areas.

Pure; the page's style sheet sets the colours by class.

Input: points. Output: one ``<svg>``, as wide as its container. The attribute ``data-plot`` holds
the numbers from which the page's script draws tooltips, a zoomed range, a logarithmic scale or
hours on the horizontal axis (``templates/plots.js``). Without the script the drawing here is
complete.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

from rlpost.observe.report.series import (
    MAX_POINTS,
    SMOOTH_FROM,
    Point,
    short,
    smooth,
    spaced,
    thin,
    ticks,
)

WIDTH, HEIGHT = 420, 200
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 10, 26
NUM_COLOURS = 6
MAX_DOTS = 60
SOFT_POINTS = 100  # of a smoothed curve
MARK_GAP = 3.0  # pixels between two marks on an axis; closer ones are one mark
MANY_RESUMES = 12  # from here on, resumes are ticks at the upper edge instead of full lines


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

    @property
    def is_softened(self) -> bool:
        """Whether a smoothed curve is drawn."""
        return self.soften and len(self.points) >= SMOOTH_FROM

    @property
    def has_dots(self) -> bool:
        """Whether every point is shown; many dots would be a band that hides the curve."""
        return self.dots and len(self.points) <= MAX_DOTS

    def smoothed(self) -> list[Point]:
        """The smoothed curve, in few points."""
        return thin(smooth(self.points, len(self.points) / 40), SOFT_POINTS)


@dataclass(frozen=True, slots=True)
class Marks:
    """Steps that every plot of a run marks: where later attempts resumed, and checkpoints."""

    resumed: Sequence[float] = ()
    saved: Sequence[float] = ()


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


def line_plot(
    curves: Sequence[Curve],
    *,
    title: str,
    marks: Marks | None = None,
    num_points: int = MAX_POINTS,
    num_drawn: int = MAX_POINTS,
) -> str:
    """Draw curves over steps, with marks where later attempts resumed and at checkpoints.

    Args:
        num_points: points of a curve that the page's script has, for a zoomed view.
        num_drawn: points of a curve in the drawing without the script.
    """
    finite = [point for curve in curves for point in curve.points]
    axes = _axes(finite, [x for curve in curves for x, _ in curve.lost], from_zero=False)
    drawn = [_grid(axes), _marks(axes, marks or Marks())]
    for curve in curves:
        few, colour = thin(curve.points, num_drawn), f"c{curve.colour % NUM_COLOURS}"
        drawn.append(_path(axes, few, f"line {colour}{' faint' if curve.is_softened else ''}"))
        if curve.is_softened:
            drawn.append(_path(axes, curve.smoothed(), f"line {colour}"))
        if curve.has_dots or len(few) == 1:
            drawn += [
                f'<circle class="dot {colour}" cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="3"/>'
                for x, y in few
            ]
        drawn.append(_lost(axes, curve))
    return _svg(title, drawn, [_data(curve, num_points) for curve in curves])


def stacked_plot(curves: Sequence[Curve], *, title: str, marks: Marks | None = None) -> str:
    """Draw stacked areas; a curve without a value at a step counts as 0 there."""
    steps = sorted({x for curve in curves for x, _ in curve.points})
    groups = [steps[n : n + _per_group(steps)] for n in range(0, len(steps), _per_group(steps))]
    xs = [group[0] for group in groups]
    tops, areas = [0.0] * len(groups), []
    for curve in curves:
        of_step = dict(curve.points)
        heights = []
        for group in groups:
            heights.append(sum(of_step.get(step, 0.0) for step in group) / len(group))
        below, tops = tops, [low + height for low, height in zip(tops, heights, strict=True)]
        areas.append((curve, below, tops, heights))
    edges = [*zip(xs, tops, strict=True), *((x, 0.0) for x in xs)]
    axes = _axes(edges, [x for curve in curves for x, _ in curve.lost], from_zero=True)
    drawn = [_grid(axes)]
    for curve, below, above, _ in areas:
        # along the upper edge to the right, and back along the lower one
        lower = list(zip(xs, below, strict=True))
        edge = [*zip(xs, above, strict=True), *reversed(lower)]
        drawn.append(_path(axes, edge, f"area c{curve.colour % NUM_COLOURS}", closed=True))
    drawn += [_lost(axes, curve) for curve in curves]
    drawn.append(_marks(axes, marks or Marks()))
    shown = [
        _data(replace(curve, points=list(zip(xs, heights, strict=True)), soften=False), MAX_POINTS)
        for curve, _, _, heights in areas
    ]
    return _svg(title, drawn, shown, is_stacked=True)


def _per_group(steps: Sequence[float]) -> int:
    return max(1, -(-len(steps) // 150))


def _axes(everything: Sequence[Point], more_xs: Sequence[float] = (), *, from_zero: bool) -> Axes:
    xs = [*(x for x, _ in everything), *more_xs] or [0.0]
    ys = [y for _, y in everything] or [0.0]
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
    # steps are whole numbers; the slack keeps ticks at the ends in spite of rounding
    within = [value for value in ticks(low, high, 5) if low - 1e-9 <= value <= high + 1e-9]
    inside = [value for value in within if value == round(value)]
    for value in inside:
        drawn.append(
            f'<text x="{axes.x(value):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{_tick(value, inside)}</text>'
        )
    return "".join(drawn)


def _tick(value: float, beside: Sequence[float]) -> str:
    """Format a number on an axis; a rounding error near 0 becomes 0."""
    step = abs(beside[1] - beside[0]) if len(beside) > 1 else 1.0
    return short(0.0 if abs(value) < step * 1e-6 else value)


def _marks(axes: Axes, marks: Marks) -> str:
    """One path for all resumes and one for all checkpoints; marks that would touch are one."""
    paths = []
    for kind, steps, words in (
        ("saved", marks.saved, "checkpoints at steps"),
        ("resume", marks.resumed, "later attempts resumed after steps"),
    ):
        inside = [step for step in steps if axes.xs[0] <= step <= axes.xs[-1]]
        if not inside:
            continue
        edges = f"{HEIGHT - BOTTOM} v-4" if kind == "saved" else f"{TOP} V{HEIGHT - BOTTOM}"
        if kind == "resume" and len(inside) >= MANY_RESUMES:
            edges = f"{TOP} v7"
        places = spaced([axes.x(step) for step in inside], MARK_GAP)
        path = "".join(f"M{place:.1f} {edges}" for place in places)
        text = f"<title>{words} {_few(inside)}</title>"
        paths.append(f'<path class="{kind}" d="{path}">{text}</path>')
    return "".join(paths)


def _few(steps: Sequence[float], most: int = 8) -> str:
    shown = ", ".join(short(step) for step in steps[:most])
    return shown if len(steps) <= most else f"{shown} and {len(steps) - most} more"


def _lost(axes: Axes, curve: Curve) -> str:
    """Crosses where a curve has no finite value: infinity above, NaN and minus infinity below."""
    if not curve.lost:
        return ""
    path = ""
    for is_above, edge in ((True, TOP), (False, HEIGHT - BOTTOM)):
        steps = [x for x, word in curve.lost if (word == "∞") == is_above]
        for place in spaced([axes.x(x) for x in steps], MARK_GAP):
            path += f"M{place - 3:.1f} {edge - 3}l6 6m0 -6l-6 6"
    words = sorted({word for _, word in curve.lost})
    text = f"{curve.label}: {', '.join(words)} at step {_few([x for x, _ in curve.lost])}"
    return f'<path class="lost" d="{path}"><title>{escape(text)}</title></path>'


def _path(axes: Axes, curve: Sequence[Point], kind: str, *, closed: bool = False) -> str:
    if not curve:
        return ""
    places = "L".join(f"{axes.x(x):.1f} {axes.y(y):.1f}" for x, y in curve)
    return f'<path class="{kind}" d="M{places}{"Z" if closed else ""}"/>'


def _data(curve: Curve, num_points: int) -> dict[str, object]:
    """The numbers of a curve for the page's script."""
    data: dict[str, object] = {
        "label": curve.label,
        "colour": curve.colour % NUM_COLOURS,
        "points": _packed(thin(curve.points, num_points)),
    }
    if curve.is_softened:
        data["soft"] = _packed(curve.smoothed())
    if curve.has_dots:
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


def _svg(
    title: str,
    drawn: Sequence[str],
    shown: Sequence[Mapping[str, object]],
    *,
    is_stacked: bool = False,
) -> str:
    plot: dict[str, object] = {
        "box": [LEFT, RIGHT, TOP, BOTTOM, WIDTH, HEIGHT],
        "curves": shown,
    }
    if is_stacked:
        plot["stacked"] = 1
    data = escape(json.dumps(plot, separators=(",", ":"), ensure_ascii=False), quote=False)
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" '
        f"""tabindex="0" data-plot='{data.replace("'", "&#39;")}'><g class="drawn">{"".join(drawn)}</g>"""
        f'<path class="cursor" d=""/></svg>'
    )


def _packed(curve: Sequence[Point]) -> list[list[float]]:
    return [[_brief(x), _brief(float(f"{y:.5g}"))] for x, y in curve]


def _brief(value: float) -> float:
    """A whole number without ``.0``, which a page of many points would repeat."""
    return int(value) if value == int(value) and abs(value) < 1e15 else value
