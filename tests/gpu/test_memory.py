"""The memory that the trainer releases for engines on its GPU, and its exact restoration."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.train_step import make_model
from tests.contract.actor_ranks import in_processes, run_ranks
from tests.contract.samples import STEPS
from tests.gpu.gpu_ranks import PARTS, leave_and_return, rank_on_its_own_gpu
from tests.ports import free_port
from tests.settings import rank_config

pytestmark = pytest.mark.timeout(300)
MIB = 2**20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model whose tensors outweigh the other memory of a process."""
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, "small")
    return folder


@pytest.mark.parametrize("use_distributed_optimizer", [True, False])
def test_offloaded_memory_is_free_and_restored_bit_for_bit(
    model: Path, device: str, use_distributed_optimizer: bool, record_property
) -> None:
    settings = rank_config(
        str(model), bf16=None, use_distributed_optimizer=use_distributed_optimizer
    )
    (seen,) = run_ranks(leave_and_return, 1, settings, steps=STEPS)
    before, offloaded, after = seen["bytes"]
    freed = sum(seen["freed"].values())
    assert all(seen["freed"][part] > 0 for part in PARTS)
    assert seen["hashes"][0] == seen["hashes"][1]
    if device == "cuda":
        assert before - offloaded >= 0.95 * freed
        assert after == pytest.approx(before, rel=0.05)
        record_property(
            "figure", f"{before / MIB:.0f} MiB held, {offloaded / MIB:.0f} MiB while offloaded"
        )


@pytest.mark.needs(gpus=2)
def test_buffers_of_nccl_leave_the_gpu_and_training_goes_on_as_without(
    model: Path, device: str, record_property
) -> None:
    """With ``--offload-nccl``. One tensor-parallel rank on each of two GPUs."""
    losses = []
    for offloads in (False, True):
        settings = rank_config(
            str(model),
            bf16=None,
            tensor_model_parallel_size=2,
            sequence_parallel=True,
            offload_nccl=offloads,
        )
        port = free_port()
        ranks = [(rank, 2, port, settings, leave_and_return, {"steps": STEPS}) for rank in range(2)]
        seen = in_processes(rank_on_its_own_gpu, ranks)
        losses.append([one["loss"] for one in seen])
        assert all(one["hashes"][0] == one["hashes"][1] for one in seen)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    if device == "cuda":
        freed = [one["freed"]["buffers of NCCL"] for one in seen]
        record_property("figure", f"{min(freed) / MIB:.0f} MiB of buffers released")
        assert min(freed) > 0
