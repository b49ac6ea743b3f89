"""Bytes of communicators, compared with public measurements; the rest is sums by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlpost.config.load import load
from rlpost.config.plan.shape import Layout, Shape
from rlpost.extensions.planning.estimate import estimate
from rlpost.extensions.planning.nccl_memory import (
    CONNECTION,
    CUDA_CONTEXT,
    LL128_BYTES,
    LL_BYTES,
    MIB,
    SIMPLE_BYTES,
    Communicator,
    communicators,
    exchange_group,
    trainer_context,
)
from rlpost.extensions.planning.rank_memory import parameter_bytes

DENSE = Shape(hidden=8, ffn=16, heads=4, groups=2, head_dim=2, vocab=30, sparse=(False,) * 4)


def test_a_connection_is_what_nccl_allocates():
    """nccl#1685: 10485760 and 2097152 bytes. A side is rounded up to 2 MiB."""
    receives = -(-(LL_BYTES + LL128_BYTES + SIMPLE_BYTES) // (2 * MIB)) * 2 * MIB
    assert (receives, CONNECTION) == (10485760, 10485760 + 2097152)


def test_a_communicator_of_a_node_takes_what_sglang_measured():
    """sglang#30908: 576 MiB for 8 GPUs."""
    assert Communicator("tensor", 8).num_bytes(8, nvls=False) == 576 * MIB


def test_an_all_to_all_on_a_node_takes_what_was_measured_in_public():
    """nccl#1685: from 1.06 to 4.34 GB on 8 GPUs. NCCL's connections are 86 % of it."""
    plain, exchanges = (Communicator("expert", 8, transfers=peers) for peers in (0, 7))
    more = exchanges.num_bytes(8, nvls=False) - plain.num_bytes(8, nvls=False)
    assert more == pytest.approx(4.34e9 - 1.06e9, rel=0.15)


@pytest.mark.parametrize(
    ("one", "gpus", "num_bytes"),
    [
        (Communicator("tensor", 1), 8, 0),
        (Communicator("tensor", 2), 8, 24 * 12 * MIB),
        (Communicator("data", 4, stride=8), 8, 4 * 2 * 2 * 8896 * 1024),
        (Communicator("world", 64), 8, 2 * 24 * 12 * MIB),
        (Communicator("pipeline", 2, stride=4, transfers=2), 8, (24 + 32) * 12 * MIB),
        (
            Communicator("expert", 16, transfers=15),
            8,
            2 * 24 * 12 * MIB + 4 * 7 * 12 * MIB + 128 * MIB,
        ),
    ],
)
def test_neighbours_on_the_node_and_on_the_network_are_counted(one, gpus, num_bytes):
    assert one.num_bytes(gpus, nvls=False) == num_bytes


def test_nvlink_sharp_adds_a_buffer_for_each_rank_of_a_node():
    one = Communicator("tensor", 8)
    assert one.num_bytes(8, nvls=True) - one.num_bytes(8, nvls=False) == 24 * 8 * 2 * MIB
    assert Communicator("tensor", 2).num_bytes(8, nvls=True) == 24 * 12 * MIB


def test_a_trainer_s_context_is_that_of_cuda_and_its_communicators():
    cluster = {"actor_num_nodes": 1, "actor_num_gpus_per_node": 8, "colocate": True}
    off, on = (
        load([], {"cluster": cluster | {"environment": {"NCCL_NVLS_ENABLE": value}}}).config
        for value in ("0", "1")
    )
    layout = Layout(8, tensor=2)
    used = communicators(layout, DENSE)
    total = sum(one.num_bytes(8, nvls=False) for one in used)
    assert trainer_context(off, layout, DENSE) == CUDA_CONTEXT + total
    assert trainer_context(on, layout, DENSE) > CUDA_CONTEXT + total


def test_the_group_of_an_export_is_counted_between_the_ranks_of_a_stage():
    """nccl#1685: 3.28 GB of buffers for exchanges of each rank with 7 others, of 4.34 GB in all."""
    layout = Layout(16, tensor=2, pipeline=2)
    cluster = {"actor_num_nodes": 2, "actor_num_gpus_per_node": 8, "colocate": True}
    config = load([], {"cluster": cluster | {"environment": {"NCCL_NVLS_ENABLE": "0"}}}).config
    assert exchange_group(config, layout) == pytest.approx(4.34e9 - CUDA_CONTEXT, rel=0.15)
    assert exchange_group(config, replace(layout, pipeline=16)) == 0, "a rank alone has no group"


def test_an_export_is_a_phase_where_it_is_the_peak():
    """Small batches: its buckets and its group take more than the activations of a step."""
    cluster = {"num_gpus_per_node": 8, "actor_num_gpus_per_node": 8, "rollout_num_gpus": 8}
    more = {"cluster": cluster | {"colocate": False, "nodes": 2}}
    config = load(
        [], more | {"perf": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 64}}
    ).config
    made = estimate(config, DENSE, gpu_bytes=80 * 10**9, with_engine=False)
    phases = {phase.name: dict(phase.parts) for phase in made.phases}
    assert list(phases) == ["train", "generate", "export"]
    export, train = phases["export"], phases["train"]
    group = exchange_group(config, made.layout)
    assert group > 0
    assert export["CUDA, NCCL"] == train["CUDA, NCCL"] + group
    assert export["buffers"] == 2 * 512 * MIB + 30 * 8 * parameter_bytes(config).weights
    small = estimate(config, DENSE, gpu_bytes=10**9, with_engine=False)
    assert any(problem.startswith("export: ") for problem in small.problems)
