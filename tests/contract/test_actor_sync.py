"""The trainer's side of the weight sync, with a peer that receives as an engine does.

The peer is a separate process outside the trainer's world. It forms the group with the same
functions of torch as SGLang, and reads a bucket with SGLang's class, loaded from its file, because
the package need not be importable here.
"""

from __future__ import annotations

import importlib.util
import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from common.attempt import attempt_secret
from common.torch_store import replace_rendezvous
from rlpost.config.tree import Config
from tests.contract.actor_ranks import (
    connect_without_engines,
    plan_sync,
    run_ranks,
    send_weights,
    start_context,
    stop,
    train_with_offload,
)
from tests.contract.families import make_family
from tests.contract.layouts import LAYOUTS
from tests.contract.samples import STEPS
from tests.contract.test_actor import models, settings  # noqa: F401
from tests.ports import free_port, free_ports
from tests.settings import rank_config

pytestmark = pytest.mark.timeout(300)
BUCKET_BYTES = 40_000


def sglang_tensor_bucket() -> ModuleType:
    """Load the module sglang.srt.weight_sync.tensor_bucket from its file."""
    package = importlib.util.find_spec("sglang")
    assert package is not None and package.submodule_search_locations, "SGLang is not installed"
    path = Path(package.submodule_search_locations[0]) / "srt" / "weight_sync" / "tensor_bucket.py"
    spec = importlib.util.spec_from_file_location("sglang_tensor_bucket", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def join(port: int, group_name: str) -> Any:
    """Form a group with the trainer's rank 0."""
    return join_as(port, group_name, rank=1, world_size=2)


def join_as(port: int, group_name: str, *, rank: int, world_size: int, joined_as: str = "") -> Any:
    """Join a group of the trainer as SGLang does, or with a name as rlpost's loader does."""
    from torch.distributed.distributed_c10d import (
        Backend,
        PrefixStore,
        _new_process_group_helper,
        _world,
        rendezvous,
    )

    timeout = timedelta(seconds=90)
    url = f"tcp://127.0.0.1:{port}?group={joined_as}"
    store, _, _ = next(rendezvous(url, rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = _new_process_group_helper(
        world_size,
        rank,
        [],
        Backend("gloo"),
        PrefixStore(group_name, store),
        group_name=group_name,
        backend_options=None,
        timeout=timeout,
    )
    # The helper leaves it to its caller to register the ranks of the group.
    _world.pg_group_ranks[group] = {each: each for each in range(world_size)}
    return group


def receive(connections: list[list[int]], group_name: str, plan: tuple, results: Any) -> None:
    """Join every stage's group, receive all buckets and put {name: array}, for each connection."""
    bucket_module = sglang_tensor_bucket()
    replace_rendezvous(attempt_secret())
    for ports in connections:
        groups = [join(port, f"{group_name}-{stage}") for stage, port in enumerate(ports)]
        tensors: dict[str, Any] = {}
        for bucket in plan:
            metadata, start = [], 0
            for name, shape, dtype_name in zip(
                bucket.names, bucket.shapes, bucket.dtypes, strict=True
            ):
                dtype, size = getattr(torch, dtype_name), torch.Size(shape)
                end = start + size.numel() * dtype.itemsize
                metadata.append(
                    bucket_module.FlattenedTensorMetadata(
                        name, size, dtype, start, end, end - start
                    )
                )
                start = end
            flat = torch.empty(start, dtype=torch.uint8)
            torch.distributed.broadcast(flat, group=groups[bucket.stage], group_src=0)
            reader = bucket_module.FlattenedTensorBucket(flattened_tensor=flat, metadata=metadata)
            tensors |= {
                name: tensor.numpy().copy() for name, tensor in reader.reconstruct_tensors()
            }
        for group in groups:
            torch.distributed.destroy_process_group(group)
        results.put(tensors)


def received_by_an_engine(actor: Config, world_size: int) -> list[dict]:
    """Return the tensors that a peer receives from each of two connections.

    It receives all buckets through each connection.
    """
    plans = run_ranks(plan_sync, world_size, actor)
    assert all(plan == plans[0] for plan in plans), "every rank plans the same"
    assert len(plans[0]) > 3
    stages = actor.perf.pipeline_model_parallel_size
    context = start_context()
    results, ports = context.Queue(), free_ports(2 * stages)
    connections = [ports[:stages], ports[stages:]]
    peer = context.Process(
        target=receive, args=(connections, "rlpost-sync", plans[0], results), daemon=True
    )
    peer.start()
    try:
        run_ranks(
            send_weights, world_size, actor, connections=connections, group_name="rlpost-sync"
        )
        return [results.get(timeout=60) for _ in connections]
    finally:
        stop(peer)


def assert_equal_bit_for_bit(received: list[dict], folder: Path) -> None:
    original = load_file(folder / "model.safetensors")
    for tensors in received:
        assert tensors.keys() == original.keys()
        assert all(
            torch.equal(torch.from_numpy(tensors[name]), original[name]) for name in original
        )


@pytest.mark.parametrize(
    ("model", "layout", "world_size"), [("untied", "tp2_sp", 2), ("tied", "tp2_dp2_sp", 4)]
)
def test_an_engine_receives_every_weight_bit_for_bit_and_may_reconnect(
    models,  # noqa: F811
    model,
    layout,
    world_size,
):
    actor = settings(models, model, layout, update_weight_buffer_size=BUCKET_BYTES)
    assert_equal_bit_for_bit(received_by_an_engine(actor, world_size), models / model)


@pytest.mark.parametrize("name", ["pp2-uneven", "moe-tp2-sp-ep2-pp2"])
def test_weights_reach_an_engine_from_all_stages_and_experts(tmp_path, name):
    layout = next(one for one in LAYOUTS if one.name == name)
    make_family(tmp_path, layout.model)
    actor = rank_config(str(tmp_path), update_weight_buffer_size=BUCKET_BYTES, **layout.settings)
    assert_equal_bit_for_bit(received_by_an_engine(actor, layout.num_ranks), tmp_path)


def test_engines_that_do_not_join_are_reported_at_the_deadline(models):  # noqa: F811
    port = free_port()
    (said,) = run_ranks(connect_without_engines, 1, settings(models, "untied", "tp1"), port=port)
    assert said.startswith(
        f"cannot form group 'rlpost' of 1 trainer ranks and 1 engine ranks at 127.0.0.1:{port} "
    )
    assert said.endswith("these of 2 ranks did not join within 0:00:01: [1]")


@pytest.mark.parametrize("distributed", [True, False])
def test_offloaded_memory_is_restored_bit_for_bit(models, distributed):  # noqa: F811
    """Offloading between steps changes neither weights nor losses.

    A trainer that offloads weights, gradients and optimizer between steps is compared with one that
    offloads nothing.
    """
    actor = settings(models, "untied", "tp2_sp", use_distributed_optimizer=distributed)
    without = run_ranks(train_with_offload, 2, actor, steps=STEPS, offloads=False)
    offloaded = run_ranks(train_with_offload, 2, actor, steps=STEPS, offloads=True)
    for mine, theirs in zip(offloaded, without, strict=True):
        assert (mine["hash"], mine["losses"]) == (theirs["hash"], theirs["losses"])
        assert all(mine["freed"][part] > 0 for part in ("weights", "grads", "optimizer"))
