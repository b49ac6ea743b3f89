"""Weights sent to a process on another GPU over NCCL; without a GPU over gloo."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.contract.actor_ranks import plan_sync, run_ranks, send_weights
from tests.contract.families import make_family
from tests.contract.local_layers import use_local_layers
from tests.gpu.gpu_ranks import receive_on, send_to_a_peer_that_leaves
from tests.ports import free_port
from tests.settings import rank_config

# NCCL takes two ranks of a group on two GPUs only.
pytestmark = [pytest.mark.timeout(300), pytest.mark.needs(gpus=2)]
GROUP = "rlpost-gpu"


def test_a_broadcast_to_a_process_that_has_left_ends_with_an_error(
    tmp_path: Path, device: str, record_property, monkeypatch
) -> None:
    """On NCCL its kernel would wait for ever; afterwards the GPU computes again."""
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    make_family(tmp_path, "qwen3")
    settings = rank_config(str(tmp_path), bf16=False, update_weight_buffer_size=40_000)
    (plan,) = run_ranks(plan_sync, 1, settings, before=use_local_layers)
    context, port = multiprocessing.get_context("spawn"), free_port()
    results = context.Queue()
    where = ("cuda:1", "nccl") if device == "cuda" else ("cpu", "gloo")
    peer = context.Process(
        target=receive_on,
        args=(*where, port, f"{GROUP}-0", plan[:1], results),
        daemon=True,
    )
    peer.start()
    try:
        ((said, seconds),) = run_ranks(
            send_to_a_peer_that_leaves,
            1,
            settings,
            before=use_local_layers,
            port=port,
            group_name=GROUP,
        )
    finally:
        peer.kill()
        peer.join()
    record_property("figure", f"given up after {seconds:.1f} s")
    assert "did not reach all engines" in said


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_a_process_on_the_next_gpu_receives_every_weight_bit_for_bit(
    tmp_path: Path, device: str, name: str, record_property, monkeypatch
) -> None:
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")  # as the run sets it: both sides must agree
    make_family(tmp_path, name)
    settings = rank_config(str(tmp_path), bf16=False, update_weight_buffer_size=40_000)
    (plan,) = run_ranks(plan_sync, 1, settings, before=use_local_layers)
    context, port = multiprocessing.get_context("spawn"), free_port()
    results = context.Queue()
    where = ("cuda:1", "nccl") if device == "cuda" else ("cpu", "gloo")
    peer = context.Process(
        target=receive_on, args=(*where, port, f"{GROUP}-0", plan, results), daemon=True
    )
    peer.start()
    started = time.monotonic()
    try:
        run_ranks(
            send_weights,
            1,
            settings,
            before=use_local_layers,
            connections=[[port]],
            group_name=GROUP,
        )
        received = results.get(timeout=60)
    finally:
        peer.kill()
        peer.join()
    original = load_file(tmp_path / "model.safetensors")
    assert received.keys() == original.keys()
    for weight, tensor in original.items():
        assert received[weight].tobytes() == tensor.contiguous().numpy().tobytes(), weight
    record_property("figure", f"{len(plan)} buckets, {time.monotonic() - started:.1f} s with start")
