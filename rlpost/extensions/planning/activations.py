"""Bytes that a forward pass keeps for the backward pass. Pure.

Input: shape, layout and the tokens that a rank computes at once.
Output: bytes of a layer, of a stage with the micro-batches in flight in its pipeline, and of the
logits. The sums are those of Korthikanti et al. (arXiv 2205.05198, section 4) for layers without
dropout, with attention that never stores its scores (arXiv 2205.14135), with gated MLPs and
grouped-query attention; sequence parallelism shards the activations between the matrices.
Micro-batches in flight: Narayanan et al. (arXiv 2104.04473, section 2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlpost.config.plan.shape import Latent, Layout, Shape, sparse_of

FP32 = 4
CHUNKS = 5
"""Float32 copies of a chunk of logits in the backward pass of log-probs.

There are three of a chunk, and two of the next one, which is begun (``rlpost/trainer/logprobs.py``).
"""


@dataclass(frozen=True, slots=True)
class Activations:
    """Peak bytes of a stage; ``layer`` and ``logits`` do not exist at the same time."""

    kept: int
    """Between layers, of all micro-batches in flight."""
    layer: int
    """While one layer is computed or recomputed, and of its gradients."""
    logits: int

    @property
    def peak(self) -> int:
        return self.kept + max(self.layer, self.logits)


@dataclass(frozen=True, slots=True)
class Pass:
    """The conditions of a forward pass."""

    tokens: int
    """Tokens of a micro-batch on one rank, after context parallelism has sharded it."""
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
    """Bytes that one layer keeps on one rank without recomputation."""
    per_token = _attention(shape, layout, one) + _norm(shape.hidden, one) / layout.sequence_ranks
    if shape.sandwich:
        per_token += (
            2 * (_norm(shape.hidden, one) - one.width * shape.hidden) / layout.sequence_ranks
        )
    per_token += _experts(shape, layout, one) if sparse else _mlp(shape.ffn / layout.tensor, one)
    return round(one.tokens * per_token)


def stage_activations(
    shape: Shape, layout: Layout, one: Pass, stage: int, *, chunk_tokens: int
) -> Activations:
    """Return all bytes of a stage in training; log-probs take ``chunk_tokens`` rows at a time."""
    kept, again = kept_and_recomputed(shape, layout, one, stage)
    boundary = _boundary(shape, layout, one)
    is_last = stage == layout.pipeline - 1
    if layout.pipeline > 1:
        # What it received is counted; what each of its chunks sends is kept too, until its gradient
        # arrives. The last chunk of the last stage sends nothing.
        num_layers = len(sparse_of(shape, layout, stage))
        num_sent = _num_chunks(layout, num_layers) - is_last
        kept += round(boundary * num_sent * in_flight(layout, num_layers, stage))
        kept += 2 * boundary  # the gradients that it receives and sends
    logits = logits_bytes(shape, layout, one, chunk_tokens) if is_last else 0
    layer = again + max(
        transient_bytes(shape, layout, one, is_sparse=is_sparse)
        for is_sparse in set(sparse_of(shape, layout, stage))
    )
    if one.recompute == "full":
        # Megatron-core's token dispatchers refer to the graph of their layer until its next forward
        # pass, and with it to the gradient of what goes into the layer.
        layer += boundary * max(0, sum(sparse_of(shape, layout, stage)) - 1)
    return Activations(kept + _gathered(shape, layout, one), layer, logits)


def kept_and_recomputed(shape: Shape, layout: Layout, one: Pass, stage: int) -> tuple[int, int]:
    """Bytes that a stage keeps of all its layers, and of the layers that it recomputes together."""
    layers = sparse_of(shape, layout, stage)
    each = {sparse: layer_bytes(shape, layout, one, sparse=sparse) for sparse in set(layers)}
    full = [each[is_sparse] for is_sparse in layers]
    kept, again = _layers_bytes(
        full, one, layout, stage=stage, boundary=_boundary(shape, layout, one)
    )
    if stage == layout.pipeline - 1:
        norm = round(_norm(shape.hidden, one) - one.width * shape.hidden)
        kept += one.tokens * norm // layout.sequence_ranks
    return kept, again


def _gathered(shape: Shape, layout: Layout, one: Pass) -> int:
    """Megatron-core's buffer for gathers of sequence parallelism, which is never freed."""
    return one.tokens * shape.hidden * one.width if layout.sequence_ranks > 1 else 0


def _boundary(shape: Shape, layout: Layout, one: Pass) -> int:
    """Bytes of the hidden states between two layers."""
    return one.tokens * shape.hidden * one.width // layout.sequence_ranks


def _layers_bytes(
    full: Sequence[int], one: Pass, layout: Layout, *, stage: int, boundary: int
) -> tuple[int, int]:
    """Bytes kept, and recomputed together; ``full``: bytes per layer without recomputation."""
    if one.recompute != "full":
        return round(sum(full) * in_flight(layout, len(full), stage)), 0
    if one.method == "block":
        count = min(one.num_recomputed, len(full))
        held, again = count * boundary + sum(full[count:]), max(full[:count], default=0)
    else:
        size = one.num_recomputed
        held = -(-len(full) // size) * boundary
        again = max(sum(full[start : start + size]) for start in range(0, len(full), size))
    return round(held * in_flight(layout, len(full), stage)), again


def in_flight(layout: Layout, num_layers: int, stage: int) -> float:
    """Micro-batches whose activations a stage holds at once: one for itself and each later stage.

    Interleaved, with v chunks per stage, the first backward pass follows 2 (p - s - 1) + (v - 1) p
    + 1 chunks on stage s of p.
    """
    if layout.chunk is None or layout.pipeline == 1:
        return layout.pipeline - stage
    ahead = layout.pipeline - 2 * stage - 1
    return layout.pipeline + ahead / _num_chunks(layout, num_layers)


def _num_chunks(layout: Layout, num_layers: int) -> int:
    """Virtual stages of a stage."""
    return 1 if layout.chunk is None else num_layers // layout.chunk


def logits_bytes(shape: Shape, layout: Layout, one: Pass, chunk_tokens: int) -> int:
    """Logits of the last stage, their gradient, and float32 copies of a chunk of rows.

    A layer for multi-token prediction adds its logits and the concatenation of its two inputs.
    """
    columns = -(-shape.vocab // layout.tensor)
    gathered = one.tokens * shape.hidden * one.width
    both = 2 * one.tokens * columns * one.width
    copies = CHUNKS if one.tokens > chunk_tokens else CHUNKS - 1
    chunk = copies * min(chunk_tokens, one.tokens) * columns * FP32
    return both + chunk + (both + 3 * gathered if shape.mtp else 0)


def transient_bytes(
    shape: Shape, layout: Layout, one: Pass, *, is_sparse: bool | None = None
) -> int:
    """Bytes of a layer beside the activations that it keeps; ``is_sparse`` None: the larger.

    Of a dense layer in its backward pass at its widest: the gradients of the first MLP matrix's
    output and of what sequence parallelism gathers before it. Of experts also in their forward
    pass: rows that are sorted, received and returned (``_dispatched``).
    """
    columns = 2 * max(shape.ffn, shape.topk * shape.expert_ffn, shape.shared_ffn) / layout.tensor
    dense = columns + shape.hidden * (1 if layout.sequence_ranks > 1 else 2)
    experts = _dispatched(shape, layout) if is_sparse or is_sparse is None else 0.0
    return round(one.tokens * one.width * max(dense, experts))


def _dispatched(shape: Shape, layout: Layout) -> float:
    """Elements for each token in rows for experts, beside those that the first matrix keeps.

    With several experts on a rank: rows in the order of experts, rows received, outputs, and
    outputs put together or back in order. With one, nothing is sorted after rows are received.
    """
    own, rows = _routed(shape, layout)
    is_spread = layout.expert > 1
    if shape.num_experts > layout.expert:
        return shape.hidden * (own * (1 + is_spread) + 2 * rows)
    arrived = own * (is_spread + (layout.expert_tensor > 1))
    return shape.hidden * (arrived + rows + own * is_spread)


def _routed(shape: Shape, layout: Layout) -> tuple[float, float]:
    """Rows for experts for each token: those that a rank sends, and those that its experts get."""
    own = shape.topk / layout.sequence_ranks
    return own, own * (layout.expert_tensor if layout.sequence_ranks > 1 else 1)


def _norm(width: float, one: Pass) -> float:
    """Input (float32 if not fused), normalised values, and the output that a matrix keeps."""
    return width * (2 * one.width if one.fused else FP32 + 2 * one.width)


def _attention(shape: Shape, layout: Layout, one: Pass) -> float:
    """The norm before it, QKV from their matrix, rotated query and key, and the output."""
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
        if layout.context > 1:
            # Keys and values of all ranks, once for each of the two chunks of this one, in place of
            # what came out of the matrix.
            kept += one.width * ((2 * layout.context + 1) * key - query - 2 * key)
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
    """Both halves of the first matrix's output, SiLU of one, a copy of the other, the product."""
    # Megatron-core 0.16 copies the other half, because it adds ``glu_linear_offset`` to it.
    return 5 * columns * one.width


def _experts(shape: Shape, layout: Layout, one: Pass) -> float:
    """Router scores, tokens sorted by expert, the experts' MLPs, and the shared expert.

    Tokens are assumed to spread evenly over the experts.
    """
    _, routed = _routed(shape, layout)
    inner = shape.expert_ffn / layout.expert_tensor
    # the last term: the product of an MLP is kept again, scaled by the router's weight
    kept = routed * (shape.hidden * one.width + _mlp(inner, one) + inner * one.width)
    kept += 3 * shape.num_experts * FP32 / layout.sequence_ranks
    return kept + (_mlp(shape.shared_ffn / layout.tensor, one) if shape.shared_ffn else 0.0)
