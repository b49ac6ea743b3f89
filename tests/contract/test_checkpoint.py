"""Checkpoints of real ranks: random generators, full disks and a small buffer."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.actor_ranks import run_ranks
from tests.contract.checkpoint_ranks import (
    live_through,
    load_and_train,
    load_and_train_last,
    save_through_a_narrow_buffer,
    share_everything,
)
from tests.contract.families import make_family
from tests.contract.samples import STEPS
from tests.settings import rank_config

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[str | None]:
    """A file system with space for the small files of a checkpoint but not for its tensors.

    None without permission to mount one.
    """
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=160k", "none", folder], capture_output=True
    )
    yield str(folder) if mounted.returncode == 0 else None
    if mounted.returncode == 0:
        subprocess.run(["umount", folder], check=True)


def test_a_run_with_dropout_resumes_bit_for_bit_after_a_save_to_a_full_disk_failed(
    tmp_path, full_disk
):
    """Two tensor-parallel ranks draw random numbers from Megatron's tracker.

    Every rank reports the full disk, no rank waits for another, and the next step is unchanged.
    """
    make_family(tmp_path / "model", "qwen3")
    settings = rank_config(
        str(tmp_path / "model"),
        lr=1e-3,
        adam_eps=1e-4,
        distributed_timeout_minutes=2,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        megatron={"hidden_dropout": 0.1},
    )
    saved = str(tmp_path / "saved")
    whole = run_ranks(live_through, 2, settings, steps=STEPS, folder=saved, full_disk=full_disk)
    resumed = run_ranks(load_and_train_last, 2, settings, steps=STEPS, folder=saved)
    for one, other in zip(whole, resumed, strict=True):
        assert (other["metrics"], other["hash"]) == (one["metrics"], one["hash"])
        assert one["without_generators"] != one["hash"], "the generators made no difference"
    if full_disk is None:
        pytest.skip("the full disk: no permission to mount a file system here")
    for rank in whole:
        assert len(rank["said"]) == 2
        for said in rank["said"]:
            assert "cannot write the checkpoint" in said and (
                "No space left" in said or "is the disk full" in said
            ), said
            assert "Traceback" not in said


LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {  # model, ranks, settings
    "PP 2, uneven": (
        "qwen3-tied",
        2,
        {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 1},
    ),
    "EP 2, ETP 1, DP 2": (
        "glm4.5-moe",
        4,
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
        },
    ),
    "not distributed": ("qwen3", 2, {"use_distributed_optimizer": False}),
    "float32 weights, DP 2": ("qwen3.5", 2, {}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_state_larger_than_the_buffer_is_saved_while_memory_is_offloaded_and_the_next_step_waits(
    tmp_path, layout
):
    """The save equals a blocking one bit for bit.

    The buffer holds a fraction of a rank's state, the replicas of every tensor share its writing,
    and device memory is offloaded and restored while it is read. The next step after a resume is
    unchanged at the same layout, and nearly so in one process.
    """
    model, num_ranks, given = LAYOUTS[layout]
    make_family(tmp_path / "model", model)
    settings = rank_config(
        str(tmp_path / "model"),
        bf16=True,
        lr=1e-3,
        distributed_timeout_minutes=2,
        save_buffer_gb=2e-5,
        **given,
    )
    folders = [str(tmp_path / name) for name in ("waited", "beside")]
    saved = run_ranks(
        save_through_a_narrow_buffer,
        num_ranks,
        settings,
        before=share_everything,
        steps=STEPS,
        folders=folders,
    )
    assert all(rank["away"] for rank in saved), "nothing was copied while the memory was offloaded"
    expected = {key: saved[0][key] for key in ("before", "metrics", "hash")}
    assert largest_stored(folders[1]) <= 2e-5 * 1e9 / 4, (
        "a part is larger than a slot of the buffer"
    )
    for folder in folders[num_ranks > 2 :]:  # a blocking save of experts is resumed in test_layouts
        resumed = run_ranks(load_and_train, num_ranks, settings, steps=STEPS, folder=folder)
        assert [rank == expected for rank in resumed] == [True] * num_ranks
    alone = rank_config(
        settings.checkpoint.hf_checkpoint, bf16=True, lr=1e-3, distributed_timeout_minutes=2
    )
    (elsewhere,) = run_ranks(load_and_train, 1, alone, steps=STEPS, folder=folders[1])
    assert elsewhere["before"] == expected["before"]
    assert elsewhere["metrics"]["train/grad_norm"] == pytest.approx(
        expected["metrics"]["train/grad_norm"], rel=0.05
    )


def largest_stored(folder: str) -> int:
    """Return the bytes of the largest part of a tensor in a checkpoint."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    stored = FileSystemReader(folder).read_metadata().state_dict_metadata.values()
    tensors = [one for one in stored if isinstance(one, TensorStorageMetadata)]
    return max(
        chunk.sizes.numel() * one.properties.dtype.itemsize
        for one in tensors
        for chunk in one.chunks
    )
