"""How the episodes of an environment continue after a crash."""

from __future__ import annotations

from typing import Literal

Resumption = Literal["restored", "replayed", "begun again"]


def resumption_of(environment: object) -> Resumption:
    """Return how episodes of an environment continue.

    One with ``save`` and ``restore`` gets its newest state; one that is ``deterministic`` is run
    again on the recorded turns; all others begin again.
    """
    if hasattr(environment, "save") and hasattr(environment, "restore"):
        return "restored"
    return "replayed" if getattr(environment, "deterministic", False) else "begun again"
