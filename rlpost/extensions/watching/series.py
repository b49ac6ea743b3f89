"""Curves: from the lines of ``metrics.jsonl`` to few points and short numbers. Pure.

Input: lines and names. Output: points (x, y), finite, in order of x; and where a value is not
finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

Point = tuple[float, float]

MAX_POINTS = 300  # of one curve: as many as a plot of this width can show
SMOOTH_FROM = 30  # a smoothed curve is drawn from this number of points
_NUMBERS = (int, float)
_SIZES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def points(lines: Sequence[Mapping[str, float]], name: str) -> list[Point]:
    """Return the finite values of a metric over steps."""
    found = ((line["step"], line[name]) for line in lines if name in line)
    return [(float(x), float(y)) for x, y in found if type(y) in _NUMBERS and math.isfinite(y)]


def not_finite(lines: Sequence[Mapping[str, float]], name: str) -> list[tuple[float, str]]:
    """Return the steps at which a metric is not finite, with ``NaN``, ``∞`` or ``-∞``.

    None is NaN: JSON has null for it.
    """
    found = []
    for line in lines:
        value = line.get(name, 0.0)
        value = math.nan if value is None else value
        if type(value) is float and not math.isfinite(value):
            infinity = "∞" if value > 0 else "-∞"
            found.append((float(line["step"]), "NaN" if math.isnan(value) else infinity))
    return found


def thin(curve: Sequence[Point], at_most: int = MAX_POINTS) -> list[Point]:
    """Return a curve of fewer points that looks the same.

    It keeps both ends and the lowest and highest point of each interval, so that no peak
    disappears.
    """
    if len(curve) <= at_most:
        return list(curve)
    num_stretches = max(1, at_most // 2 - 1)
    inner = curve[1:-1]
    kept = [curve[0]]
    for n in range(num_stretches):
        stretch = inner[n * len(inner) // num_stretches : (n + 1) * len(inner) // num_stretches]
        extremes = {min(stretch, key=_height), max(stretch, key=_height)} if stretch else set()
        kept += sorted(extremes)
    return [*kept, curve[-1]]


def _height(point: Point) -> float:
    return point[1]


def smooth(curve: Sequence[Point], span: float) -> list[Point]:
    """Return the exponential moving average over about ``span`` points, with bias correction."""
    weight = math.exp(-1 / span)
    total = norm = 0.0
    found = []
    for x, y in curve:
        total, norm = weight * total + y, weight * norm + 1
        found.append((x, total / norm))
    return found


def short(value: float) -> str:
    """Return a number in few characters.

    >>> [short(x) for x in (0, 0.25, 12.0, 1234.0, 2.5e6, 3e-5, math.nan)]
    ['0', '0.25', '12', '1.23k', '2.5M', '3e-5', 'nan']
    """
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return str(value)
    for size, letter in _SIZES:
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    if abs(value) >= 1e-3:
        return f"{value:.3g}"
    digits, _, power = f"{value:.1e}".partition("e")
    return f"{digits.removesuffix('.0')}e{int(power)}"
