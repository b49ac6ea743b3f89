"""Readable bytes, counts and durations. Pure; Python 3.6.

Units are powers of 1000, as disks and GPUs are sold.
"""

from typing import Sequence


def size_text(num_bytes: float) -> str:
    """Bytes, or bytes a second.

    >>> size_text(450_600), size_text(80e9)
    ('450.6 kB', '80.0 GB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.2f} TB"


def count_text(number: int) -> str:
    """A count, such as that of parameters.

    >>> count_text(4_022_468_096), count_text(450_560), count_text(64)
    ('4.02B', '450.6k', '64')
    """
    for size, letter, digits in ((10**9, "B", 2), (10**6, "M", 1), (10**3, "k", 1)):
        if number >= size:
            return f"{number / size:.{digits}f}{letter}"
    return str(number)


def duration_text(seconds: float) -> str:
    """Return a duration in its two largest units.

    >>> [duration_text(x) for x in (0.25, 12, 75, 3725, 190000)]
    ['0.25 s', '12 s', '1 min 15 s', '1 h 2 min', '2 d 4 h']
    """
    if seconds < 60:
        return f"{seconds:.3g} s"
    for size, unit, below, small in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if seconds >= size:
            rest = int(seconds % size // below)
            return f"{int(seconds // size)} {unit}" + (f" {rest} {small}" if rest else "")
    raise AssertionError(seconds)


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
