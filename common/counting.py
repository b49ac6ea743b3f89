"""Numbers of things as text. Python 3.6."""

from typing import Sequence

MAX_NAMED = 8


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, which takes an s unless it is one.

    >>> counted(1, "node"), counted(2, "node"), counted(0, "node"), counted(1200, "rank")
    ('1 node', '2 nodes', '0 nodes', '1200 ranks')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def first_names(names: Sequence[str]) -> str:
    """Return at most MAX_NAMED names, and how many more there are.

    >>> first_names(["n1", "n2"]), first_names(["n"] * 10)
    ('n1, n2', 'n, n, n, n, n, n, n, n and 2 more')
    """
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
