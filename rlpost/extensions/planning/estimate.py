"""Estimate the memory of each GPU and node in each phase of a run. Pure.

Input: settings, the shape of the model and the memory of a GPU. Output: an ``Estimate``. CUDA and
NCCL are counted by ``nccl_memory``, engines by ``engine_memory``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypedDict

from rlpost.config.plan.cards import RESERVE
from rlpost.config.plan.shape import (
    Layout,
    Parameters,
    Shape,
    layers_of,
    layout_of,
    rank_parameters,
)
from rlpost.config.plan.weight_update import SMALLEST
from rlpost.config.tree import Config
from rlpost.extensions.planning.activations import (
    Activations,
    Pass,
    in_flight,
    stage_activations,
)
from rlpost.extensions.planning.counts import critic_parameters
from rlpost.extensions.planning.engine_memory import PlannedEngine, planned_engine
from rlpost.extensions.planning.nccl_memory import exchange_group, idle_context, trainer_context
from rlpost.extensions.planning.planned_update import FP8_WIDTH, PlannedUpdate, weight_update
from rlpost.extensions.planning.rank_memory import (
    RankMemory,
    forward_pass,
    held_memory,
    muon_matrices,
    parameter_bytes,
    pinned_rounding,
    saved_bytes,
    saved_weight_bytes,
    trained_parameters,
)
from rlpost.extensions.planning.save_interval import written_s
from rlpost.extensions.planning.shortages import cache_problem, phase_problem
from rlpost.extensions.planning.vision_memory import NO_VISION, PlannedVision, planned_vision

GENERATE = "generate"


class Sizes(TypedDict):
    """Arguments of ``estimate`` besides settings and shape."""

    gpu_bytes: int
    engine_width: int


@dataclass(frozen=True, slots=True)
class PlannedRank:
    """The rank of a pipeline stage at its fullest; bytes on its GPU but for ``optimizer_host``."""

    stage: int
    parameters: Parameters
    trained: Parameters
    """With adapters these alone, in addition to ``parameters``; otherwise the same."""
    held: RankMemory
    critic: RankMemory
    """Memory of a critic beside the policy; zeros without one."""
    saved: int
    """Bytes that it writes of a checkpoint."""
    optimizer_host: int
    passing: Activations
    context: int
    """CUDA and NCCL."""
    vision: PlannedVision = NO_VISION
    """The encoder of images, counted in ``held`` and ``passing``."""

    @property
    def train(self) -> int:
        """Peak of forward and backward."""
        return self.held.total + self.critic.total + self.passing.peak + self.context

    @property
    def activations(self) -> int:
        """Everything between weights and logits."""
        return self.passing.kept + self.passing.layer

    @property
    def logits(self) -> int:
        """With their gradient; 0 but on the last stage."""
        return self.passing.logits


@dataclass(frozen=True, slots=True)
class MemoryPhase:
    """The memory of a GPU in a phase, by part."""

    name: str
    parts: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        return sum(size for _, size in self.parts)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Everything that ``rlpost plan`` shows."""

    config: Config
    shape: Shape
    layout: Layout
    gpu_bytes: int
    tokens: int
    longest: int
    ranks: tuple[PlannedRank, ...]
    engine: PlannedEngine | None
    phases: tuple[MemoryPhase, ...]
    host_bytes_per_node: int
    checkpoint_bytes: int
    checkpoint_bytes_per_rank: int
    """Most bytes of a checkpoint that one rank writes."""
    save_buffer_bytes: int
    """Host memory of a rank that a checkpoint passes through."""
    update: PlannedUpdate | None
    """None without engines."""

    @property
    def fullest(self) -> PlannedRank:
        """The rank with the highest peak."""
        return max(self.ranks, key=lambda rank: rank.train)

    def written_s(self, write_gbps: float) -> float:
        """Seconds that writing a checkpoint takes."""
        return written_s(self.config, self.checkpoint_bytes, write_gbps=write_gbps)

    @property
    def problems(self) -> tuple[str, ...]:
        """One line for each amount that does not fit."""
        config, limit, engine = self.config, self.gpu_bytes * RESERVE, self.engine
        found = [
            phase_problem(config, one.name, one.parts, limit=limit, gpu_bytes=self.gpu_bytes)
            for one in self.phases
            if one.total > limit
        ]
        if engine is not None and engine.kv_tokens < self.longest:
            sizes = engine.weights, engine.kv_tokens, self.longest
            found.append(cache_problem(config, *sizes))
        return tuple(found)


def estimate(
    config: Config,
    shape: Shape,
    *,
    gpu_bytes: int,
    engine_width: int = 2,
    with_engine: bool = True,
) -> Estimate:
    """Estimate a run.

    Args:
        config: with a possible layout.
        shape: of the policy.
        gpu_bytes: memory of a GPU.
        engine_width: bytes of a weight in the engines, 1 for FP8.
        with_engine: see ``forward_pass``.
    """
    layout = layout_of(config)
    one, longest = forward_pass(config, with_engine=with_engine)
    ranks = tuple(
        _rank(config, shape, layout, one, stage=stage) for stage in range(layout.pipeline)
    )
    ranks = (_with_vision(config, shape, layout, one, ranks[0]), *ranks[1:])
    encoder = Parameters(ranks[0].vision.trained)
    stored = parameter_bytes(config)
    whole = trained_parameters(config, shape, Layout(), 0)
    matrices = muon_matrices(config, shape, Layout(), 0)
    stored_size = saved_bytes(config, Layout(), whole, matrices)
    stored_size += saved_bytes(config, Layout(), encoder)
    stored_size += (whole.total + encoder.total) * stored.weights * config.num_kept_weights
    if config.use_critic:
        critic = critic_parameters(shape, Layout(), 0)
        stored_size += saved_bytes(config, Layout(), critic, matrices)
    engine = None
    if config.num_engines:
        engine = planned_engine(
            config,
            shape,
            gpu_bytes=gpu_bytes,
            width=engine_width,
            held=_held_by_trainer(config, ranks),
        )
    fullest = max(ranks, key=lambda rank: rank.train)
    exchange = _exchange(config, shape, layout, width=stored.weights)
    most_weights = max(rank.held.weights for rank in ranks)
    update = None
    if engine is not None:
        update = weight_update(
            config,
            shape,
            layout,
            gpu_bytes=gpu_bytes,
            width=stored.weights,
            in_fp8=engine_width == FP8_WIDTH,
            encoder=encoder.total,
        )
    return Estimate(
        config=config,
        shape=shape,
        layout=layout,
        gpu_bytes=gpu_bytes,
        tokens=one.tokens,
        longest=longest,
        ranks=ranks,
        engine=engine,
        phases=_phases(
            config, fullest, engine, update, most_weights=most_weights, exchange=exchange
        ),
        host_bytes_per_node=_host(config, ranks, engine),
        checkpoint_bytes=stored_size,
        checkpoint_bytes_per_rank=max(rank.saved for rank in ranks),
        save_buffer_bytes=max(_save_buffer(config, rank) for rank in ranks),
        update=update,
    )


def _rank(
    config: Config,
    shape: Shape,
    layout: Layout,
    one: Pass,
    *,
    stage: int,
) -> PlannedRank:
    parameters = rank_parameters(shape, layout, stage)
    trained = trained_parameters(config, shape, layout, stage)
    matrices = muon_matrices(config, shape, layout, stage)
    held, host = held_memory(config, layout, parameters, trained, matrices)
    host += pinned_rounding(config, shape, layout, stage)
    critic, critic_memory = Parameters(0), RankMemory(0, 0, 0)
    if config.use_critic:
        critic = critic_parameters(shape, layout, stage)
        critic_memory, more = held_memory(config, layout, critic, critic, matrices)
        host += more
    return PlannedRank(
        stage=stage,
        parameters=parameters,
        trained=trained,
        held=held,
        critic=critic_memory,
        saved=saved_bytes(config, layout, trained, matrices)
        + saved_bytes(config, layout, critic, matrices)
        + saved_weight_bytes(config, layout, trained) * config.num_kept_weights,
        optimizer_host=host,
        passing=stage_activations(
            shape, layout, one, stage, chunk_tokens=config.grpo.log_probs_chunk_size
        ),
        context=trainer_context(config, layout, shape),
    )


def _with_vision(
    config: Config, shape: Shape, layout: Layout, one: Pass, rank: PlannedRank
) -> PlannedRank:
    """Add the encoder of images to a rank of the first stage."""
    vision = planned_vision(config, shape.vision, width=one.width, tokens=one.tokens)
    num_layers = len(layers_of(layout, shape.num_layers, 0))
    image_bytes = round((vision.features + vision.kept) * in_flight(layout, num_layers, 0))
    trained, held, passing = Parameters(vision.trained), rank.held, rank.passing
    added, host = held_memory(config, layout, trained)
    saved = saved_bytes(config, layout, trained)
    saved += saved_weight_bytes(config, layout, trained) * config.num_kept_weights
    return replace(
        rank,
        vision=vision,
        held=RankMemory(
            held.weights + vision.weights,
            held.gradients + added.gradients,
            held.optimizer + added.optimizer,
        ),
        saved=rank.saved + saved,
        optimizer_host=rank.optimizer_host + host,
        passing=replace(
            passing,
            kept=passing.kept + image_bytes,
            layer=max(passing.layer, vision.activations),
        ),
    )


def _held_by_trainer(config: Config, ranks: tuple[PlannedRank, ...]) -> int:
    """Bytes that the trainer holds on the GPUs of an engine that starts."""
    if not config.cluster.colocate:
        return 0
    if config.offload_train:
        return idle_context(config)
    return idle_context(config) + max(rank.held.total + rank.critic.total for rank in ranks)


def _phases(
    config: Config,
    rank: PlannedRank,
    engine: PlannedEngine | None,
    update: PlannedUpdate | None,
    *,
    most_weights: int = 0,
    exchange: tuple[int, int] = (0, 0),
) -> tuple[MemoryPhase, ...]:
    """The phases of the GPUs that train the policy.

    The export of the weights, and their hash at the end of a run, are listed if they are the peak of
    the trainer.

    Args:
        most_weights: of any rank, because the rank that sends weights may have more of them than
            this one.
        exchange: GPU bytes of an export: its buckets, and its NCCL group.
    """
    phases, beside = _lasting_phases(config, rank, engine, update, most_weights=most_weights)
    held, (buckets, group) = rank.held, exchange
    keeps_gradients = not (config.cluster.colocate and config.offload_train)
    gradients = (held.gradients + rank.critic.gradients) if keeps_gradients else 0
    critic = rank.critic.weights + rank.critic.optimizer
    export = MemoryPhase(
        "export",
        (
            ("weights", held.weights),
            ("gradients", gradients),
            ("optimizer", held.optimizer),
            *((("critic", critic),) if critic else ()),
            *beside,
            ("buffers", buckets),
            ("CUDA, NCCL", rank.context + group),
        ),
    )
    others = [phase.total for phase in phases if phase.name != GENERATE]
    return (*phases, export) if export.total > max(others) else phases


def _exchange(config: Config, shape: Shape, layout: Layout, *, width: int) -> tuple[int, int]:
    """GPU bytes of an export: two buckets with the largest tensor, and NCCL's group."""
    tensors = [shape.vocab * shape.hidden]
    if shape.stacked_experts:
        tensors.append(2 * shape.num_experts * shape.expert_ffn * shape.hidden)
    bucket = min(config.sync.update_weight_buffer_size, SMALLEST)
    return 2 * bucket + width * max(tensors), exchange_group(config, layout)


Parts = tuple[tuple[str, int], ...]
"""What is in memory, and its bytes."""


def _lasting_phases(
    config: Config,
    rank: PlannedRank,
    engine: PlannedEngine | None,
    update: PlannedUpdate | None,
    *,
    most_weights: int,
) -> tuple[tuple[MemoryPhase, ...], Parts]:
    """All phases but the export, and what of the engines is on the GPUs beside it."""
    held = rank.held
    kept = (("weights", held.weights), ("gradients", held.gradients), ("optimizer", held.optimizer))
    critic = (("critic", rank.critic.total),) if rank.critic.total else ()
    context = ("CUDA, NCCL", rank.context)
    at_peak = rank.passing
    if at_peak.logits > at_peak.layer:
        passing = (("activations", at_peak.kept), ("logits", at_peak.logits))
    else:
        passing = (("activations", at_peak.kept + at_peak.layer), ("logits", 0))
    train = (*kept, *critic, *passing, context)
    if engine is None or update is None:
        return (MemoryPhase("train", train),), ()
    if not config.cluster.colocate:
        received = ("buffers", update.engine_bytes)
        return (MemoryPhase("train", train), _generate(engine, (received,))), ()
    buffers = ("buffers", update.gpu_bytes)
    shadow = () if config.offload_train else (*kept, *critic)
    sent = shadow or (("weights", max(most_weights, held.weights)),)
    engine_part = () if config.offload_rollout else (("engine", engine.resident),)
    beside = ("engine's CUDA", engine.context)
    in_sync = engine.weights if config.offload_rollout else engine.resident
    phases = [
        MemoryPhase("train", (*train, beside, *engine_part)),
        MemoryPhase("synchronise", (*sent, ("engine", in_sync), buffers, context, beside)),
        _generate(engine, (*shadow, context)),
    ]
    if config.offload_train and config.checkpoint.save_interval:
        saved = ("optimizer", held.optimizer + rank.critic.optimizer)
        weights = ("weights", held.weights + rank.critic.weights)
        phases.append(MemoryPhase("save", (weights, saved, ("engine", in_sync), context, beside)))
    # Engines keep their memory during a save, unless they release it.
    return tuple(phases), (("engine", in_sync), beside)


def _generate(engine: PlannedEngine, more: tuple[tuple[str, int], ...]) -> MemoryPhase:
    own = (
        ("engine", engine.weights),
        ("KV cache", max(0, engine.kv_cache)),
        ("engine's CUDA", engine.context + engine.graphs),
    )
    return MemoryPhase(GENERATE, (*own, *more))


def _save_buffer(config: Config, rank: PlannedRank) -> int:
    """Host memory of a rank's save: slots are allocated as needed, up to --save-buffer-gb."""
    buffers = 2 if rank.critic.total else 1  # policy and critic have a buffer each
    return min(buffers * config.checkpoint.save_buffer_bytes, rank.saved)


def _host(
    config: Config,
    ranks: tuple[PlannedRank, ...],
    engine: PlannedEngine | None,
) -> int:
    """Return host memory of the fullest node.

    It holds the offloaded optimizer, what is offloaded while engines generate, CUDA graphs while
    the trainer works (SGLang keeps a copy: full_cuda_graph_backend.py), the weights of reference
    and old policy, the features of images, and the buffer of a checkpoint.
    """
    # with adapters the reference is the base, whose weights are on the GPU
    uses_reference = config.lora.lora_rank is None and config.grpo.needs_reference
    copies = uses_reference + config.keeps_old_policy
    each = 0
    for rank in ranks:
        # While a copy computes on the GPU, the policy's own weights are in host memory too.
        held = rank.optimizer_host + (copies + 1 if copies else 0) * rank.held.weights
        if config.offload_train:
            held += rank.held.weights + rank.held.optimizer
            held += rank.critic.weights + rank.critic.optimizer
        held += rank.vision.host + _save_buffer(config, rank)
        each = max(each, held)
    if engine is not None and config.offload_rollout:
        each += engine.graphs
    return each * config.cluster.actor_num_gpus_per_node
