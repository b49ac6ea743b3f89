"""Count the parameters that each rank trains when only adapters are trained (LoRA). Pure.

Input: the architecture, the sizes of a layout, rank and targets of the adapters. Output: counts for
a pipeline stage. A column-parallel layer has a whole A and a shard of B, a row-parallel layer the
reverse (``rlpost/trainer/lora/linear.py``).
"""

from __future__ import annotations

from rlpost.config.groups.lora import LoraConfig
from rlpost.config.plan.shape import Layout, Parameters, Shape, sparse_of


def adapter_parameters(lora: LoraConfig, shape: Shape, layout: Layout, stage: int) -> Parameters:
    """The parameters that a rank of a pipeline stage trains."""
    dense = expert = 0
    for is_sparse in sparse_of(shape, layout, stage):
        dense += _attention(lora, shape, layout.tensor)
        ffn = shape.shared_ffn if is_sparse else shape.ffn
        if ffn:
            dense += _mlp(lora, shape.hidden, ffn // layout.tensor)
        if is_sparse and "experts" in lora.lora_targets:
            one = shape.hidden * 2 + 3 * (shape.expert_ffn // layout.expert_tensor)
            expert += shape.num_experts // layout.expert * one
    rank = lora.lora_rank or 0
    return Parameters(rank * dense, rank * expert)


def _attention(lora: LoraConfig, shape: Shape, tensor: int) -> int:
    """Elements for each unit of rank."""
    columns = (shape.heads + 2 * shape.groups) * shape.head_dim // tensor
    rows = shape.heads * shape.head_dim // tensor
    qkv = shape.hidden + columns if "linear_qkv" in lora.lora_targets else 0
    return qkv + (rows + shape.hidden if "linear_proj" in lora.lora_targets else 0)


def _mlp(lora: LoraConfig, hidden: int, ffn: int) -> int:
    """The same for a gated MLP with ``ffn`` columns on this rank."""
    gate_and_up = hidden + 2 * ffn if "linear_fc1" in lora.lora_targets else 0
    return gate_and_up + (ffn + hidden if "linear_fc2" in lora.lora_targets else 0)


def served_adapters(lora: LoraConfig, shape: Shape, tensor: int = 1) -> int:
    """Elements of all adapters as engines have them: of a whole model, or on a GPU of an engine.

    Each part of a fused layer has its own A (``rlpost/trainer/weights/peft_folder.py``). A of a
    column-parallel layer and B of a row-parallel one are whole on every GPU. Layers of experts have
    no such adapters.
    """
    queries, keys = shape.heads * shape.head_dim, shape.groups * shape.head_dim
    attention = {
        "linear_qkv": 3 * shape.hidden + (queries + 2 * keys) // tensor,
        "linear_proj": queries // tensor + shape.hidden,
    }
    mlp = {
        "linear_fc1": 2 * shape.hidden + 2 * shape.ffn // tensor,
        "linear_fc2": shape.ffn // tensor + shape.hidden,
    }
    attention_rows = sum(attention.get(target, 0) for target in lora.lora_targets)
    mlp_rows = sum(mlp.get(target, 0) for target in lora.lora_targets)
    num_dense = sum(not is_sparse for is_sparse in shape.sparse)
    return (lora.lora_rank or 0) * (shape.num_layers * attention_rows + num_dense * mlp_rows)
