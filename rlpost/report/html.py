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
from typing import Any

from jinja2 import ChainableUndefined, Environment, PackageLoader
from markupsafe import Markup

from rlpost.report.panels import Panel
from rlpost.report.series import short
from rlpost.report.svg import NUM_COLOURS, line_plot, stacked_plot
from rlpost.units import duration_text


def render(template: str, *, title: str, **values: Any) -> str:
    """Return the page that ``templates/TEMPLATE`` makes of ``values``."""
    environment = _environment()
    script = _source("page.js")
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
    """Return label and colour class of each curve; nothing for a single curve that is named like
    its panel.
    """
    names = [(curve.label, colour_class(curve.colour)) for curve in panel.curves]
    return [] if len(names) == 1 and names[0][0] == panel.title.lower() else names


def colour_class(number: int) -> str:
    """Return the CSS class of a curve's colour."""
    return f"c{number % NUM_COLOURS}"


def _picture(panel: Panel, resumed: Sequence[float]) -> Markup:
    draw = stacked_plot if panel.is_stacked else line_plot
    # svg.py escapes its texts
    return Markup(draw(panel.curves, title=panel.title, resumed=resumed))


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("rlpost.report", "templates"),
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
    }
    return environment


@cache
def _source(name: str) -> str:
    loader = _environment().loader
    assert loader is not None
    return loader.get_source(_environment(), name)[0]
