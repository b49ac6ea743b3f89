"""Deaths and restarts of engines, as events of the ledger.

Input: losses and repairs that ``engine_health`` reports. Output: ``engine_lost`` when engines stop
answering, with the phase and the cause, and ``recovered`` with the role ``engine`` when they serve
again with the current weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from common.fleet_name import POLICY
from rlpost.driver.ledger_lines import RecordEvent, not_recorded

Phase = Literal["generate", "sync"]


@dataclass(frozen=True, slots=True)
class _Loss:
    at: float  # seconds on the clock of ``EngineEvents``
    phase: Phase
    cause: str


class EngineEvents:
    """Records each loss once, and each return with the seconds since the loss."""

    def __init__(
        self,
        record: RecordEvent = not_recorded,
        *,
        group: str = POLICY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``group``: of the engines, in every event but the policy's; ``clock`` returns seconds."""
        self._record = record if group == POLICY else partial(record, group=group)
        self._clock = clock
        self._losses: dict[int, _Loss] = {}

    def lost(self, engines: Iterable[int], *, phase: Phase, cause: str) -> None:
        """Record that engines do not serve; engines that are lost already are not recorded again."""
        new = sorted(set(engines) - self._losses.keys())
        loss = _Loss(self._clock(), phase, cause)
        self._losses |= dict.fromkeys(new, loss)
        if new:
            self._record("engine_lost", engines=new, phase=phase, cause=cause)

    def back(self, engines: Iterable[int], *, version: int) -> None:
        """Record that engines serve again with the weights of ``version``: one event per loss."""
        by_loss: dict[_Loss, list[int]] = {}
        for engine in sorted(set(engines) & self._losses.keys()):
            by_loss.setdefault(self._losses.pop(engine), []).append(engine)
        for loss, found in by_loss.items():
            self._record(
                "recovered",
                role="engine",
                engines=found,
                phase=loss.phase,
                cause=loss.cause,
                seconds=round(self._clock() - loss.at, 3),
                version=version,
            )
