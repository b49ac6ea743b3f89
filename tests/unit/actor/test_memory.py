"""Device memory that is given up: its values are found wherever they are."""

import torch

from rlpost.actor.memory import WEIGHTS, DeviceMemory


def test_values_are_read_from_the_host_while_their_memory_is_given_up():
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
