"""Render the templates of the report. Pure.

Input: the name of a template and its values. Output: one HTML file that loads nothing else. Values
are escaped, and the Content-Security-Policy allows the page's own script alone, so text that a
model wrote cannot run.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import cache

from jinja2 import ChainableUndefined, Environment, PackageLoader
from markupsafe import Markup

from common.units import duration_text
from rlpost.extensions.watching.report.panels import Panel
from rlpost.extensions.watching.report.plots import NUM_COLOURS, plot
from rlpost.extensions.watching.series import short

PAGE_POINTS = 40_000
"""Points of all curves of a page, except where a curve would get fewer than MIN_CURVE."""
MIN_CURVE, MAX_CURVE = 120, 1000


def render(template: str, *, title: str, **values: object) -> str:
    """Return the page that ``templates/TEMPLATE`` makes of ``values``."""
    environment = _environment()
    script = _source("page.js") + _source("plots.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    page = environment.get_template(template).render(
        title=title, script=script, style=_source("page.css"), policy=Markup(policy), **values
    )
    # JSON may hold half of a surrogate pair, which UTF-8 cannot encode: it becomes a question mark.
    return page.encode(errors="replace").decode()


def legend_of(panel: Panel) -> list[tuple[str, str]]:
    """Return (label, colour class) per curve; empty for one curve named like its panel."""
    names = [(curve.label, colour_class(curve.colour)) for curve in panel.curves]
    return [] if len(names) == 1 and names[0][0] == panel.title.lower() else names


def colour_class(number: int) -> str:
    """Return the CSS class of a curve's colour."""
    return f"c{number % NUM_COLOURS}"


def curve_points(*of_groups: Sequence[Panel]) -> int:
    """Return how many points a curve may have, so that a page of many curves stays small."""
    num_curves = sum(len(panel.curves) for panels in of_groups for panel in panels)
    return min(MAX_CURVE, max(MIN_CURVE, PAGE_POINTS // max(1, num_curves)))


def _picture(panel: Panel, num_points: int) -> Markup:
    # plots.py escapes its texts
    drawn = plot(
        panel.curves, title=panel.title, is_stacked=panel.is_stacked, num_points=num_points
    )
    return Markup(drawn)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("rlpost.extensions.watching.report", "templates"),
        autoescape=True,
        # a missing field of a record is empty: half a run has a page too
        undefined=ChainableUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "seconds": duration_text,
        "short": short,
        "json": json.dumps,
        "legend_of": legend_of,
        "picture": _picture,
        "numbers": lambda value: Markup(json.dumps(value, separators=(",", ":"))),
    }
    return environment


@cache
def _source(name: str) -> str:
    loader = _environment().loader
    assert loader is not None
    return loader.get_source(_environment(), name)[0]
