"""How many parameters a model has and what they cost a GPU, from its ``config.json`` alone. Pure.

In: a Hugging Face config of a decoder-only transformer with gated MLPs (Qwen, Llama, GLM, and mixtures of experts of
that shape) and the settings. Out: counts and bytes. Biases and norms are left out (below a thousandth), and so
are activations, which depend on ``max_tokens_per_gpu``, and what CUDA and NCCL take for themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlpost.config.tree import Config

_DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
_ENGINE_BYTES = {"float32": 4}  # by the dtype that config.json names; all others have two


@dataclass(frozen=True, slots=True)
class Parameters:
    """How many: ``dense`` is everything but the routed experts, embeddings included."""

    dense: int
    expert: int

    @property
    def total(self) -> int:
        return self.dense + self.expert


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one GPU."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def num_parameters(hf: Mapping[str, Any]) -> Parameters:
    """Parameters of the model that ``config.json`` describes.

    Raises:
        KeyError: a size that every such model has is missing.
    """
    hidden, heads, layers = hf["hidden_size"], hf["num_attention_heads"], hf["num_hidden_layers"]
    head_dim = hf.get("head_dim") or hidden // heads
    key_value_heads = hf.get("num_key_value_heads") or heads
    attention = hidden * head_dim * 2 * (heads + key_value_heads)  # query and output, key and value
    num_experts = hf.get("num_experts") or hf.get("n_routed_experts") or hf.get("num_local_experts") or 0
    sparse = _num_sparse_layers(hf) if num_experts else 0
    expert_width = hf.get("moe_intermediate_size") or hf.get("intermediate_size") or 0
    shared_width = hf.get("shared_expert_intermediate_size") or (hf.get("n_shared_experts") or 0) * expert_width
    dense_mlp = 3 * hidden * hf["intermediate_size"] if layers > sparse else 0
    embeddings = hf["vocab_size"] * hidden * (1 if hf.get("tie_word_embeddings") else 2)
    return Parameters(
        dense=embeddings
        + layers * attention
        + (layers - sparse) * dense_mlp
        + sparse * (3 * hidden * shared_width + hidden * num_experts),
        expert=sparse * num_experts * 3 * hidden * expert_width,
    )


def _num_sparse_layers(hf: Mapping[str, Any]) -> int:
    every = hf.get("decoder_sparse_step") or 1
    dense_only = set(hf.get("mlp_only_layers") or ())
    first = hf.get("first_k_dense_replace") or 0
    layers = range(first, hf["num_hidden_layers"])
    return sum(1 for layer in layers if layer not in dense_only and (layer + 1) % every == 0)


def trainer_memory(config: Config, parameters: Parameters) -> RankMemory:
    """What weights, gradients and optimizer take on each GPU that trains, stages of a pipeline taken as equal.

    Experts are cut by sizes of their own; the optimizer is spread over all ranks that hold the same part.
    """
    perf, world, bytes_of_each = config.perf, config.actor_world_size, parameter_bytes(config)
    stages = perf.pipeline_model_parallel_size
    dense_ranks = perf.tensor_model_parallel_size * stages
    expert_ranks = (perf.expert_tensor_parallel_size or perf.tensor_model_parallel_size) * stages
    expert_ranks *= perf.expert_model_parallel_size
    held = optimizer = 0
    for count, ranks in ((parameters.dense, dense_ranks), (parameters.expert, expert_ranks)):
        part = -(-count // ranks)
        held += part
        optimizer += part * bytes_of_each.optimizer // (world // ranks if perf.use_distributed_optimizer else 1)
    if config.optimizer.optimizer_cpu_offload:
        optimizer = round(optimizer * (1.0 - config.optimizer.optimizer_offload_fraction))
    return RankMemory(held * bytes_of_each.weights, held * bytes_of_each.gradients, optimizer)


def parameter_bytes(config: Config) -> RankMemory:
    """Bytes of one parameter on a GPU, wherever its optimizer's state lies: in bfloat16 there is a main weight in
    float32 beside Adam's two moments, in float32 there are the moments alone."""
    given, narrow = config.optimizer, config.perf.bf16 is not False  # on a GPU it is so unless told otherwise
    moments = _DTYPE_BYTES[given.exp_avg_dtype] + _DTYPE_BYTES[given.exp_avg_sq_dtype]
    return RankMemory(
        weights=2 if narrow else 4,
        gradients=2 if narrow and not config.perf.accumulate_allreduce_grads_in_fp32 else 4,
        optimizer=moments + (_DTYPE_BYTES[given.main_params_dtype] if narrow else 0),
    )


def engine_weights(config: Config, hf: Mapping[str, Any], parameters: Parameters) -> int:
    """Bytes that the weights take on each GPU of an engine; the KV cache gets most of the rest."""
    size = _ENGINE_BYTES.get(str(hf.get("dtype") or hf.get("torch_dtype")), 2)
    return parameters.total * size // config.cluster.rollout_num_gpus_per_engine
