"""Which bucket a source sends when, and what an update that was broken off leaves behind."""

import pytest
import torch

from rlpost.weights import sync
from rlpost.weights.sync import Broadcast


class FakeBuckets:
    """One bucket on each of two stages, then one more on the first; each holds its own number, and the update's."""

    stages = (0, 1, 0)
    update = 1

    def __init__(self, stage):
        self.stage = stage

    def __len__(self):
        return len(self.stages)

    def stage_of(self, index):
        return self.stages[index]

    def gather(self, index, *, on_all_stages):
        return {"weight": torch.tensor([10 * self.update + index], dtype=torch.uint8)}


@pytest.fixture
def sent(monkeypatch):
    found = []
    monkeypatch.setattr(sync.dist, "broadcast", lambda flat, **_: found.append(flat.tolist()))
    return found


def source(stage):
    made = Broadcast(FakeBuckets(stage), gathers=True, is_source=True, backend="gloo", timeout_s=1)
    made.group = object()
    return made


@pytest.mark.parametrize(("stage", "wanted"), [(0, [[10], [12]]), (1, [[11]])])
def test_each_source_sends_the_buckets_of_its_stage_once(sent, stage, wanted):
    broadcast = source(stage)
    for index in range(3):
        broadcast.send(index)
    assert sent == wanted


@pytest.mark.parametrize(("stage", "wanted"), [(0, [[20], [22]]), (1, [[21]])])
def test_what_was_gathered_for_an_update_that_was_broken_off_is_never_sent(sent, stage, wanted):
    broadcast = source(stage)
    broadcast.send(0)  # and the next one is gathered
    sent.clear()
    broadcast.buckets.update = 2
    for index in range(3):
        broadcast.send(index)
    assert sent == wanted
