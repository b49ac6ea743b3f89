"""What a plan says of the time of a step, by arithmetic. Pure.

Input: an estimate. Output: rows of the plan's table, and the same as an object.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from rlpost.config.plan.cards import CARDS
from rlpost.extensions.planning.estimate import Estimate, Sizes
from rlpost.extensions.planning.rates import nearest_card
from rlpost.extensions.planning.step_time import Faster, faster_settings, step_time


def time_rows(result: Estimate, faster: Sequence[Faster]) -> list[tuple[str, str]]:
    """Rows for the time of a step by arithmetic, its largest parts, and what shortens it."""
    name = nearest_card(result.gpu_bytes)
    time = step_time(result, CARDS[name])
    phases = f"generation {time.generation:.0f}, training {time.training:.0f}"
    phases += f"{' beside it' if time.is_parallel else ''}, weight update {time.update:.0f}"
    parts = ", ".join(f"{part} {share:.0%}" for part, share in time.largest)
    text = f"about {time.total:.0f} s on {name} by arithmetic: {phases}; training at "
    rows = [("step", f"{text}{time.mfu:.0%} MFU"), ("longest parts", parts)]
    changes = [f"{option.words} saves {option.saved:.0%}" for option in faster]
    return [*rows, *([("shorter with", "\n".join(changes))] if changes else [])]


def time_object(result: Estimate, sizes: Sizes) -> dict[str, object]:
    """The time of a step by arithmetic, in seconds."""
    card = CARDS[nearest_card(result.gpu_bytes)]
    time = step_time(result, card)
    return {
        "total": time.total,
        "generation": time.generation,
        "training": time.training,
        "weight_update": time.update,
        "mfu": time.mfu,
        "parts": dict(time.parts),
        "faster": [asdict(option) for option in faster_settings(result, card, sizes)],
    }
