"""The state that a commit holds."""

from __future__ import annotations

import pytest

from rlpost.checkpoint.state import RunState
from rlpost.errors import CheckpointError


def test_a_state_survives_its_way_through_json():
    state = RunState().trained({"fetched": 12}, {"train/loss": 0.25})
    assert RunState.from_json(state.to_json()) == state


def test_every_trained_step_is_a_policy_version_and_awaits_its_metrics_line():
    state = RunState(step=3).trained({}, {"train/loss": 0.5})
    assert (state.step, state.policy_version, state.pending) == (4, 4, {"train/loss": 0.5})
    assert state.settled().pending is None


@pytest.mark.parametrize("text", ["", "[]", "{", '{"stepp": 3}'])
def test_what_is_not_a_state_is_refused(text):
    with pytest.raises(CheckpointError, match="not the state of a run"):
        RunState.from_json(text)
