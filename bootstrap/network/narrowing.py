"""Narrow a set of candidates by successive criteria and record the reasons.

Input: candidates, and predicates or scores. Output: the remaining candidates, and sentences.
Invariant: a set never becomes empty; a criterion that would remove all candidates is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from bootstrap.network.network_facts import Interface, RdmaPort

Candidate = TypeVar("Candidate", Interface, RdmaPort)


class Narrowing(Generic[Candidate]):
    """The remaining candidates; ``why`` records the effect of each criterion."""

    def __init__(self, candidates: Iterable[Candidate], why: list[str]) -> None:
        self.left: Sequence[Candidate] = tuple(candidates)
        self.why = why

    def keep(self, condition: Callable[[Candidate], bool], reason: str) -> None:
        """Keep the candidates that satisfy the condition, if there are any."""
        kept = tuple(one for one in self.left if condition(one))
        if kept and len(kept) < len(self.left):
            removed = ", ".join(one.name for one in self.left if one not in kept)
            self.why.append(f"not {removed}: {reason}")
            self.left = kept

    def keep_best(self, score: Callable[[Candidate], float], reason: str) -> None:
        """Keep the candidates with the highest score."""
        if len(self.left) > 1:
            best = max(score(one) for one in self.left)
            self.keep(lambda one: score(one) == best, reason)
