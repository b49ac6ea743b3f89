"""Text for a terminal of limited width; a pipe has no width, and nothing is wrapped there."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence

_COMMANDS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that act on a terminal: controls but tab and newline, and marks of text direction."""
LEAST = 40
"""Least number of columns that are used: with fewer, lines would hold single words."""


def visible(text: str) -> str:
    """Return text from a run for standard output: as it is, on a terminal without its commands.

    Logs and causes may quote an answer of the model, which could hide or forge other lines.
    """
    if not sys.stdout.isatty():
        return text
    return _COMMANDS.sub(lambda found: ascii(found[0])[1:-1], text)


def terminal_width() -> int | None:
    """Return the columns of the terminal on standard output; None where it is not a terminal."""
    if not sys.stdout.isatty():
        return None
    return max(LEAST, shutil.get_terminal_size().columns)


def named_lines(rows: Iterable[tuple[str, str]], indent: int, width: int | None) -> list[str]:
    """Return ``name  text`` lines whose texts are wrapped under each other.

    Args:
        indent: column of the texts.
        width: columns of the terminal; None wraps nothing. Words, paths above all, stay whole.
    """
    lines: list[str] = []
    for name, text in rows:
        head = f"{name:<{indent}}"
        if width is None:
            lines.append(head + text)
            continue
        wrapped = textwrap.wrap(
            text,
            width,
            initial_indent=head,
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines += wrapped or [head.rstrip()]
    return lines


def aligned(rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """Return rows as aligned columns; where they are too wide, the last column goes below its row.

    A row whose other columns are wider than the terminal stays whole.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    is_wide = width is not None and sum(widths) + 2 * (len(widths) - 1) > width
    lines: list[str] = []
    for row in rows:
        cells = [cell.ljust(size) for cell, size in zip(row, widths, strict=True)]
        if not is_wide:
            lines.append("  ".join(cells).rstrip())
            continue
        lines.append("  ".join(cells[:-1]).rstrip())
        lines += [line for line in named_lines([("", row[-1])], 4, width) if line]
    return lines
