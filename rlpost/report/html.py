"""Pieces of a page: text, tables, cards, filters, and the document around them. Pure.

Input: words of the run, never HTML. Output: HTML; what comes in is escaped here.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

Cell = str | tuple[str, str]  # the text, and the class of its cell


def text(value: Any) -> str:
    """A value as text that stands for itself anywhere in the page; half a surrogate pair, which UTF-8 has not, is ?."""
    return escape(str(value)).encode(errors="replace").decode()


def raw(tag: str, words: str) -> str:
    """One element around words."""
    return f"<{tag}>{text(words)}</{tag}>"


def section(name: str, title: str, inside: str) -> str:
    """A part of the page with an address of its own."""
    return f'<section id="{name}"><h2>{text(title)}</h2>{inside}</section>'


def card(inside: str) -> str:
    """HTML on a card."""
    return f'<div class="card">{inside}</div>'


def key(names: Sequence[tuple[str, str]]) -> str:
    """Which colour, by its class, is what."""
    return f'<div class="key">{"".join(f"<span><i class={kind}></i>{text(name)}</span>" for name, kind in names)}</div>'


def table(
    columns: Sequence[str], rows: Sequence[Sequence[Cell]], *, body: str = "", attributes: Sequence[str] = ()
) -> str:
    """A table; ``body`` is the id of its rows, ``attributes`` are those of each row."""
    head = "".join(f"<th>{text(column)}</th>" for column in columns)
    lines = []
    for number, row in enumerate(rows):
        cells = [cell if isinstance(cell, tuple) else (cell, "") for cell in row]
        shown = "".join(f'<td class="{kind}">{text(words)}</td>' for words, kind in cells)
        lines.append(f"<tr {attributes[number] if attributes else ''}>{shown}</tr>")
    name = f' id="{body}"' if body else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody{name}>{''.join(lines)}</tbody></table>"


def filter_tools(
    name: str, placeholder: str, *, options: Sequence[tuple[str, str]] = (), checkbox: str = "", at_most: int = 0
) -> str:
    """A search over the rows of the element ``name``, and a choice or a box to tick beside it; ``at_most`` rows are
    shown until all are asked for."""
    label = text(placeholder)
    parts = [f'<input type="search" placeholder="{label}" aria-label="{label}">']
    if options:
        chosen = "".join(f'<option value="{text(value)}">{text(words)}</option>' for value, words in options)
        parts.append(f'<select aria-label="which">{chosen}</select>')
    if checkbox:
        parts.append(f'<label><input type="checkbox"> {text(checkbox)}</label>')
    parts.append('<output class="soft"></output>')
    return f'<div class="tools" data-filters="{name}" data-at-most="{at_most}">{"".join(parts)}</div>'


@cache
def _file(name: str) -> str:
    return (files("rlpost.report") / name).read_text()


def document(title: str, parts: Sequence[str]) -> str:
    """A whole page with style and script in it."""
    script, style = _file("page.js"), _file("page.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:"
    policy = f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="referrer" content="no-referrer"><link rel="icon" href="data:,">'
        f"<title>{text(title)}</title><style>{style}</style></head>\n"
        f"<body><main>{''.join(parts)}</main>\n<script>{script}</script></body></html>\n"
    )
