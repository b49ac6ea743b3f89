"""The phases of an engine, in the run's job or in another, and their order. Pure.

    DOWN -> IDLE -> UPDATING -> IDLE with the weights -> ADMITTING -> SERVING -> LEAVING -> IDLE

Two modules decide when an engine changes its phase, as they know different facts:
``rlpost.engines.own_membership`` about processes that the driver starts and updates together, and
an extension about engines in other jobs (``rlpost.driver.engines.joining``), which are updated one
by one. Engines of the run's job skip ADMITTING and LEAVING, because the driver itself chooses where
its next request goes; engines of other jobs are forgotten in place of DOWN.

Invariant: an engine gets requests only with the weights that its membership asks for.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """What the driver does with an engine."""

    DOWN = "down"  # without a process
    IDLE = "idle"
    UPDATING = "updating"
    ADMITTING = "admitting"
    SERVING = "serving"
    LEAVING = "leaving"


CHANGES: dict[Phase, tuple[Phase, ...]] = {
    Phase.DOWN: (Phase.IDLE, Phase.DOWN),
    Phase.IDLE: (Phase.UPDATING, Phase.ADMITTING, Phase.SERVING, Phase.DOWN),
    Phase.UPDATING: (Phase.IDLE, Phase.DOWN),
    Phase.ADMITTING: (Phase.SERVING,),
    Phase.SERVING: (Phase.LEAVING, Phase.IDLE, Phase.UPDATING, Phase.DOWN),
    Phase.LEAVING: (Phase.IDLE, Phase.SERVING),
}
"""The phases that may follow each one. An engine that does not leave in time serves again."""


@dataclass(slots=True)
class PhasedEngine:
    """An engine with its phase and its weights."""

    phase: Phase = Phase.IDLE
    holds: int | None = None
    """The version that this attempt sent to its process last; None before that, and during an update."""

    def change(self, phase: Phase, holds: int | None = None) -> None:
        """Change to a phase in which the engine has the weights ``holds``; None: they are unknown."""
        assert phase in CHANGES[self.phase], f"an engine that is {self.phase} cannot be {phase}"
        self.phase, self.holds = phase, holds

    def admit(self, version: int | None, phase: Phase = Phase.SERVING) -> None:
        """Let an engine with the weights of ``version`` get requests, or begin to."""
        assert self.holds == version, f"an engine is admitted with {self.holds}, not {version}"
        self.change(phase, version)
