"""Time of an optimizer step by arithmetic. Pure.

Input: a ``Training``: shape, layout, card and micro-batches. Output: seconds by part, of the
slowest pipeline stage, and the idle time of the pipeline. Model operations: Narayanan et al.
(arXiv 2104.04473, section 5.1); sequence parallelism: Korthikanti et al. (arXiv 2205.05198). A
rank's parts follow one another: what a library overlaps is counted where it is not hidden.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from rlpost.config.plan.cards import Card
from rlpost.config.plan.shape import (
    Layout,
    Parameters,
    Shape,
    linear_of,
    rank_parameters,
    sparse_of,
)
from rlpost.config.plan.shape import layer_elements as elements_of
from rlpost.extensions.planning.rates import RATES, Rates

Parts = dict[str, float]
"""Seconds by part."""
PRODUCTS, ATTENTION, AGAIN = "matrix products", "attention", "recomputation"
TENSOR, CONTEXT, EXPERTS = "tensor parallel", "context parallel", "expert all-to-all"
SMALL, HEAD, LAUNCH = "elementwise kernels", "logits", "kernel launches"
IDLE, STAGES, GRADIENTS = "idle pipeline", "between stages", "gradients"
OPTIMIZER = "optimizer"
BF16 = 2


@dataclass(frozen=True, slots=True)
class Training:
    """What a data-parallel rank computes in one optimizer step, and on what."""

    shape: Shape
    layout: Layout
    card: Card
    gpus_per_node: int
    tokens: float
    """Of a micro-batch, before context parallelism shards it."""
    batches: float
    """Micro-batches of a data-parallel rank."""
    attended: float
    """Mean over tokens of the length of their sample."""
    recompute: bool = False
    """Whether the backward pass computes every layer again."""
    deduplicates: bool = False
    """Whether a token crosses to another node once for all its experts there (DeepEP)."""
    overlaps_shared: bool = False
    """Whether products of shared experts run during the all-to-all of the others."""
    overlaps_reduce: bool = False
    fuses_gradients: bool = False
    """Whether products add to the float32 gradient instead of a kernel after them."""
    fuses_logprobs: bool = True
    """Whether one kernel each way computes log-probs."""
    on_host: float = 0.0
    """Share of the optimizer's state in host memory."""
    rates: Rates = RATES

    @property
    def domain(self) -> int:
        """GPUs that NVLink connects."""
        return max(self.gpus_per_node, self.card.domain if self.card.domain > 8 else 0)

    @property
    def own_tokens(self) -> float:
        """Tokens of a micro-batch on one rank, before sequence parallelism shards them."""
        return self.tokens / self.layout.context

    @property
    def peak(self) -> float:
        """FLOP/s."""
        return self.card.tflops * 1e12

    @property
    def memory(self) -> float:
        """Bytes/s of GPU memory."""
        return self.card.memory_gbps * 1e9 * self.rates.memory

    def link(self, ranks: int) -> float:
        """Bytes/s of a GPU in a ring over ``ranks`` consecutive ranks."""
        if ranks <= self.domain:
            return self.card.nvlink_gbps * 1e9 * self.rates.nvlink
        return self.network

    @property
    def network(self) -> float:
        """Bytes/s of a GPU between nodes."""
        return self.card.network_gbps * 1e9 * self.rates.network


def train_step(job: Training) -> Parts:
    """Seconds of forward passes, backward passes and the optimizer, by part."""
    stages = [_stage(job, stage, backward=True) for stage in range(job.layout.pipeline)]
    parts = _pipelined(job, stages)
    stage_parameters = [
        rank_parameters(job.shape, job.layout, stage) for stage in range(job.layout.pipeline)
    ]
    reductions = (_reduction(job, held) for held in stage_parameters)
    updates = (_optimizer(job, held) for held in stage_parameters)
    _add(parts, {GRADIENTS: max(reductions), OPTIMIZER: max(updates)})
    return parts


def _add(parts: Parts, more: Parts, count: float = 1) -> None:
    for name, seconds in more.items():
        parts[name] = parts.get(name, 0.0) + count * seconds


def forward_pass_time(job: Training) -> float:
    """Seconds of a forward pass over all micro-batches, for log-probs."""
    stages = [_stage(job, stage, backward=False) for stage in range(job.layout.pipeline)]
    return sum(_pipelined(job, stages).values())


def model_flops(job: Training) -> float:
    """Operations of a forward pass over one micro-batch, on all ranks of a model together."""
    shape = job.shape
    one = Training(shape, Layout(), job.card, 1, job.tokens, 1, job.attended)
    layers = zip(sparse_of(shape, Layout(), 0), linear_of(shape, Layout(), 0), strict=True)
    total = 2.0 * job.tokens * shape.vocab * shape.hidden
    for (is_sparse, is_linear), count in Counter(layers).items():
        dense, expert = _operations(one, is_sparse=is_sparse, is_linear=is_linear)
        total += count * (dense + expert + (0 if is_linear else attention_flops(one)))
    return total


def mfu(job: Training, seconds: float) -> float:
    """Share of the GPUs' peak that forward and backward of a step of ``seconds`` use."""
    ranks = job.layout.world / job.layout.data
    return 3 * model_flops(job) * job.batches / ranks / seconds / job.peak


def attention_flops(job: Training) -> float:
    """Operations of causal attention of a layer on one rank: half of all pairs."""
    shape = job.shape
    width = 2 * shape.head_dim
    if shape.latent is not None:
        width = shape.head_dim + shape.latent.position + shape.latent.value
    share = job.own_tokens * shape.heads / job.layout.tensor
    return 2 * (job.attended / 2) * width * share


def _operations(job: Training, *, is_sparse: bool, is_linear: bool) -> tuple[float, float]:
    """Operations of a layer's matrix products on a rank: those all tokens use, and the experts'."""
    shape, layout = job.shape, job.layout
    dense = 2.0 * elements_of(shape, layout, is_sparse, is_linear).dense * job.own_tokens
    expert = 0.0
    if is_sparse:
        rows = job.own_tokens * shape.topk / layout.sequence_ranks
        expert = 6.0 * shape.hidden * shape.expert_ffn * rows
    return dense, expert


def _efficiency(job: Training, width: float) -> float:
    """Share of the peak of a product with this smallest dimension."""
    return job.rates.products * width / (width + job.rates.half_width)


def _products(job: Training, *, is_sparse: bool, is_linear: bool) -> float:
    """Seconds of a layer's matrix products, forward."""
    shape, layout = job.shape, job.layout
    dense, expert = _operations(job, is_sparse=is_sparse, is_linear=is_linear)
    width = min(shape.hidden, shape.heads * shape.head_dim / layout.tensor)
    seconds = dense / job.peak / _efficiency(job, width)
    if expert:
        rows = job.own_tokens * shape.topk / layout.sequence_ranks * layout.expert
        each = rows * layout.expert_tensor / shape.num_experts
        inner = min(shape.expert_ffn / layout.expert_tensor, each)
        seconds += expert / job.peak / _efficiency(job, inner)
    return seconds


def _shared_products(job: Training) -> float:
    """Least seconds of the products of shared experts in a layer, forward."""
    inner = job.shape.shared_ffn / job.layout.tensor
    return 6.0 * job.shape.hidden * inner * job.own_tokens / job.peak / job.rates.products


def _collectives(job: Training, *, is_sparse: bool) -> Parts:
    """Seconds of a layer's communication, forward."""
    shape, layout = job.shape, job.layout
    parts: Parts = {}
    states = job.own_tokens * shape.hidden * BF16
    if layout.tensor > 1:
        number = 2 if is_sparse and not shape.shared_ffn else 4
        sent = states * (layout.tensor - 1) / layout.tensor
        parts[TENSOR] = number * sent / job.link(layout.tensor) * job.rates.tensor_exposed
    if layout.context > 1:
        keys = 2 * max(1, shape.groups / layout.tensor) * shape.head_dim
        if shape.latent is not None:
            keys = 2 * shape.heads / layout.tensor * shape.head_dim
        ring = keys * job.own_tokens * (layout.context - 1) * BF16
        ring /= job.link(layout.tensor * layout.context)
        hidden = attention_flops(job) / job.peak / job.rates.attention_forward
        parts[CONTEXT] = max(0.2 * ring, ring - hidden)  # the first block is not hidden
    if is_sparse:
        parts[EXPERTS] = _dispatch(job)
    return parts


def _dispatch(job: Training) -> float:
    """Seconds of sending tokens to their experts and back, forward."""
    shape, layout = job.shape, job.layout
    rank_tokens = job.own_tokens / layout.sequence_ranks
    row = shape.hidden * BF16
    seconds = 0.0
    span = layout.expert * layout.expert_tensor
    if layout.expert > 1:
        nodes = max(1, span / job.domain)
        across = rank_tokens * shape.topk * (1 - 1 / nodes)
        if job.deduplicates:
            across = min(across, rank_tokens * (nodes - 1) * (1 - (1 - 1 / nodes) ** shape.topk))
        inside = rank_tokens * shape.topk / nodes * (1 - 1 / min(layout.expert, job.domain))
        seconds += max(across * row / job.network, inside * row / job.link(1))
    if layout.expert_tensor > 1:
        gathered = rank_tokens * shape.topk * (layout.expert_tensor - 1)
        seconds += gathered * row / job.link(layout.expert_tensor)
    return 2 * seconds


def _small(job: Training, *, is_sparse: bool) -> float:
    """Seconds of norms, rotary embedding, activations and, with experts, their permutations."""
    shape, layout = job.shape, job.layout
    states = 10 * shape.hidden / layout.sequence_ranks
    heads = 4 * (shape.heads + shape.groups) * shape.head_dim / layout.tensor
    inner = 3 * (shape.shared_ffn if is_sparse else shape.ffn) / layout.tensor
    if is_sparse:
        rows = shape.topk / layout.sequence_ranks
        inner += rows * (8 * shape.hidden + 4 * shape.expert_ffn)
    return job.own_tokens * (states + heads + inner) * BF16 / job.memory


def _layer(job: Training, *, is_sparse: bool, is_linear: bool, backward: bool) -> Parts:
    """Seconds of a layer by part: forward, with ``backward`` also that and the recomputation."""
    rates = job.rates
    products = _products(job, is_sparse=is_sparse, is_linear=is_linear)
    flops = 0.0 if is_linear else attention_flops(job) / job.peak
    forward = _collectives(job, is_sparse=is_sparse)
    shared = _shared_products(job) if is_sparse and job.overlaps_shared else 0.0
    exchange = forward.get(EXPERTS, 0.0)
    forward[PRODUCTS] = products - min(exchange, shared)
    forward[ATTENTION] = flops / rates.attention_forward
    forward[SMALL] = _small(job, is_sparse=is_sparse)
    launch = rates.sparse_launch_s if is_sparse else rates.dense_launch_s
    forward[LAUNCH] = max(0.0, launch - sum(forward.values()))
    if not backward:
        return forward
    parts, reverse = dict(forward), dict(forward)
    reverse[PRODUCTS] = 2 * products - min(exchange, 2 * shared)
    reverse[ATTENTION] = 2.5 * flops / rates.attention_backward
    reverse[SMALL] = 1.5 * forward[SMALL]
    reverse[LAUNCH] = 0.0
    reverse[LAUNCH] = max(0.0, 2 * launch - sum(reverse.values()))
    _add(parts, reverse)
    if job.recompute:
        parts[AGAIN] = sum(forward.values())
    return parts


def _stage(job: Training, stage: int, *, backward: bool) -> Parts:
    """Seconds of a micro-batch on a rank of a stage, by part."""
    shape, layout = job.shape, job.layout
    parts: Parts = {}
    layers = zip(sparse_of(shape, layout, stage), linear_of(shape, layout, stage), strict=True)
    for (is_sparse, is_linear), count in Counter(layers).items():
        layer = _layer(job, is_sparse=is_sparse, is_linear=is_linear, backward=backward)
        _add(parts, layer, count)
    if stage == layout.pipeline - 1:
        columns = shape.vocab / layout.tensor
        product = 2 * job.own_tokens * columns * shape.hidden / job.peak / job.rates.products
        rates = job.rates
        moved = rates.logit_bytes if job.fuses_logprobs else rates.chunked_logit_bytes
        passes = job.own_tokens * columns * moved / job.memory
        parts[HEAD] = (3 * product + passes) if backward else (product + passes / 3)
    if layout.pipeline > 1:
        sent = job.own_tokens * shape.hidden * BF16 / layout.sequence_ranks
        span = layout.world // layout.pipeline + 1  # the next stage is that many ranks away
        parts[STAGES] = (2 if backward else 1) * sent / job.link(span)
    if backward:
        per_parameter = 8 if job.fuses_gradients else 12
        parts[GRADIENTS] = rank_parameters(shape, layout, stage).total * per_parameter / job.memory
    return parts


def _pipelined(job: Training, stages: list[Parts]) -> Parts:
    """All micro-batches on the slowest stage, and what it waits for the others."""
    slowest = max(stages, key=lambda parts: sum(parts.values()))
    parts = {name: seconds * job.batches for name, seconds in slowest.items()}
    layout = job.layout
    chunks = 1.0
    if layout.chunk is not None:
        chunks = job.shape.num_layers / layout.pipeline / layout.chunk
    parts[IDLE] = sum(slowest.values()) * (layout.pipeline - 1) / chunks
    return parts


def _reduction(job: Training, held: Parameters) -> float:
    """Seconds of reducing gradients and gathering weights over data-parallel ranks, once a step."""
    layout = job.layout
    stage = layout.world // layout.pipeline
    seconds = 0.0
    for size, ranks in (
        (held.dense, stage // layout.tensor),
        (held.expert, stage // (layout.expert * layout.expert_tensor)),
    ):
        if ranks > 1:
            seconds += 6 * size * (ranks - 1) / ranks / job.link(stage)  # float32, then bfloat16
    return seconds * (job.rates.reduce_exposed if job.overlaps_reduce else 1)


def _optimizer(job: Training, held: Parameters) -> float:
    """Seconds of Adam on a rank: 30 bytes a parameter on a GPU, 28 and two copies on the host."""
    layout, rates = job.layout, job.rates
    stage = layout.world // layout.pipeline
    share = held.dense / (stage / layout.tensor)
    share += held.expert / (stage / (layout.expert * layout.expert_tensor))
    on_gpu = 30 * share * (1 - job.on_host) / job.memory
    node = 28 * share * job.gpus_per_node / (rates.host_gbps * 1e9)
    on_host = job.on_host * max(node, 6 * share / (rates.pcie_gbps * 1e9))
    return on_gpu + on_host
