"""The state that a commit holds."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rlpost.durable.state import RunState
from rlpost.errors import CheckpointError
from rlpost.types import Backlog, Prompt, Sample, SampleGroup, ScoredSample, Unfinished

PARTIAL = Sample(
    9,
    1,
    (5, 6),
    (7, 8, 9),
    (-0.1, -1e-9 / 3, 0.0),
    "größer\n三",
    "abort",
    4,
    "42",
    (1, 1, 0),
    ((3, 2), (4, 1)),
)
WHOLE = Sample(8, 0, (5,), (7,), (-0.25,), "x", "stop", 4)
BACKLOG = Backlog(
    finished=(SampleGroup(8, (ScoredSample(WHOLE, 1 / 3),)), SampleGroup(7, ())),
    unfinished=(
        Unfinished(Prompt(9, "p", (5, 6), "42 \ud83d", {"rm_type": "gsm8k"}), (PARTIAL,)),
        Unfinished(Prompt(10, "q", (1,))),
    ),
    num_fetched=11,
    num_trained=6,
    num_filtered=2,
    newest_id=10,
    counts={"rollout/num_filtered": 2.0},
    counts_in_training={"rollout/num_filtered": 1.0},
)


def test_a_state_survives_json():
    """To the last bit of every log-prob: what was generated before a preemption is trained after
    it.
    """
    state = RunState().trained({"train/loss": 0.25}).holding({"offset": 12}, BACKLOG)
    assert RunState.from_json(state.to_json()) == state


def test_a_state_is_written_in_pieces_of_one_group():
    """A call of ``json.dumps`` keeps the interpreter's lock: one for 100,000 groups stopped the
    event loop for 6 s, from a thread as well.
    """
    groups = tuple(SampleGroup(number, (ScoredSample(WHOLE, 1 / 3),) * 4) for number in range(50))
    state = RunState(step=3, cursor={"offset": 12}, backlog=replace(BACKLOG, finished=groups))
    pieces = list(state.json_pieces())
    assert "".join(pieces) == state.to_json()
    assert json.dumps(json.loads(state.to_json())) == state.to_json(), (
        "the text that earlier versions wrote"
    )
    assert max(piece.count('"reward"') for piece in pieces) == 4
    assert RunState.from_json("".join(pieces)) == state


def test_a_state_of_an_older_version_has_no_backlog():
    assert RunState.from_json('{"step": 3, "cursor": {}, "pending": null}') == RunState(step=3)


def test_every_trained_step_is_a_policy_version_and_awaits_its_metrics_line():
    state = RunState(step=3).trained({"train/loss": 0.5})
    assert (state.step, state.policy_version, state.pending) == (4, 4, {"train/loss": 0.5})
    assert state.recorded().pending is None


@pytest.mark.parametrize("text", ["", "[]", "{", '{"stepp": 3}', '{"step": 3, "backlog": {}}'])
def test_malformed_states_are_refused(text):
    with pytest.raises(CheckpointError, match="not the state of a run"):
        RunState.from_json(text)
