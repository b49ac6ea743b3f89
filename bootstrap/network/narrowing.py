"""Narrow a set of RDMA ports by successive criteria and record the reasons.

Input: ports and predicates. Output: the remaining ports, and sentences.
Invariant: a set never becomes empty; a criterion that would remove all ports is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from bootstrap.network.network_facts import RdmaPort


class Narrowing:
    """The remaining ports; ``why`` records the effect of each criterion."""

    def __init__(self, ports: Iterable[RdmaPort], why: list[str]) -> None:
        self.left: Sequence[RdmaPort] = tuple(ports)
        self.why = why

    def keep(self, condition: Callable[[RdmaPort], bool], reason: str) -> None:
        """Keep the ports that satisfy the condition, if there are any."""
        kept = tuple(one for one in self.left if condition(one))
        if kept and len(kept) < len(self.left):
            removed = ", ".join(one.name for one in self.left if one not in kept)
            self.why.append(f"not {removed}: {reason}")
            self.left = kept
