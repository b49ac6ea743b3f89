"""Offloaded device memory can be read on the host."""

import torch

from rlpost.actor.memory import WEIGHTS, DeviceMemory, HostCopy


def test_offloaded_values_are_read_from_the_host():
    model = torch.nn.Linear(8, 4)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    memory = DeviceMemory([model], optimizer=None)
    flat = [parameter.detach().view(-1) for parameter in model.parameters()]
    memory.offload(WEIGHTS)
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in flat)
    with memory.lock:
        for tensor, value in zip(flat, before, strict=True):
            assert memory.resident(tensor).equal(value.view(-1))
    memory.restore(WEIGHTS)
    assert memory.resident(flat[0]) is flat[0] and flat[0].equal(before[0].view(-1))


def test_a_host_copy_is_read_and_restored_across_its_pieces():
    """No piece is larger than asked for: what is pinned is rounded up to a power of two, piece by
    piece.
    """
    values = torch.arange(100, dtype=torch.uint8)
    copy = HostCopy(values.clone(), piece_bytes=16)
    for begin, end in [(0, 16), (3, 9), (15, 17), (30, 100), (0, 100), (99, 100)]:
        assert copy.part(begin, end).equal(values[begin:end])
    back = torch.zeros(100, dtype=torch.uint8)
    copy.fill(back)
    assert back.equal(values)
