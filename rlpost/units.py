"""Amounts as a person reads them: bytes and counts with a unit, in powers of 1000 as disks and GPUs are sold. Pure."""

from __future__ import annotations


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
