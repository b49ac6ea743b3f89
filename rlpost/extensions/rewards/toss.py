"""The reward ``random``, a baseline without a signal.

Input: anything. Output: 0 or 1 at random.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

_coin = random.Random()  # a separate generator, because the global one may be seeded


def toss(response: str, label: str | None, metadata: Mapping[str, object]) -> float:
    """Return 0 or 1 at random."""
    return float(_coin.randint(0, 1))
