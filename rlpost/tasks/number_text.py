"""The text of numbers in data sets. Pure.

Graders compare labels as text, so a number has one spelling: positional digits, without a fraction
of zeros, however a file stores it.
"""

from __future__ import annotations

from decimal import Decimal


def number_text(value: float | Decimal) -> str:
    """Return a number in positional digits: 18.0 is ``18``, 1e16 ``10000000000000000``.

    A float has the fewest digits that identify it: 1e-7 is ``0.0000001``.

    Raises:
        ValueError: the number is NaN or infinite.
    """
    number = Decimal(repr(value)) if isinstance(value, float) else Decimal(value)
    if not number.is_finite():
        raise ValueError(f"{value} is not a finite number")
    digits = format(number, "f")
    if "." in digits:
        digits = digits.rstrip("0").removesuffix(".")
    return "0" if digits == "-0" else digits


def plain_text(value: object) -> str:
    """Return the text of a value of a row: numbers by ``number_text``, others by ``str``."""
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return str(value)
    return number_text(value) if Decimal(value).is_finite() else str(value)
