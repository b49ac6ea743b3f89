"""Text for a terminal of limited width; a pipe has no width, and nothing is wrapped there.

``console`` is the only place that makes a console of rich: its text passes ``visible``, like all
that a command prints (``common.terminal``).
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from common.terminal import raw_stream, visible

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 400  # of tables: no path is wrapped
LEAST = 40
"""Least number of columns that are used: with fewer, lines would hold single words."""


def console(width: int | None = None, *, highlight: bool = True) -> Console:
    """Return the console of standard output; its texts are no markup.

    Args:
        width: columns; by default those of the terminal, else PIPE_WIDTH.
        highlight: whether rich colours numbers and paths.
    """
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class VisibleConsole(Console):
        """A console that draws no control characters of texts."""

        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterable[Segment]:
            """Render; only control segments, which rich itself makes, act on the terminal."""
            for text, style, control in super().render(renderable, options):
                shown = text if control or not self.is_terminal else visible(text)
                yield Segment(shown, style, control)

    if width is None and not sys.stdout.isatty():
        width = PIPE_WIDTH
    return VisibleConsole(
        file=raw_stream(sys.stdout), width=width, highlight=highlight, markup=False, emoji=False
    )


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
