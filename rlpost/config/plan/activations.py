"""Bytes that a forward pass keeps for the backward pass. Pure.

Input: shape, layout and how many tokens a rank computes at once.
Output: bytes of a layer, of a stage with the micro-batches that are under way in its pipeline, and
of the logits. The sums are those of Korthikanti et al. (arXiv 2205.05198, section 4) for layers
without dropout, with attention that never stores its scores (arXiv 2205.14135), with gated MLPs
and grouped-query attention; what runs between the matrices is cut by sequence parallelism.
Micro-batches under way: Narayanan et al. (arXiv 2104.04473, section 2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlpost.config.plan.shape import Latent, Layout, Shape, sparse_of

FP32 = 4


@dataclass(frozen=True, slots=True)
class Pass:
    """How a forward pass runs."""

    tokens: int
    """Of a micro-batch on one rank, after context parallelism has cut it."""
    width: int = 2
    """Bytes of an activation."""
    fused: bool = True
    """TransformerEngine's kernels.

    Without them norms also keep their input in float32, the rotary embedding its tables, and
    attention its output twice.
    """
    recompute: str | None = None
    method: str | None = None
    """uniform or block, with ``recompute`` full."""
    num_recomputed: int = 1


def layer_bytes(shape: Shape, layout: Layout, one: Pass, *, sparse: bool) -> int:
    """What one layer keeps on one rank when nothing is recomputed."""
    per_token = _attention(shape, layout, one) + _norm(shape.hidden, one) / layout.sequence_ranks
    if shape.sandwich:
        per_token += (
            2 * (_norm(shape.hidden, one) - one.width * shape.hidden) / layout.sequence_ranks
        )
    per_token += _experts(shape, layout, one) if sparse else _mlp(shape.ffn / layout.tensor, one)
    return round(one.tokens * per_token)


def stage_bytes(shape: Shape, layout: Layout, one: Pass, stage: int) -> int:
    """What a stage keeps at its fullest: its micro-batches under way, and the layers that are just
    recomputed.
    """
    full = [
        layer_bytes(shape, layout, one, sparse=is_sparse)
        for is_sparse in sparse_of(shape, layout, stage)
    ]
    last = (
        one.tokens
        * round(_norm(shape.hidden, one) - one.width * shape.hidden)
        // layout.sequence_ranks
    )
    if stage == layout.pipeline - 1:
        return last + _layers_bytes(
            full, one, layout, stage=stage, boundary=_boundary(shape, layout, one)
        )
    return _layers_bytes(full, one, layout, stage=stage, boundary=_boundary(shape, layout, one))


def _boundary(shape: Shape, layout: Layout, one: Pass) -> int:
    """What goes from layer to layer."""
    return one.tokens * shape.hidden * one.width // layout.sequence_ranks


def _layers_bytes(
    full: Sequence[int], one: Pass, layout: Layout, *, stage: int, boundary: int
) -> int:
    """``full``: what each layer of the stage keeps when nothing is recomputed."""
    if one.recompute != "full":
        return round(sum(full) * under_way(layout, len(full), stage))
    if one.method == "block":
        count = min(one.num_recomputed, len(full))
        held, again = count * boundary + sum(full[count:]), max(full[:count], default=0)
    else:
        size = one.num_recomputed
        held = -(-len(full) // size) * boundary
        again = max(sum(full[start : start + size]) for start in range(0, len(full), size))
    return round(held * under_way(layout, len(full), stage)) + again


def under_way(layout: Layout, num_layers: int, stage: int) -> float:
    """Micro-batches whose activations a stage holds at once: as many as stages follow it, itself
    included; with v chunks a stage (interleaved) the first has (1 + (p - 1) / (p v)) times as much.
    """
    behind = layout.pipeline - stage
    if layout.chunk is None or layout.pipeline == 1:
        return behind
    chunks = num_layers // layout.chunk
    return min(behind + (layout.pipeline - 1) / chunks, float(2 * layout.pipeline))


def logits_bytes(shape: Shape, layout: Layout, one: Pass, chunk_tokens: int) -> int:
    """Logits, their gradient, and three float32 copies of the rows that are computed at once; on
    the last stage. The layer for multi-token prediction has logits too, and the join of two hidden
    states before it.
    """
    columns = -(-shape.vocab // layout.tensor)
    gathered = one.tokens * shape.hidden * one.width
    kept = (2 * one.tokens * columns * one.width + gathered) * (2 if shape.mtp else 1)
    return (
        kept
        + 3 * min(chunk_tokens, one.tokens) * columns * FP32
        + (2 * gathered if shape.mtp else 0)
    )


def transient_bytes(shape: Shape, layout: Layout, one: Pass) -> int:
    """Gradients of activations in the backward pass of a layer at its widest: those of the first
    MLP matrix's output and of what sequence parallelism gathers before it.
    """
    columns = 2 * max(shape.ffn, shape.topk * shape.expert_ffn, shape.shared_ffn) / layout.tensor
    return round(one.tokens * one.width * (columns + 2 * shape.hidden))


def _norm(width: float, one: Pass) -> float:
    """Input (in float32 where it is not fused), normalised values, and the output that the next
    matrix keeps.
    """
    return width * (2 * one.width if one.fused else FP32 + 2 * one.width)


def _attention(shape: Shape, layout: Layout, one: Pass) -> float:
    """The norm before it; QKV as they come out of their matrix; query and key after rotation; the
    output.
    """
    if shape.latent is not None:
        return _latent_attention(shape, shape.latent, layout, one)
    query, key = (heads * shape.head_dim / layout.tensor for heads in (shape.heads, shape.groups))
    kept = one.width * (query + 2 * key + query + key + query)
    if shape.qk_norm:
        # its input and output are there already
        kept += _norm(query + key, one) - 2 * one.width * (query + key)
        kept += one.width * (query + key)
    if not one.fused:
        kept += one.width * (query + 4 * shape.head_dim)
    kept += FP32 * shape.heads / layout.tensor  # the logarithm of each row's sum
    return kept + _norm(shape.hidden, one) / layout.sequence_ranks


def _latent_attention(shape: Shape, latent: Latent, layout: Layout, one: Pass) -> float:
    """The norm before it; both narrow vectors and their norms; query, key, value and the output.

    What the wide matrices return is copied into query, key and value, and not kept.
    """
    heads = shape.heads / layout.tensor
    kept = one.width * heads * 2 * (shape.head_dim + latent.position + latent.value)
    kept += FP32 * heads  # the logarithm of each row's sum
    narrow = shape.hidden + latent.query_rank + latent.kv_rank
    return kept + _norm(narrow, one) / layout.sequence_ranks


def _mlp(columns: float, one: Pass) -> float:
    """Both halves that come out of the first matrix, SiLU of the one, a copy of the other
    (Megatron-core 0.16 adds ``glu_linear_offset`` to it), and the product.
    """
    return 5 * columns * one.width


def _experts(shape: Shape, layout: Layout, one: Pass) -> float:
    """Router scores; each token once for each of its experts, sorted; their MLPs, whose product is
    kept a second time with the router's weight; the shared expert. Tokens are taken to spread evenly
    over the experts.
    """
    own = 1 / layout.sequence_ranks
    routed = own * shape.topk * (layout.expert_tensor if layout.sequence_ranks > 1 else 1)
    inner = shape.expert_ffn / layout.expert_tensor
    kept = routed * (shape.hidden * one.width + _mlp(inner, one) + inner * one.width)
    kept += own * 3 * shape.num_experts * FP32
    return kept + (_mlp(shape.shared_ffn / layout.tensor, one) if shape.shared_ffn else 0.0)
