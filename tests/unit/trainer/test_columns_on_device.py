"""The device holds the columns of the micro-batches in flight, never those of the whole batch."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from rlpost.columns import FloatColumn, IntColumn
from rlpost.trainer import device, parallel, step
from rlpost.trainer.logprobs import TeacherScores, TopTokens, held_scores
from rlpost.trainer.packing import held_values, pack
from rlpost.trainer.routing_replay import ReplayPass, RoutingReplay
from tests.contract.samples import STEPS

NUM_MICRO_BATCHES, TOP_K = 4, 3


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> weakref.WeakSet[torch.Tensor]:
    """The tensors that were copied to the device and are still alive."""
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def on_device(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        alive.add(copy)
        return copy

    monkeypatch.setattr(device, "on_device", on_device)
    monkeypatch.setattr(parallel, "pipeline_group", lambda: SimpleNamespace(size=lambda: 1))
    return alive


def test_a_pass_holds_one_micro_batch_at_a_time(copies, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = STEPS[0][:NUM_MICRO_BATCHES]
    logprobs = [[sample.rollout_logprobs] for sample in samples]
    top = [
        [
            TopTokens(
                IntColumn([1] * TOP_K * sample.response_length),
                FloatColumn([0.0] * TOP_K * sample.response_length),
            )
        ]
        for sample in samples
    ]
    counts = []

    def schedule(*, forward_step_func, data_iterator, model, num_microbatches, **_):
        for _ in range(num_microbatches):
            output, loss = forward_step_func(data_iterator, model)
            loss(output)
            del output, loss
            counts.append(len(copies))

    def loss_of(index, packed, logits):
        assert torch.equal(held_values(logprobs, index, packed), packed.rollout_logprobs)
        scores = held_scores(TeacherScores(top=top), index, packed)
        assert scores.top_ids.shape == (len(packed.targets), TOP_K)
        return logits.sum()

    monkeypatch.setattr(step, "get_forward_backward_func", lambda: schedule)
    step.run(
        [lambda ids, *_, **__: ids.float()],
        [pack((sample,)) for sample in samples],
        loss_of=loss_of,
        forward_only=False,
        stop_points=MagicMock(),
    )
    assert counts == [0] * NUM_MICRO_BATCHES


def test_recorded_routes_leave_the_device_with_their_last_layer(monkeypatch) -> None:
    moved: list[torch.Tensor] = []
    monkeypatch.setattr(device, "on_host", lambda tensor: moved.append(tensor) or tensor.clone())
    replay = RoutingReplay.__new__(RoutingReplay)
    replay._layers, replay._shape = [None, None], SimpleNamespace(topk=2)
    current = ReplayPass(is_training=False, records=True, index=0)
    for slot in range(2):
        assert not moved
        replay.record(current, slot, torch.full((3, 2), slot))
    assert len(moved) == 1 and current.recorded[0] is not moved[0]
    assert current.recorded[0][:, 1].tolist() == [[1, 1]] * 3
