"""Time of a step of a run by arithmetic: generation, passes, training, weight update. Pure.

Input: an ``Estimate`` and a card. Output: a ``StepTime``: seconds by part, and the MFU of training.
Answers have the lengths that ``cards.Rates`` assumes. Rewards, tools, stragglers: not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from rlpost.config.engine_args import attention_gpus, replicas
from rlpost.config.flags import flag
from rlpost.config.plan.cards import Card
from rlpost.config.plan.shape import Shape
from rlpost.config.wording import with_values
from rlpost.extensions.planning.estimate import Estimate, Sizes, estimate
from rlpost.extensions.planning.planned_slices import slice_figures
from rlpost.extensions.planning.rank_memory import is_only_measured
from rlpost.extensions.planning.rates import RATES, Rates
from rlpost.extensions.planning.train_time import (
    Parts,
    Training,
    forward_pass_time,
    mfu,
    train_step,
)
from rlpost.extensions.planning.vision_memory import needed_operations

GENERATION, PASSES, CRITIC = "generation", "log-prob passes", "critic"
IMAGES = "images"
UPDATE, OFFLOAD = "weight update", "offload"
SLICES = 16
"""Pieces of the longest answer, in each of which the decode batch is constant."""
FULL = 0.95
"""Fill of micro-batches that are packed up to a limit of tokens."""
WORTH_NAMING = 0.02
"""Share of a step that a setting must save to be named."""
NO_RECOMPUTATION = ("recompute_granularity", "recompute_method", "recompute_num_layers")


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step by part."""

    parts: Parts
    mfu: float
    """Of training and its log-prob passes, recomputation aside, as ``perf/mfu_frac``."""
    is_parallel: bool
    """Whether other GPUs generate while the trainer trains."""

    @property
    def generation(self) -> float:
        return self.parts[GENERATION]

    @property
    def update(self) -> float:
        return self.parts[UPDATE] + self.parts[OFFLOAD]

    @property
    def training(self) -> float:
        return sum(self.parts.values()) - self.generation - self.update

    @property
    def total(self) -> float:
        both = self.generation, self.training
        return (max(both) if self.is_parallel else sum(both)) + self.update

    @property
    def largest(self) -> list[tuple[str, float]]:
        """The three largest parts, and their shares of the sum of all."""
        whole = sum(self.parts.values())
        longest = sorted(self.parts.items(), key=lambda part: -part[1])
        return [(name, seconds / whole) for name, seconds in longest[:3]]


def step_time(planned: Estimate, card: Card, rates: Rates = RATES) -> StepTime:
    """Return the time of a step of the estimated run on GPUs of a kind."""
    config = planned.config
    job = training_of(planned, card, rates)
    steps, passes = config.num_steps_per_rollout, config.num_logprob_passes
    parts = {name: seconds * steps for name, seconds in train_step(job).items()}
    forward = forward_pass_time(job) * steps
    parts[PASSES] = passes * forward
    if config.use_critic:
        parts[CRITIC] = 4 * forward  # values, forward and backward
    training = sum(parts.values()) - parts.get(CRITIC, 0.0)
    if operations := planned.ranks[0].vision.operations:
        parts[IMAGES] = operations / job.peak / rates.products
        training += parts[IMAGES]
    share = mfu(job, training / steps) * (3 + passes) / 3
    of_images = needed_operations(config, planned.shape.vision)
    share += of_images / planned.layout.world / training / job.peak
    parts[GENERATION] = generation_time(planned, card, rates)
    parts[UPDATE] = update_time(planned, card, rates)
    parts[OFFLOAD] = offload_time(planned, rates)
    return StepTime(parts, share, is_parallel=not config.cluster.colocate)


def training_of(planned: Estimate, card: Card, rates: Rates = RATES) -> Training:
    """Return what a data-parallel rank computes in an optimizer step of the estimated run."""
    config, layout = planned.config, planned.layout
    samples = config.samples_per_rollout / config.num_steps_per_rollout / layout.data
    mean = planned.longest * rates.mean_share
    tokens = config.perf.micro_batch_size * mean
    if config.max_tokens is not None:
        tokens = max(mean, FULL * config.max_tokens)
    tokens = min(tokens, samples * mean)
    offload = config.optimizer.optimizer_offload_fraction
    return Training(
        shape=planned.shape,
        layout=layout,
        card=card,
        gpus_per_node=config.cluster.actor_num_gpus_per_node,
        tokens=tokens,
        batches=samples * mean / tokens,
        attended=planned.longest * rates.attended_share,
        recompute=config.perf.recompute_granularity == "full",
        deduplicates=config.perf.moe_token_dispatcher_type == "flex",
        overlaps_reduce=bool(config.perf.overlap_grad_reduce),
        overlaps_shared=config.overlaps_shared_experts,
        fuses_gradients=config.megatron.options.get("gradient_accumulation_fusion") is not False,
        fuses_logprobs=config.fuses_logprobs,
        on_host=offload if config.optimizer.optimizer_cpu_offload else 0.0,
        rates=rates,
    )


def generation_time(planned: Estimate, card: Card, rates: Rates = RATES) -> float:
    """Return the seconds of a rollout on its engines, the last answer included; 0 without engines.

    Lengths spread evenly between twice ``mean_share`` - 1 and 1 of the longest answer. Each engine
    decodes all its answers at once, or as many as its KV cache holds.
    """
    config, engine = planned.config, planned.engine
    if engine is None or not config.num_engines:
        return 0.0
    longest = float(config.rollout.rollout_max_response_len)
    prompt = (planned.longest - longest) / 4  # most prompts are far shorter than the longest
    requests = config.samples_per_rollout / config.num_engines
    held = max(1.0, engine.kv_tokens / (prompt + longest * rates.mean_share))
    first = 2 * rates.mean_share - 1
    seconds = _prefill(planned, card, rates, requests * prompt)
    for index in range(SLICES):
        position = (index + 0.5) / SLICES
        alive = requests if position < first else requests * (1 - position) / (1 - first)
        batch = max(1.0, min(alive, held))
        step = _decode_step(planned, card, rates, batch, prompt + position * longest)
        seconds += longest / SLICES * step * max(1.0, alive / batch)
    return seconds


@lru_cache(maxsize=16)
def _used_parameters(shape: Shape) -> tuple[float, float]:
    """Parameters that a token passes, and the share of all that are in routed experts."""
    held = shape.parameters
    share = shape.topk / shape.num_experts if shape.num_experts else 0.0
    used = held.dense - shape.vocab * shape.hidden * (not shape.tied) + held.expert * share
    return used, held.expert / held.total


def _prefill(planned: Estimate, card: Card, rates: Rates, tokens: float) -> float:
    """Seconds of an engine for the prompts of its requests, each computed once."""
    config = planned.config
    gpus = config.cluster.rollout_num_gpus_per_engine
    flops = 2 * _used_parameters(planned.shape)[0] * tokens / config.rollout.n_samples_per_prompt
    return flops / gpus / (card.tflops * 1e12 * rates.decode_products)


def _decode_step(
    planned: Estimate, card: Card, rates: Rates, batch: float, context: float
) -> float:
    """Seconds in which an engine adds a token to each of ``batch`` answers."""
    config, shape, engine = planned.config, planned.shape, planned.engine
    assert engine is not None
    gpus, memory = config.cluster.rollout_num_gpus_per_engine, card.memory_gbps * 1e9
    memory *= rates.decode_memory
    used, in_experts = _used_parameters(shape)
    read = float(engine.weights)
    if shape.num_experts:
        idle = (1 - shape.topk / shape.num_experts) ** batch
        read *= 1 - idle * in_experts
    flops = 2 * used * batch / gpus
    products = max(read / memory, flops / (card.tflops * 1e12 * rates.decode_products))
    cache = batch / replicas(config) * context * engine.kv_bytes_per_token / memory
    layer = rates.decode_layer_s
    if gpus > 1:
        crosses = gpus > config.cluster.num_gpus_per_node and card.domain <= 8
        attention_crosses = crosses and attention_gpus(config) > config.cluster.num_gpus_per_node
        latency = (rates.decode_reduce_s, rates.network_latency_s)
        layer += latency[crosses] + latency[attention_crosses]
        rows = batch * shape.hidden * 2 * 2
        link = card.network_gbps if crosses else card.nvlink_gbps
        layer += rows / (link * 1e9 * (rates.network if crosses else rates.nvlink))
    return products + cache + layer * shape.num_layers


def update_time(planned: Estimate, card: Card, rates: Rates = RATES) -> float:
    """Return the seconds of sending all weights to the engines; 0 without engines.

    Every GPU that sends receives all weights in gathers and broadcasts, over the network if the
    trainer has several nodes, while the bucket before is loaded. With transport slices the busiest
    GPU sends or receives slices alone, those between nodes over the network.
    """
    update, config = planned.update, planned.config
    if update is None or not config.num_engines:
        return 0.0
    has_network = card.domain <= 8
    network, nvlink = card.network_gbps * rates.network, card.nvlink_gbps * rates.nvlink
    if update.slices is not None:
        figures = slice_figures(update.slices)
        seconds = max(figures.sent, figures.received) / (nvlink * 1e9)
        if has_network:
            seconds = max(seconds, figures.between_nodes / (network * 1e9))
        return seconds + figures.num_buckets * rates.bucket_s
    trainer = planned.layout.world > config.cluster.actor_num_gpus_per_node
    over_network = (trainer or not config.cluster.colocate) and has_network
    link = network if over_network else nvlink
    return update.total_bytes / (link * 1e9) + update.num_buckets * rates.bucket_s


def offload_time(planned: Estimate, rates: Rates = RATES) -> float:
    """Return the seconds of copying the trainer's and the engines' memory to the host and back."""
    config = planned.config
    size = 0
    if config.cluster.colocate and config.offload_train:
        held = planned.fullest.held
        size += 2 * (held.weights + held.optimizer)
    return size / (rates.pcie_gbps * 1e9)


@dataclass(frozen=True, slots=True)
class Faster:
    """Settings that shorten a step and fit in memory."""

    words: str
    """The flags."""
    saved: float
    """Share of the step's time."""


def faster_settings(planned: Estimate, card: Card, sizes: Sizes) -> list[Faster]:
    """Return single changes that save more than WORTH_NAMING of a step, the best first."""
    before, config = step_time(planned, card).total, planned.config
    changes: list[dict[str, object]] = []
    if config.perf.recompute_granularity == "full":
        changes.append(dict.fromkeys(NO_RECOMPUTATION))
    if is_only_measured(config):
        changes.append({"use_kl_loss": False})
    if not config.perf.overlap_grad_reduce:
        changes.append({"overlap_grad_reduce": True})
    options = []
    for values in changes:
        changed = estimate(with_values(config, **values), planned.shape, **sizes)
        saved = 1 - step_time(changed, card).total / before
        if saved > WORTH_NAMING and not changed.problems:
            words = " ".join(f"{flag(key)} {_word(value)}" for key, value in values.items())
            options.append(Faster(words, saved))
    return sorted(options, key=lambda option: -option.saved)


def _word(value: object) -> str:
    """A value as its flag takes it."""
    if isinstance(value, bool):
        return "true" if value else "no"
    return "none" if value is None else str(value)
