"""Records of a GPU: kernels, allocations, memory."""

import gzip
import json
import pickle

import pytest

torch = pytest.importorskip("torch")

from rlpost.trainer import device  # noqa: E402
from rlpost.trainer.actor import Profiling  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.needs(cuda=True),
]


def test_a_profile_has_kernels_and_a_history_has_the_allocations(tmp_path):
    profiling = Profiling(0)
    profiling.begin([0], operators=True, memory=True)
    square = torch.ones(1024, 1024, device="cuda")
    (square @ square).sum().item()
    profile, memory = profiling.end(str(tmp_path), "1-1")
    with gzip.open(profile) as file:
        kinds = {event.get("cat") for event in json.load(file)["traceEvents"]}
    assert "kernel" in kinds
    with open(memory, "rb") as file:
        traces = pickle.load(file)["device_traces"][0]
    assert any(event["action"] == "alloc" and event["size"] == square.nbytes for event in traces)


def test_peak_memory_is_counted_since_the_previous_report():
    device.memory_use()
    held = torch.ones(256, 1024, 1024, device="cuda")
    peak = device.memory_use()["memory/actor_gpu_peak_gb"]
    assert peak >= held.nbytes / 1e9
    del held
    device.memory_use()
    found = device.memory_use()
    assert found["memory/actor_gpu_peak_gb"] < peak
    assert 0 < found["memory/gpu_used_frac"] <= 1
