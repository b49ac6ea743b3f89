"""Count the parameters that each rank of a layout holds. Pure.

The counts are exactly those of Megatron-core's modules.

Input: the shape of a model, and the sizes of a layout.
Output: counts for a pipeline stage, routed experts apart from the rest, because they are sharded by
separate sizes. A rank's share of a matrix is that of tensor parallelism (Shoeybi et al., arXiv
1909.08053): columns of QKV and of the first MLP matrix, rows of the others; norms, the router and,
with sandwich norms, the norms at the end are on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlpost.config.plan.vision import VisionShape
from rlpost.models.model_types import MegatronFields

if TYPE_CHECKING:
    from rlpost.config.tree import Config


@dataclass(frozen=True, slots=True)
class Parameters:
    """Numbers of parameters: ``dense`` is all but the routed experts, with embeddings."""

    dense: int
    expert: int = 0
    float32: int = 0
    """Those of ``dense`` that are float32 in a model of 16 bits."""

    @property
    def total(self) -> int:
        return self.dense + self.expert


@dataclass(frozen=True, slots=True)
class Layout:
    """Parallel sizes of the trainer."""

    world: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence_parallel: bool = False
    chunk: int | None = None
    """Layers of a virtual stage."""
    first: int | None = None
    last: int | None = None
    """Layers of the first and of the last stage where they are not equal to the others."""

    @property
    def data(self) -> int:
        """Data-parallel size."""
        return self.world // (self.tensor * self.pipeline * self.context)

    @property
    def sequence_ranks(self) -> int:
        """Ranks over which the activations between the matrices are sharded (arXiv 2205.05198)."""
        return self.tensor if self.sequence_parallel else 1


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """Sizes of the gated delta nets, and the layers that have them in place of attention."""

    layers: tuple[bool, ...]
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    kernel: int

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    def float32(self, tensor: int) -> int:
        """Elements of a layer on one rank that are float32: decay and norm (``Rule.is_float32``)."""
        return self.value_heads // tensor + self.value_dim


@dataclass(frozen=True, slots=True)
class Latent:
    """Sizes of multi-head latent attention (arXiv 2405.04434, section 2.1)."""

    query_rank: int
    """Width of the narrow vector of queries; 0 without."""
    kv_rank: int
    """Width of the narrow vector of keys and values."""
    position: int
    """Part of each query, and of the key that all heads share, with rotary embedding."""
    value: int
    """Width of a head's value."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder with RMSNorm, rotary embedding and gated MLPs, some of them experts."""

    hidden: int
    ffn: int
    heads: int
    groups: int
    head_dim: int
    vocab: int
    sparse: tuple[bool, ...]
    """For each layer whether it has experts."""
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    qk_norm_per_layer: bool = False
    """One norm over all query heads and one over all key heads; each rank has its own heads."""
    sandwich: bool = False
    linear_bias: bool = False
    """Whether the output of attention, the router and the experts have biases."""
    sinks: bool = False
    stacked_experts: bool = False
    """Whether one tensor of the checkpoint holds a matrix of all experts of a layer."""
    output_gate: bool = False
    """Whether the attention has a gate for each query."""
    linear: LinearAttention | None = None
    num_experts: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    shared_gate: bool = False
    topk: int = 0
    latent: Latent | None = None
    """Sizes of latent attention; ``head_dim`` is then the part of a query without position."""
    vision: VisionShape | None = None
    """The encoder of images, which runs with --multimodal-keys alone; engines always load it."""
    lacks_encoder: bool = False
    """Whether the folder has an encoder that the trainer cannot run, so that its size is not known."""
    mtp: bool = False
    """Whether the last stage also trains an MTP layer, of the kind of the last layer."""

    @property
    def num_layers(self) -> int:
        return len(self.sparse)

    @property
    def attention_matrices(self) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of the matrices of a layer's attention, in the order of its modules."""
        hidden, width = self.hidden, self.heads * self.head_dim
        one = self.latent
        if one is None:
            keys = self.groups * self.head_dim
            return ((hidden, width), (width, hidden), (keys, hidden), (keys, hidden))
        queries = width + self.heads * one.position
        to_queries: tuple[tuple[int, int], ...] = ((queries, hidden),)
        if one.query_rank:
            to_queries = ((one.query_rank, hidden), (queries, one.query_rank))
        return (
            (hidden, self.heads * one.value),
            *to_queries,
            (one.kv_rank + one.position, hidden),
            (width + self.heads * one.value, one.kv_rank),
        )

    @property
    def parameters(self) -> Parameters:
        """Parameters of the whole model."""
        return rank_parameters(self, Layout(), 0)


def latent_of(fields: MegatronFields) -> Latent | None:
    """The sizes of latent attention in a family's fields; None for a model without it."""
    if not fields.get("multi_latent_attention"):
        return None
    return Latent(
        query_rank=fields.get("q_lora_rank") or 0,
        kv_rank=fields["kv_lora_rank"],
        position=fields["qk_pos_emb_head_dim"],
        value=fields["v_head_dim"],
    )


def linear_attention(fields: MegatronFields) -> LinearAttention | None:
    """The linear attention that a family's fields describe; None if there is none."""
    pattern = fields.get("linear_attention_freq")
    if not pattern:
        return None
    return LinearAttention(
        tuple(map(bool, pattern)),
        key_heads=fields["linear_num_key_heads"],
        key_dim=fields["linear_key_head_dim"],
        value_heads=fields["linear_num_value_heads"],
        value_dim=fields["linear_value_head_dim"],
        kernel=fields["linear_conv_kernel_dim"],
    )


def layout_of(config: Config) -> Layout:
    """The layout of the settings."""
    perf = config.perf
    return Layout(
        world=config.actor_world_size,
        tensor=perf.tensor_model_parallel_size,
        pipeline=perf.pipeline_model_parallel_size,
        context=perf.context_parallel_size,
        expert=perf.expert_model_parallel_size,
        expert_tensor=perf.expert_tensor_parallel_size or perf.tensor_model_parallel_size,
        sequence_parallel=perf.sequence_parallel,
        chunk=perf.num_layers_per_virtual_pipeline_stage,
        first=perf.decoder_first_pipeline_num_layers,
        last=perf.decoder_last_pipeline_num_layers,
    )


def layers_of(layout: Layout, num_layers: int, stage: int) -> Sequence[int]:
    """The layers of a pipeline stage, of all its chunks if interleaved (arXiv 2104.04473)."""
    if layout.chunk is not None:
        starts = range(stage * layout.chunk, num_layers, layout.pipeline * layout.chunk)
        return [layer for start in starts for layer in range(start, start + layout.chunk)]
    given = {0: layout.first, layout.pipeline - 1: layout.last} if layout.pipeline > 1 else {}
    taken = [size for size in given.values() if size is not None]
    others = layout.pipeline - len(taken)
    each = (num_layers - sum(taken)) // others if others else 0
    sizes = [given.get(one) or each for one in range(layout.pipeline)]
    start = sum(sizes[:stage])
    return range(start, start + sizes[stage])


def rank_parameters(shape: Shape, layout: Layout, stage: int) -> Parameters:
    """The parameters that a rank of a pipeline stage holds."""
    kinds = zip(sparse_of(shape, layout, stage), linear_of(shape, layout, stage), strict=True)
    dense = expert = 0
    for (is_sparse, is_linear), count in Counter(kinds).items():
        layer = _layer(shape, layout, is_sparse, is_linear)
        dense, expert = dense + count * layer.dense, expert + count * layer.expert
    if shape.mtp and stage == layout.pipeline - 1:
        dense += 2 * shape.hidden * (shape.hidden // layout.tensor) + 3 * shape.hidden
    embedding = -(-shape.vocab // layout.tensor) * shape.hidden
    is_first, is_last = stage == 0, stage == layout.pipeline - 1
    dense += embedding if is_first else 0
    # a tied embedding has a copy on the last stage when that is another than the first
    dense += embedding if is_last and (not shape.tied or not is_first) else 0
    float32 = shape.linear.float32(layout.tensor) if shape.linear is not None else 0
    float32 *= sum(linear_of(shape, layout, stage))
    return Parameters(dense + (shape.hidden if is_last else 0), expert, float32)


def sparse_of(shape: Shape, layout: Layout, stage: int) -> list[bool]:
    """Whether each layer of a stage has experts; the MTP layer, if any, is the last one."""
    layers = [shape.sparse[layer] for layer in layers_of(layout, shape.num_layers, stage)]
    if shape.mtp and stage == layout.pipeline - 1:
        layers.append(shape.sparse[-1])
    return layers


def linear_of(shape: Shape, layout: Layout, stage: int) -> list[bool]:
    """For each layer of ``sparse_of`` whether its attention is linear."""
    count = len(sparse_of(shape, layout, stage))
    if shape.linear is None:
        return [False] * count
    layers = layers_of(layout, shape.num_layers, stage)
    found = [shape.linear.layers[layer] for layer in layers]
    return found + [False] * (count - len(found))


def _layer(shape: Shape, layout: Layout, is_sparse: bool, is_linear: bool) -> Parameters:
    """A layer on one rank."""
    matrices = layer_elements(shape, layout, is_sparse, is_linear)
    dense = (_linear_vectors if is_linear else _attention_vectors)(shape, layout.tensor)
    expert = 0
    if is_sparse and shape.linear_bias:
        dense += shape.num_experts
        expert = shape.num_experts // layout.expert * (2 * shape.expert_ffn + shape.hidden)
    return Parameters(matrices.dense + dense, matrices.expert + expert)


def layer_elements(shape: Shape, layout: Layout, is_sparse: bool, is_linear: bool) -> Parameters:
    """Elements of the matrices of a layer on one rank, router included."""
    dense = (linear_matrices if is_linear else _attention_matrices)(shape, layout.tensor)
    if not is_sparse:
        return Parameters(dense + 3 * shape.hidden * (shape.ffn // layout.tensor))
    dense += shape.hidden * shape.num_experts
    dense += 3 * shape.hidden * (shape.shared_ffn // layout.tensor)
    dense += shape.hidden if shape.shared_gate else 0
    one_expert = 3 * shape.hidden * (shape.expert_ffn // layout.expert_tensor)
    return Parameters(dense, shape.num_experts // layout.expert * one_expert)


def _attention_matrices(shape: Shape, tensor: int) -> int:
    if shape.latent is not None:
        return attention_elements(shape) // tensor
    rows = shape.heads * shape.head_dim // tensor
    return shape.hidden * (qkv_columns(shape, tensor) + rows)


def _attention_vectors(shape: Shape, tensor: int) -> int:
    """Biases of attention, and the norms in it and around it and the MLP."""
    if (latent := shape.latent) is not None:
        return 2 * shape.hidden + latent.query_rank + latent.kv_rank
    norms = shape.hidden * (4 if shape.sandwich else 2)
    if shape.qk_norm_per_layer:
        norms += (shape.heads + shape.groups) * shape.head_dim // tensor
    elif shape.qk_norm:
        norms += 2 * shape.head_dim
    biases = qkv_columns(shape, tensor) if shape.qkv_bias else 0
    biases += shape.hidden if shape.linear_bias else 0
    biases += shape.heads // tensor if shape.sinks else 0
    return biases + norms


def qkv_columns(shape: Shape, tensor: int) -> int:
    """Columns of the matrix of queries, keys and values on one rank."""
    queries = shape.heads * (2 if shape.output_gate else 1)
    return (queries + 2 * shape.groups) * shape.head_dim // tensor


def linear_matrices(shape: Shape, tensor: int) -> int:
    """Projections of linear attention."""
    one = shape.linear
    assert one is not None
    return shape.hidden * (2 * one.keys + 3 * one.values + 2 * one.value_heads) // tensor


def _linear_vectors(shape: Shape, tensor: int) -> int:
    """Convolution, decay and norm of linear attention, and the norms before it and the MLP."""
    one = shape.linear
    assert one is not None
    by_head = one.kernel * (2 * one.keys + one.values) + 2 * one.value_heads
    return by_head // tensor + one.value_dim + 2 * shape.hidden


def attention_elements(shape: Shape) -> int:
    """Elements of the matrices of a layer's attention."""
    return sum(rows * columns for rows, columns in shape.attention_matrices)
