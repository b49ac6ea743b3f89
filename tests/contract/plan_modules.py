"""Measure what Megatron-core's modules and PyTorch hold, to compare the planner with.

Input: one JSON object a line. Output: one line for each, ``RESULT`` and a JSON object.

A separate script: parameters are counted by a rehearsal of the rank, memory is measured in a
process that is the only rank.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlpost.config.tree import Config
from rlpost.extensions.rehearsal.all_ranks.rank import rehearse_rank
from rlpost.trainer import model as actor_model
from rlpost.trainer import optimizer as actor_optimizer
from rlpost.trainer import parallel
from rlpost.trainer.memory import DeviceMemory
from rlpost.trainer.model_description import ModelDescription
from tests.contract.all_ranks.contradictions import parameters_of
from tests.contract.local_layers import local_layers
from tests.rare_collections import collect_rarely
from tests.settings import rank_config

# after the stand-in for CUDA, which rlpost.trainer installs
from megatron.core.packed_seq_params import PackedSeqParams  # isort: skip

NUM_TOKENS = 512


@contextmanager
def alone(settings: Config, description: ModelDescription) -> Iterator[None]:
    """Make this process the only rank of a world."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel.form_groups(settings, num_virtual_stages=description.num_virtual_stages(settings))
    try:
        yield
    finally:
        parallel.destroy()


def described(hf: dict[str, Any]) -> ModelDescription:
    return ModelDescription(
        Path("model"), hf["architectures"][0], {"max_position_embeddings": 4096} | hf
    )


def count(case: dict[str, Any]) -> dict[str, int]:
    """Count the parameters of one rank's modules, on the meta device."""
    settings = rank_config(hf_checkpoint="model", **case["settings"])
    facts = rehearse_rank(settings, described(case["hf"]), rank=case["rank"], world=case["world"])
    return asdict(parameters_of(facts))


def measure(case: dict[str, Any]) -> dict[str, int]:
    """Measure the bytes that autograd keeps for a small model's layers, and those of its state.

    The state is weights, gradients and Adam's moments.
    """
    settings = rank_config(hf_checkpoint="model", **case["settings"])
    description = described(case["hf"])
    with alone(settings, description), local_layers():
        chunks = actor_model.build_model(description, settings)
        for parameter in chunks[0].parameters():
            parameter.data.normal_(std=0.02)
        kept = kept_bytes(chunks[0], description.hf_config["hidden_size"])
        wrapped = actor_optimizer.wrap(chunks, settings)
        made = actor_optimizer.build(wrapped, settings)
        made.step()
        held = DeviceMemory(wrapped, made).offload("optimizer", "weights", "grads")
    return {"kept": kept, **held}


def kept_bytes(chunk: Any, hidden: int) -> int:
    """Return the bytes that the layers keep for backward.

    Storage that several tensors share counts once; the weights do not count.
    """
    weights = {parameter.untyped_storage().data_ptr() for parameter in chunk.parameters()}
    kept: dict[int, torch.Tensor] = {}
    starts = torch.tensor([0, NUM_TOKENS // 2, NUM_TOKENS], dtype=torch.int32)
    bounds = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts}
    longest = {"max_seqlen_q": NUM_TOKENS // 2, "max_seqlen_kv": NUM_TOKENS // 2}
    packed = PackedSeqParams(qkv_format="thd", **bounds, **longest)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in weights:
            kept[place] = tensor
        return tensor

    dtype = next(chunk.parameters()).dtype
    states = torch.randn(NUM_TOKENS, 1, hidden, dtype=dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        rotary = chunk.rotary_pos_emb(NUM_TOKENS, packed_seq=True)
        chunk.decoder(
            hidden_states=states,
            attention_mask=None,
            rotary_pos_emb=rotary,
            packed_seq_params=packed,
        )
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    collect_rarely()
    for line in sys.stdin:
        case = json.loads(line)
        made = {"measure": measure, "count": count}[case["what"]](case)
        print("RESULT " + json.dumps(made))
