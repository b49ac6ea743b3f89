"""Bytes of communicators, compared with public measurements; the rest is sums by hand."""

from __future__ import annotations

import pytest

from rlpost.config.load import load
from rlpost.config.plan.nccl_memory import (
    CONNECTION,
    CUDA_CONTEXT,
    LL128_BYTES,
    LL_BYTES,
    MIB,
    SIMPLE_BYTES,
    Communicator,
    communicators,
    trainer_context,
)
from rlpost.config.plan.shape import Layout, Shape

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
