"""Which repeated messages deserve a line: the first for a reason, then those at doubling counts."""

from __future__ import annotations

import re
from collections import Counter

MAX_REASONS = 1000
_NUMBER = re.compile(r"\d+")
_HEAD = 160  # characters that tell reasons apart; what follows is often the data at hand


class Repeats:
    """Counts messages by reason: messages that differ in numbers alone have the same."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def count(self, message: str) -> int | None:
        """Count a message; return how often its reason occurred, None if that was reported enough.

        >>> repeats = Repeats()
        >>> [repeats.count(f"port {port}: refused") for port in range(5)]
        [1, 2, None, 4, None]
        """
        reason = _NUMBER.sub("0", message)[:_HEAD]
        if reason not in self._counts and len(self._counts) >= MAX_REASONS:
            reason = ""
        self._counts[reason] += 1
        count = self._counts[reason]
        return count if count.bit_count() == 1 else None
