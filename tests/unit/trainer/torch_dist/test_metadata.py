"""The metadata of a checkpoint from somebody else runs no code, and torch's own is read."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp

from rlpost.errors import CheckpointError
from rlpost.trainer.checkpoint_keys import stored_keys
from rlpost.trainer.torch_dist.reader import StoredTensors, read_metadata
from rlpost.trainer.torch_dist.shards import Chunk, Shard


class Hostile:
    def __init__(self, function: Any, *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def named(module: str, name: str) -> bytes:
    """The pickle of a global: protocol 4, two short strings, STACK_GLOBAL."""
    strings = b"".join(b"\x8c" + bytes([len(one)]) + one.encode() for one in (module, name))
    return b"\x80\x04" + strings + b"\x93."


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    state = {"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(2, dtype=torch.bfloat16), "n": 3}
    dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    return tmp_path / "saved"


def megatron_reader() -> Any:
    from megatron.core.dist_checkpointing.strategies import cached_metadata_filesystem_reader

    return cached_metadata_filesystem_reader.CachedMetadataFileSystemReader


READERS: dict[str, Callable[[str], object]] = {
    "ours": StoredTensors,
    "of keys": stored_keys,
    "of torch": lambda folder: dcp.FileSystemReader(folder).read_metadata(),
    "of Megatron": lambda folder: megatron_reader()(folder).read_metadata(),
}


@pytest.mark.parametrize("reader", READERS)
def test_metadata_that_calls_a_function_is_refused_by_every_reader(
    saved: Path, reader: str, tmp_path: Path
) -> None:
    mark = tmp_path / "ran"
    (saved / ".metadata").write_bytes(pickle.dumps(Hostile(os.system, f"touch {mark}")))
    with pytest.raises((pickle.UnpicklingError, CheckpointError), match=r"posix\.system"):
        READERS[reader](str(saved))
    assert not mark.exists()


@pytest.mark.parametrize(
    "name",
    [
        "builtins eval",
        "torch load",
        "torch hub.load",
        "torch.distributed.checkpoint.metadata os.system",
        "torch.distributed.checkpoint.metadata field",
        "torch Tensor",
    ],
)
def test_other_names_of_the_same_modules_are_refused(saved: Path, name: str) -> None:
    (saved / ".metadata").write_bytes(named(*name.split()))
    with pytest.raises(pickle.UnpicklingError, match="no checkpoint needs"):
        read_metadata(str(saved))


def test_what_torch_writes_is_read(saved: Path) -> None:
    stored = read_metadata(str(saved)).state_dict_metadata
    assert stored["a"].size == torch.Size([2, 3]) and stored["b"].properties.dtype == torch.bfloat16
    assert "a" in StoredTensors(saved) and "n" not in StoredTensors(saved)


def test_a_tensor_outside_of_the_folder_is_not_read(saved: Path) -> None:
    (saved / "__0_0.distcp").rename(saved.parent / "secret")
    metadata = read_metadata(str(saved))
    for place in metadata.storage_data.values():
        place.relative_path = "../secret"
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    chunk = Chunk("a", (2, 3), (0, 0), (2, 3), cast(Shard, None), 0)
    with pytest.raises(CheckpointError, match=r"names \.\./secret, outside of the folder"):
        StoredTensors(saved).read_into([chunk], lambda chunk: torch.empty(6))
