"""Numbers of things as text."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, which takes an s unless it is one.

    >>> counted(1, "node"), counted(2, "node"), counted(0, "node"), counted(1200, "rank")
    ('1 node', '2 nodes', '0 nodes', '1200 ranks')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
