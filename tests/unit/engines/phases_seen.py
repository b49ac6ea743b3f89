"""The changes of phase that a membership makes: together all of ``CHANGES``, and no other."""

from contextlib import contextmanager
from unittest.mock import patch

from rlpost.engines.engine_phases import CHANGES, Phase, PhasedEngine

_OWN = """
down idle, down down, idle updating, idle serving, idle down, updating idle, updating down,
serving idle, serving updating, serving down
"""
_FLEET = """
idle updating, updating idle, idle admitting, admitting serving, serving leaving, leaving idle,
leaving serving
"""


def _pairs(text):
    return {tuple(map(Phase, pair.split())) for pair in text.split(",")}


OWN, FLEET = _pairs(_OWN), _pairs(_FLEET)
"""Of engines in the run's job, and in other jobs."""
assert {(one, then) for one, after in CHANGES.items() for then in after} == OWN | FLEET


@contextmanager
def phases_seen():
    """Yield a set that gets each change, as a pair of phases."""
    seen, change = set(), PhasedEngine.change

    def noted(engine, phase, holds=None):
        seen.add((engine.phase, phase))
        change(engine, phase, holds)

    with patch.object(PhasedEngine, "change", noted):
        yield seen
