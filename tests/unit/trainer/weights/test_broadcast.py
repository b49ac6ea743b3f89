"""Which source sends which bucket, and what remains after an aborted update.

Failures are tested with processes: ``tests/contract/cuda/test_weight_update_on_nccl.py``.
"""

import pytest
import torch

from rlpost.trainer.weights.trainer_side import Broadcast


class FakeBuckets:
    """One bucket on each of two stages, then one more on the first; each holds its own number, and
    the update's.
    """

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


class FakeGroup:
    """Records broadcasts."""

    def __init__(self):
        self.sent = []

    def broadcast(self, flat):
        self.sent.append(flat.tolist())


def source(stage):
    made = Broadcast(
        FakeBuckets(stage), gathers=True, is_source=True, backend="gloo", timeout_s=1, secret="s"
    )
    made.group = FakeGroup()
    return made


@pytest.mark.parametrize(("stage", "wanted"), [(0, [[10], [12]]), (1, [[11]])])
def test_each_source_sends_the_buckets_of_its_stage_once(stage, wanted):
    broadcast = source(stage)
    for index in range(3):
        broadcast.send(index)
    assert broadcast.group.sent == wanted


@pytest.mark.parametrize(("stage", "wanted"), [(0, [[20], [22]]), (1, [[21]])])
def test_a_bucket_gathered_for_an_aborted_update_is_never_sent(stage, wanted):
    broadcast = source(stage)
    broadcast.send(0)  # and the next one is gathered
    broadcast.group.sent.clear()
    broadcast.buckets.update = 2
    for index in range(3):
        broadcast.send(index)
    assert broadcast.group.sent == wanted
