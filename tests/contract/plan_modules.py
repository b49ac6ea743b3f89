"""What Megatron-core's modules and PyTorch really hold, for the planner to be compared with; one JSON object a line.

A script of its own: it stands in for a process group of any size with torch's fake one, and for the GPU with the meta
device, which hold no memory.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlpost.actor import model as actor_model
from rlpost.actor import optimizer as actor_optimizer
from rlpost.actor.description import ModelDescription
from rlpost.actor.memory import DeviceMemory
from rlpost.actor.settings import ActorSettings

from megatron.core import parallel_state  # isort: skip  (after the stand-in for CUDA)
from megatron.core.packed_seq_params import PackedSeqParams  # isort: skip
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # isort: skip

NUM_TOKENS = 512


@contextmanager
def ranks(settings: ActorSettings, description: ModelDescription, *, world: int, rank: int) -> Iterator[None]:
    """This process as one rank of many."""
    alone = world == 1
    dist.init_process_group(
        "gloo" if alone else "fake", store=dist.HashStore() if alone else FakeStore(), rank=rank, world_size=world
    )
    parallel_state.initialize_model_parallel(
        settings.tensor_model_parallel_size,
        settings.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=description.num_virtual_stages(settings),
        context_parallel_size=settings.context_parallel_size,
        expert_model_parallel_size=settings.expert_model_parallel_size,
        expert_tensor_parallel_size=settings.expert_tensor_parallel_size,
        create_gloo_process_groups=alone,
    )
    model_parallel_cuda_manual_seed(1)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def described(hf: dict[str, Any]) -> ModelDescription:
    return ModelDescription(Path("model"), hf["architectures"][0], {"max_position_embeddings": 4096} | hf)


def count(case: dict[str, Any]) -> dict[str, int]:
    """Parameters of one rank's modules, on the meta device."""
    settings = ActorSettings(hf_checkpoint="model", **case["settings"])
    description = described(case["hf"])
    with ranks(settings, description, world=case["world"], rank=case["rank"]), torch.device("meta"), on_meta():
        chunks = actor_model.build_model(description, settings)
    every = [parameter for chunk in chunks for parameter in chunk.parameters()]
    expert = sum(parameter.numel() for parameter in every if not getattr(parameter, "allreduce", True))
    return {"expert": expert, "dense": sum(parameter.numel() for parameter in every) - expert}


@contextmanager
def on_meta() -> Iterator[None]:
    """Megatron asks for the current device of CUDA; where that is the CPU's stand-in, it is the meta device."""
    proxies = {
        id(found): found
        for module in list(sys.modules.values())
        if module.__name__.startswith("megatron") and "_real" in vars(found := getattr(module, "torch", None) or module)
    }
    before = {key: vars(found.cuda)["current_device"] for key, found in proxies.items()}
    for found in proxies.values():
        vars(found.cuda)["current_device"] = lambda: torch.device("meta")
    try:
        yield
    finally:
        for key, found in proxies.items():
            vars(found.cuda)["current_device"] = before[key]


def measure(case: dict[str, Any]) -> dict[str, int]:
    """Bytes that autograd keeps for a small model's layers, and that weights, gradients and Adam's state take."""
    settings = ActorSettings(hf_checkpoint="model", transformer_impl="local", **case["settings"])
    description = described(case["hf"])
    with ranks(settings, description, world=1, rank=0):
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
    """What the layers keep, memory that several tensors share once, and without the weights."""
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
        chunk.decoder(hidden_states=states, attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=packed)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        case = json.loads(line)
        print("RESULT " + json.dumps(measure(case) if case["what"] == "measure" else count(case)))
