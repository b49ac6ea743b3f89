"""Score slow ranks and hosts by the time that each rank computes. Pure.

Input: after each optimizer step, the seconds of every rank's forward and backward passes without
the final reduction of gradients, and the work of its samples (``algorithm.schedule``). Output:
scores, and hosts to exclude. The *pace* of a rank is seconds per unit of work; that of a host is
the mean of its ranks. Two scores, both at least 1:

    peer = pace / lowest pace of any rank (host) in this step
    own  = pace / lowest pace of the same rank (host) so far

A host with a high peer score is slower than the others, and its own score shows whether it always
was. If all hosts have high own scores, no host is at fault: the work is estimated wrongly, or the
file system is slow. A host whose peer score exceeds SLOW in each of STEPS consecutive steps is
proposed for exclusion, once. Tensor- and pipeline-parallel ranks wait for each other within a pass,
so that a slow rank raises the score of its whole data-parallel replica.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

SLOW, STEPS = 1.3, 20

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Score:
    """1: as fast as the best peer now, or as its own best so far; 2: twice the time."""

    peer: float
    own: float


@dataclass(frozen=True, slots=True)
class SlowHost:
    """A host to exclude: its newest peer score, and the number of steps that it was slow."""

    host: str
    peer: float
    steps: int

    def __str__(self) -> str:
        return (
            f"host {self.host} is slow: in each of the last {self.steps} steps its ranks took more "
            f"than {SLOW:g} times as long as those of the fastest host for the same work, now "
            f"{self.peer:.2f} times; consider --exclude {self.host} for the next attempt"
        )


class _Paces(Generic[K]):
    """The newest and the best pace of each rank, or of each host."""

    def __init__(self) -> None:
        self._now: dict[K, float] = {}
        self._best: dict[K, float] = {}

    def add(self, paces: Mapping[K, float]) -> None:
        self._now = dict(paces)
        for key, pace in paces.items():
            self._best[key] = min(pace, self._best.get(key, math.inf))

    def scores(self) -> dict[K, Score]:
        fastest = min(self._now.values(), default=0.0)
        return {
            key: Score(pace / fastest, pace / self._best[key]) for key, pace in self._now.items()
        }


class Stragglers:
    """The scores of one attempt."""

    def __init__(self, hosts: Sequence[str]) -> None:
        """``hosts`` is the host of each rank."""
        self._hosts = hosts
        self._order = list(dict.fromkeys(hosts))
        self._ranks: _Paces[int] = _Paces()
        self._nodes: _Paces[str] = _Paces()
        self._slow_for: dict[str, int] = {}

    def add(self, seconds: Sequence[float], work: Sequence[float]) -> list[SlowHost]:
        """Record a step: seconds and work of each rank. Returns hosts that are newly proposed.

        A rank without a measurement or without work has no score in this step.
        """
        paces = {
            rank: rank_seconds / amount
            for rank, (rank_seconds, amount) in enumerate(zip(seconds, work, strict=True))
            if rank_seconds > 0.0 and amount > 0.0
        }
        self._ranks.add(paces)
        host_seconds: dict[str, list[float]] = {}
        for rank, pace in paces.items():
            host_seconds.setdefault(self._hosts[rank], []).append(pace)
        self._nodes.add(
            {
                host: sum(rank_seconds) / len(rank_seconds)
                for host, rank_seconds in host_seconds.items()
            }
        )
        return self._proposed()

    def ranks(self) -> dict[int, Score]:
        """Return the scores of the newest step, by rank."""
        return self._ranks.scores()

    def nodes(self) -> dict[str, Score]:
        """Return the scores of the newest step, by host."""
        return self._nodes.scores()

    def metrics(self) -> dict[str, float]:
        """Return the scores by metric name; @K counts the hosts in order of their first rank."""
        ranks = self.ranks()
        if not ranks:
            return {}
        slowest = max(ranks, key=lambda rank: ranks[rank].peer)
        scores: dict[str, float] = {
            "perf/straggler_rank": slowest,
            "perf/straggler_peer_max": ranks[slowest].peer,
            "perf/straggler_own_max": max(score.own for score in ranks.values()),
        }
        for host, score in self.nodes().items():
            index = self._order.index(host)
            scores[f"perf/straggler_node_peer@{index}"] = score.peer
            scores[f"perf/straggler_node_own@{index}"] = score.own
        return scores

    def _proposed(self) -> list[SlowHost]:
        found = []
        for host, score in self.nodes().items():
            is_slow = score.peer > SLOW
            steps = self._slow_for[host] = self._slow_for.get(host, 0) + 1 if is_slow else 0
            if steps == STEPS:
                found.append(SlowHost(host, score.peer, steps))
        return found
