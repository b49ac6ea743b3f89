"""Count the parameters of a critic, of Muon's matrices and of stored weights. Pure.

Input: the shape of a model, the sizes of a layout. Output: counts for a pipeline stage, as in
``rlpost.config.plan.shape``, or bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rlpost.config.plan.shape import (
    Layout,
    Parameters,
    Shape,
    attention_elements,
    layer_elements,
    layers_of,
    linear_matrices,
    linear_of,
    qkv_columns,
    rank_parameters,
    sparse_of,
)
from rlpost.models.fp8 import SIDE, keeps_shared_experts


def critic_parameters(shape: Shape, layout: Layout, stage: int) -> Parameters:
    """The parameters that a rank holds of a critic.

    A critic is the policy with a value head in place of the output layer.
    """
    policy = rank_parameters(replace(shape, tied=True, mtp=False), layout, stage)
    if stage != layout.pipeline - 1:
        return policy
    # a tied policy has a copy of the embedding on a last stage that is not the first
    copy = -(-shape.vocab // layout.tensor) * shape.hidden if stage else 0
    return replace(policy, dense=policy.dense - copy + shape.hidden + 1)


def matrix_parameters(shape: Shape, layout: Layout, stage: int) -> Parameters:
    """The part of ``rank_parameters`` in matrices of the decoder's layers, routers included."""
    layers = layers_of(layout, shape.num_layers, stage)
    kinds = zip(sparse_of(shape, layout, stage), linear_of(shape, layout, stage), strict=True)
    found = [
        layer_elements(shape, layout, is_sparse, is_linear)
        for _, (is_sparse, is_linear) in zip(layers, kinds, strict=False)
    ]
    return Parameters(sum(one.dense for one in found), sum(one.expert for one in found))


def parameters_of_stage(
    shape: Shape, layout: Layout, stage: int
) -> Iterator[tuple[int, int, bool]]:
    """The matrices of a rank: elements of one, how many, and whether they are of routed experts.

    Megatron-core fuses queries, keys and values, and both inputs of a gated MLP.
    """
    layers = sparse_of(shape, layout, stage)
    num_sparse = sum(layers)
    tensor, hidden = layout.tensor, shape.hidden
    if stage in (0, layout.pipeline - 1):
        ends = 1 if layout.pipeline > 1 or shape.tied else 2
        yield -(-shape.vocab // tensor) * hidden, ends, False
    if shape.latent is None:
        yield hidden * qkv_columns(shape, tensor), len(layers), False
        yield hidden * shape.heads * shape.head_dim // tensor, len(layers), False
    else:
        for rows, columns in shape.attention_matrices:
            yield rows * columns // tensor, len(layers), False
    for width, count in ((shape.ffn, len(layers) - num_sparse), (shape.shared_ffn, num_sparse)):
        if width and count:
            yield 2 * hidden * width // tensor, count, False
            yield hidden * width // tensor, count, False
    if num_sparse:
        yield hidden * shape.num_experts, num_sparse, False
        width, each = shape.expert_ffn // layout.expert_tensor, shape.num_experts // layout.expert
        yield 2 * hidden * width, num_sparse * each, True
        yield hidden * width, num_sparse * each, True


def stored_bytes(shape: Shape, width: int) -> int:
    """All weights in a checkpoint or an engine, in bytes.

    Args: ``width``: bytes of an element, 1 for FP8.

    Only the matrices of the layers are in FP8: embeddings, norms, biases, routers and shared experts
    that no engine could shard by whole blocks keep two bytes.
    """
    total, float32 = shape.parameters.total, shape.parameters.float32
    if width != 1:
        return width * total + (4 - width) * float32
    matrices = layer_matrices(shape)
    num_layers = len(sparse_of(shape, Layout(), 0))
    attention = num_layers * attention_elements(shape)
    blocks = (matrices - attention) // SIDE**2 + num_layers * sum(
        -(-rows // SIDE) * -(-columns // SIDE) for rows, columns in shape.attention_matrices
    )
    return matrices + 4 * blocks + 2 * (total - matrices) + 2 * float32


def layer_matrices(shape: Shape) -> int:
    """Elements of the linear weights of all layers that are in FP8 in a folder of FP8 blocks."""
    attention = attention_elements(shape)
    attention += shape.hidden * shape.head_dim * shape.heads if shape.output_gate else 0
    dense = 3 * shape.hidden * shape.ffn
    shared = 0 if keeps_shared_experts(shape.shared_ffn) else shape.shared_ffn
    sparse = 3 * shape.hidden * (shape.num_experts * shape.expert_ffn + shared)
    total = sum(
        attention + (sparse if is_sparse else dense) for is_sparse in sparse_of(shape, Layout(), 0)
    )
    if shape.linear is not None:
        kept = 2 * shape.linear.value_heads * shape.hidden  # in_proj_ba
        total += sum(shape.linear.layers) * (linear_matrices(shape, 1) - kept - attention)
    return total
