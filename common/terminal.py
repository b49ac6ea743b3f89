"""Show control characters as text on a terminal.

Input: standard output and standard error of a command. Output: the same streams; on a terminal,
what is printed cannot move the cursor, set the title or hide a line. Pipes and files get the text
unchanged. Text that a command prints comes from logs, causes, names and settings, which may quote
an answer of the model or a file of another user.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

_COMMANDS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that act on a terminal: controls but tab and newline, and marks of text direction."""


def visible(text: str) -> str:
    r"""Return text without commands to a terminal; each is shown by its escape.

    >>> visible("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return _COMMANDS.sub(lambda match: ascii(match[0])[1:-1], text)


class VisibleStream:
    """A terminal on which all that is written passes ``visible``; ``stream`` writes as it is."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write text; return its length."""
        self.stream.write(visible(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def raw_stream(stream: object) -> Any:
    """Return the terminal itself, for programs that draw on it (progress bars, rich)."""
    return stream.stream if isinstance(stream, VisibleStream) else stream


@contextmanager
def visible_output() -> Iterator[None]:
    """Make standard output and standard error ``VisibleStream``s where they are terminals."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_protect, before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _protect(stream: Any) -> Any:
    is_plain = stream is not None and not isinstance(stream, VisibleStream)
    return VisibleStream(stream) if is_plain and stream.isatty() else stream
