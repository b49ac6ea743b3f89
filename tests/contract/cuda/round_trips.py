"""Write checkpoints with one implementation, read them with another, and print the errors.

Usage: ``python -m tests.contract.cuda.round_trips FAMILIES FOLDER``. The output is JSON: for each
family and pair of implementations, the error or null. The modules of the stub hold real weights on
the CPU here; nothing is computed with them. ``older`` is the format in which earlier versions wrote
a model without TransformerEngine.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

# isort: off
import rlpost.trainer  # noqa: F401  installs its CPU stand-in for CUDA before Megatron-core
# isort: on

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, nested_values
from torch.distributed.checkpoint import CheckpointException

from rlpost.config.tree import Config
from rlpost.durable.torch_dist_folder import find_checkpoint
from rlpost.trainer import device, megatron_checkpoint, parallel
from rlpost.trainer.attention_backends import Gpu
from rlpost.trainer.checkpoint_keys import NORM_OF_EXPERTS, ONCE, fit_to_checkpoint, stored_keys
from rlpost.trainer.layer_specs import LOCAL
from rlpost.trainer.model import build_model, inventory_of
from rlpost.trainer.model_description import read_description
from rlpost.trainer.model_state import METADATA
from rlpost.trainer.parallel import Rendezvous
from rlpost.trainer.weights.whole_tensors import weights_hash
from tests.contract.local_layers import local_layers
from tests.ports import free_port
from tests.settings import rank_config

WAYS = (("local", "transformer_engine"), ("transformer_engine", "local"), ("older", "transformer_engine"),
        ("older", "local"), ("local", "local"))  # fmt: skip
SEPARATE_NORMS = ("q_layernorm.", "k_layernorm.", "pre_mlp_layernorm.", "final_layernorm.")


def main(families: str, folder: str) -> None:
    """Print the outcome of each way for each family: None, or the error."""
    found: dict[str, dict[str, str | None]] = {}
    for family in sorted(Path(families).iterdir()):
        found[family.name] = {}
        settings = rank_config(str(family), bf16=True)
        parallel.initialise(
            Rendezvous(0, 1, "127.0.0.1", free_port()), settings, num_virtual_stages=None
        )
        for written, read in WAYS:
            with tempfile.TemporaryDirectory(dir=folder) as place:
                found[family.name][f"{written} to {read}"] = outcome(settings, written, read, place)
        parallel.destroy()
    print("OBSERVED " + json.dumps(found))


def outcome(settings: Config, written: str, read: str, place: str) -> str | None:
    """Write a model and read it into another; return None when both have the same weights."""
    description = read_description(settings.checkpoint.hf_checkpoint)
    source, target = build(description, written.replace("older", "local")), build(description, read)
    for seed, chunk in ((1, source), (2, target)):
        torch.manual_seed(seed)
        for tensor in (*chunk.parameters(), *chunk.buffers()):
            tensor.data.normal_()
    with as_it_was(source) if written == "older" else nullcontext():
        megatron_checkpoint.save_weights(
            place, chunks=[source], buffer_bytes=settings.checkpoint.save_buffer_bytes
        )
    try:
        load(target, find_checkpoint(place))
    # CheckpointException derives from BaseException and not from Exception
    except (Exception, CheckpointException) as error:
        return f"{type(error).__name__}: {str(error)[-500:]}"
    ours, theirs = (hash_of(chunk, description) for chunk in (target, source))
    return None if ours == theirs else "other weights"


def build(description: Any, implementation: str) -> Any:
    """Build a model and return its only chunk."""
    has_mtp = bool(description.hf_config.get("num_nextn_predict_layers"))
    settings = rank_config("", bf16=True, enable_mtp_training=has_mtp)
    with (
        local_layers() if implementation == LOCAL else nullcontext(),
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(device, "current", on_the_cpu),
        mock.patch.object(device, "gpu", lambda: Gpu((9, 0))),
    ):
        return build_model(description, settings)[0]


def on_the_cpu() -> torch.device:
    """Return the device that replaces the GPU here."""
    return torch.device("cpu")


def load(chunk: Any, folder: Any) -> None:
    """Load as ``megatron_checkpoint`` does."""
    state = {"model": chunk.sharded_state_dict(metadata=dict(METADATA))}
    loaded = dist_checkpointing.load(
        fit_to_checkpoint(state, folder, stored_keys(folder)), str(folder)
    )
    chunk.load_state_dict(loaded["model"])


def hash_of(chunk: Any, description: Any) -> str:
    """Hash of all weights under their Hugging Face names."""
    return weights_hash(inventory_of([chunk], description), max_bytes=1 << 30)


@contextmanager
def as_it_was(chunk: Any) -> Iterator[None]:
    """Give the chunk the checkpoint keys of the older format within the block."""
    made = chunk.sharded_state_dict

    def older(**options: Any) -> dict[str, Any]:
        state = made(**options)
        _, state = extract_matching_values(
            state,
            lambda part: (
                part.key.endswith("_extra_state")
                and any(norm in part.key for norm in SEPARATE_NORMS)
            ),
        )
        for part in nested_values(state):
            part.key = part.key.replace(NORM_OF_EXPERTS, ONCE)
        return state

    with mock.patch.object(chunk, "sharded_state_dict", older):
        yield


if __name__ == "__main__":
    main(*sys.argv[1:])
