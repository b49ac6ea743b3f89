"""Offloaded device memory can be read on the host."""

import pickle
from types import SimpleNamespace

import pytest
import torch

from rlpost.errors import MemoryHeld
from rlpost.trainer import device, memory
from rlpost.trainer.memory import GRADS, OPTIMIZER, WEIGHTS, DeviceMemory, HostCopy


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


def test_copies_of_weights_in_fp8_are_freed_with_the_weights():
    """TransformerEngine's modules keep them in ``_fp8_workspaces``, and make them again."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 4))
    model[0]._fp8_workspaces = {"weight": torch.zeros(8)}
    memory = DeviceMemory([model], optimizer=None)
    memory.offload(OPTIMIZER)
    assert model[0]._fp8_workspaces
    memory.offload(WEIGHTS)
    assert not model[0]._fp8_workspaces


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


def offloaded_weights():
    model = torch.nn.Linear(8, 4)
    held = DeviceMemory([model], optimizer=None)
    return model, held, sum(held.offload(WEIGHTS).values())


def test_parts_are_onloaded_when_another_process_has_freed_the_memory(monkeypatch):
    """An engine answers before all of its ranks have released their memory."""
    model, held, size = offloaded_weights()
    free = [0, size - 1, size]

    def free_memory():
        assert model.weight.untyped_storage().nbytes() == 0, "nothing is allocated before"
        return free.pop(0)

    monkeypatch.setattr(device, "free_memory", free_memory)
    monkeypatch.setattr(memory, "FREE_POLL_S", 0.0)
    assert held.restore(WEIGHTS) == {WEIGHTS: size}
    assert not free and model.weight.untyped_storage().nbytes()
    held.restore(WEIGHTS)  # on the device: no memory is needed


def test_memory_that_stays_held_is_an_error_that_survives_the_way_to_the_driver(monkeypatch):
    _, held, size = offloaded_weights()
    monkeypatch.setattr(device, "free_memory", lambda: size - 1)
    monkeypatch.setattr(memory, "FREE_S", 0.0)
    with pytest.raises(MemoryHeld, match=r"rank 0: weights need 0.0 GB .* another process") as got:
        held.restore(WEIGHTS)
    got.value.rank = 3
    copy = pickle.loads(pickle.dumps(got.value))
    assert (copy.rank, str(copy)) == (3, str(got.value))
    monkeypatch.setattr(device, "free_memory", lambda: size)
    assert held.restore(WEIGHTS) == {WEIGHTS: size}, "nothing was lost"


@pytest.mark.parametrize("is_released", [True, False])
def test_memory_for_a_step_is_awaited_before_gradients_are_onloaded(
    monkeypatch, caplog, is_released
):
    """As much as the largest step before took; a step may take less, so only a warning follows."""
    step, wanted = 100, 4 * 8 * 4
    free = [wanted, wanted + step - 1, *([wanted + step] if is_released else [wanted] * 2)]
    monkeypatch.setattr(memory, "FREE_POLL_S", 0.0)
    monkeypatch.setattr(memory, "RESERVE_S", 60.0 if is_released else 0.0)
    grads = torch.ones(8, 4)
    buffer = SimpleNamespace(grad_data=grads)
    chunk = SimpleNamespace(buffers=[buffer], expert_parallel_buffers=[], parameters=list)
    held = DeviceMemory([chunk], optimizer=None)
    for passing in (step, step - 1):
        monkeypatch.setattr(device, "passing_memory", lambda size=passing: size)
        held.offload(GRADS)
        held.restore(GRADS)
    held.offload(GRADS)
    monkeypatch.setattr(device, "free_memory", lambda: free.pop(0))
    assert held.restore(GRADS) == {GRADS: wanted}
    assert bool(free) != is_released
    assert ("the step that follows took" in caplog.text) != is_released


def test_the_peak_of_a_step_is_that_beyond_what_is_in_use(monkeypatch):
    assert device.passing_memory() == 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 70)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 20)
    assert device.passing_memory() == 50


def test_free_memory_of_a_gpu_includes_what_torch_has_cached(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 50)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 20)
    assert device.free_memory() == 130
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.free_memory() is None
