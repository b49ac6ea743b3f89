"""Estimate the memory of each GPU and node in each phase of a run. Pure.

Input: settings, the shape of the model and the memory of a GPU. Output: an ``Estimate``. CUDA and
NCCL are counted by ``nccl_memory``, engines by ``engine_memory``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from rlpost.config.critic_ranks import critic_ranks
from rlpost.config.plan.activations import (
    Activations,
    Pass,
    stage_activations,
)
from rlpost.config.plan.engine_memory import PlannedEngine, planned_engine
from rlpost.config.plan.nccl_memory import idle_context, trainer_context
from rlpost.config.plan.rank_memory import (
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
from rlpost.config.plan.save_interval import written_s
from rlpost.config.plan.shape import (
    Layout,
    Parameters,
    Shape,
    critic_parameters,
    layout_of,
    rank_parameters,
)
from rlpost.config.plan.shortages import cache_problem, phase_problem
from rlpost.config.plan.weight_update import FP8_WIDTH, PlannedUpdate, weight_update
from rlpost.config.tree import Config

RESERVE = 0.95
"""Usable share of a GPU: the caching allocator leaves gaps."""


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
class PlannedCriticRank:
    """A rank of a critic with separate ranks, at its fullest."""

    held: RankMemory
    activations: int
    saved: int
    """Bytes that it writes of a checkpoint."""
    optimizer_host: int
    context: int
    """CUDA and NCCL."""


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
    """Most bytes of a checkpoint that one rank writes, of the policy or of a critic."""
    save_buffer_bytes: int
    """Host memory of a rank that a checkpoint passes through."""
    update: PlannedUpdate | None
    """None without engines."""
    critic: RankMemory
    """Memory of the fullest rank of a critic, separate or beside the policy; zeros without one."""
    critic_checkpoint_bytes: int = 0
    """Bytes of a checkpoint that the separate ranks of a critic write."""

    @property
    def fullest(self) -> PlannedRank:
        """The rank with the highest peak."""
        return max(self.ranks, key=lambda rank: rank.train)

    def written_s(self, write_gbps: float) -> float:
        """Seconds that writing a checkpoint takes."""
        sizes = self.checkpoint_bytes, self.critic_checkpoint_bytes
        return written_s(self.config, *sizes, write_gbps=write_gbps)

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
) -> Estimate:
    """Estimate a run.

    Args:
        config: with a possible layout.
        shape: of the policy.
        gpu_bytes: memory of a GPU.
        engine_width: bytes of a weight in the engines, 1 for FP8.
    """
    layout = layout_of(config)
    one, longest = forward_pass(config)
    ranks = tuple(
        _rank(config, shape, layout, one, stage=stage) for stage in range(layout.pipeline)
    )
    stored = parameter_bytes(config)
    whole = trained_parameters(config, shape, Layout(), 0)
    matrices = muon_matrices(config, shape, Layout(), 0)
    stored_size = saved_bytes(config, Layout(), whole, matrices)
    stored_size += whole.total * stored.weights * config.num_kept_weights
    stored_critic = 0
    if config.use_critic:
        critic = critic_parameters(shape, Layout(), 0)
        stored_critic = saved_bytes(config, Layout(), critic, matrices)
    of_critic = _own_critic(config, shape)
    own_critic = max(of_critic, key=lambda rank: rank.held.total + rank.activations, default=None)
    engine = None
    if config.num_engines:
        engine = planned_engine(
            config,
            shape,
            gpu_bytes=gpu_bytes,
            width=engine_width,
            held=_held_by_trainer(config, ranks, own_critic),
        )
    buffers = [_save_buffer(config, rank) for rank in ranks]
    buffers += [_critic_save_buffer(config, rank) for rank in of_critic]
    saved = [rank.saved for rank in ranks] + [rank.saved for rank in of_critic]
    fullest = max(ranks, key=lambda rank: rank.train)
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
        phases=(
            *_phases(config, fullest, engine, update, own_critic, most_weights=most_weights),
            *_critic_phase(config, own_critic, engine, fullest.context),
        ),
        host_bytes_per_node=_host(config, ranks, own_critic, engine),
        checkpoint_bytes=stored_size + stored_critic,
        checkpoint_bytes_per_rank=max(saved),
        save_buffer_bytes=max(buffers),
        update=update,
        critic=fullest.critic if own_critic is None else own_critic.held,
        critic_checkpoint_bytes=0 if own_critic is None else stored_critic,
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
    critic, of_critic = Parameters(0), RankMemory(0, 0, 0)
    if config.use_critic and not config.has_own_critic:
        critic = critic_parameters(shape, layout, stage)
        of_critic, more = held_memory(config, layout, critic, critic, matrices)
        host += more
    return PlannedRank(
        stage=stage,
        parameters=parameters,
        trained=trained,
        held=held,
        critic=of_critic,
        saved=saved_bytes(config, layout, trained, matrices)
        + saved_bytes(config, layout, critic, matrices)
        + saved_weight_bytes(config, layout, trained) * config.num_kept_weights,
        optimizer_host=host,
        passing=stage_activations(
            shape, layout, one, stage, chunk_tokens=config.grpo.log_probs_chunk_size
        ),
        context=trainer_context(config, layout, shape),
    )


def _held_by_trainer(
    config: Config, ranks: tuple[PlannedRank, ...], own_critic: PlannedCriticRank | None
) -> int:
    """Bytes that the trainer holds on the GPUs of an engine that starts."""
    if not config.cluster.colocate:
        return 0
    processes = 2 if own_critic is not None and config.critic_shares_gpus else 1
    held = processes * idle_context(config)
    if config.offload_train:
        return held
    if processes == 2 and own_critic is not None and not config.offloads_critic:
        held += own_critic.held.total
    return held + max(rank.held.total + rank.critic.total for rank in ranks)


def _phases(
    config: Config,
    rank: PlannedRank,
    engine: PlannedEngine | None,
    update: PlannedUpdate | None,
    own_critic: PlannedCriticRank | None = None,
    *,
    most_weights: int = 0,
) -> tuple[MemoryPhase, ...]:
    """The phases of the GPUs that train the policy.

    Args:
        own_critic: the separate ranks of a critic. On these GPUs its process has a CUDA context,
            and all of its memory unless policy and critic are offloaded for each other.
        most_weights: of any rank, because the rank that sends weights may have more of them than
            this one.
    """
    held = rank.held
    kept = (("weights", held.weights), ("gradients", held.gradients), ("optimizer", held.optimizer))
    resident, computing = rank.critic.total, rank.critic.total
    contexts = rank.context
    if own_critic is not None and config.critic_shares_gpus:
        contexts += own_critic.context
        if not config.offloads_critic:
            resident = own_critic.held.total
            computing = resident + own_critic.activations
    of_critic = (("critic", resident),) if resident else ()
    with_pass = (("critic", computing),) if computing else ()
    context = ("CUDA, NCCL", contexts)
    at_peak = rank.passing
    if at_peak.logits > at_peak.layer:
        passing = (("activations", at_peak.kept), ("logits", at_peak.logits))
    else:
        passing = (("activations", at_peak.kept + at_peak.layer), ("logits", 0))
    train = (*kept, *with_pass, *passing, context)
    if engine is None or update is None:
        return (MemoryPhase("train", train),)
    if not config.cluster.colocate:
        received = ("buffers", update.engine_bytes)
        return (MemoryPhase("train", train), _generate(engine, (received,)))
    buffers = ("buffers", update.gpu_bytes)
    shadow = () if config.offload_train else (*kept, *of_critic)
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
    return tuple(phases)


def _own_critic(config: Config, shape: Shape) -> list[PlannedCriticRank]:
    """The separate ranks of a critic, one for each pipeline stage; empty without one."""
    if not config.has_own_critic:
        return []
    own = critic_ranks(config)
    layout, one = layout_of(own), forward_pass(own)[0]
    ranks = []
    for stage in range(layout.pipeline):
        parameters = critic_parameters(shape, layout, stage)
        matrices = muon_matrices(own, shape, layout, stage)
        held, host = held_memory(own, layout, parameters, parameters, matrices)
        chunk_tokens = own.grpo.log_probs_chunk_size
        passing = stage_activations(shape, layout, one, stage, chunk_tokens=chunk_tokens)
        activations = passing.kept + passing.layer
        written = saved_bytes(own, layout, parameters, matrices)
        context = trainer_context(own, layout, shape)
        ranks.append(PlannedCriticRank(held, activations, written, host, context))
    return ranks


def _critic_phase(
    config: Config,
    rank: PlannedCriticRank | None,
    engine: PlannedEngine | None,
    policy_context: int,
) -> tuple[MemoryPhase, ...]:
    """The memory of GPUs while a separate critic computes; empty if the critic stays resident.

    The GPUs are separate ones, or those of the policy, which is offloaded at that time.
    """
    if rank is None or (config.critic_shares_gpus and not config.offloads_critic):
        return ()
    contexts = rank.context + (policy_context if config.critic_shares_gpus else 0)
    parts = [
        ("weights", rank.held.weights),
        ("gradients", rank.held.gradients),
        ("optimizer", rank.held.optimizer),
        ("activations", rank.activations),
        ("CUDA, NCCL", contexts),
    ]
    if engine is not None and config.critic_shares_gpus and config.cluster.colocate:
        parts.append(("engine's CUDA", engine.context))
        if not config.offload_rollout:
            parts.append(("engine", engine.resident))
    return (MemoryPhase("critic", tuple(parts)),)


def _generate(engine: PlannedEngine, more: tuple[tuple[str, int], ...]) -> MemoryPhase:
    own = (
        ("engine", engine.weights),
        ("KV cache", max(0, engine.kv_cache)),
        ("engine's CUDA", engine.context + engine.graphs),
    )
    return MemoryPhase("generate", (*own, *more))


def _save_buffer(config: Config, rank: PlannedRank) -> int:
    """Host memory of a rank's save: slots are allocated as needed, up to --save-buffer-gb."""
    buffers = 2 if rank.critic.total else 1  # policy and critic have a buffer each
    return min(buffers * config.checkpoint.save_buffer_bytes, rank.saved)


def _host(
    config: Config,
    ranks: tuple[PlannedRank, ...],
    own_critic: PlannedCriticRank | None,
    engine: PlannedEngine | None,
) -> int:
    """Return host memory of the fullest node, a critic on the same GPUs included.

    It holds the offloaded optimizer, what is offloaded while engines generate, CUDA graphs while
    the trainer works (SGLang keeps a copy: full_cuda_graph_backend.py), the weights of reference
    and old policy, and the buffer of a checkpoint.
    """
    # with adapters the reference is the base, whose weights are on the GPU
    uses_reference = config.lora.lora_rank is None and config.grpo.needs_reference
    copies = uses_reference + config.keeps_old_policy
    each = 0
    for rank in ranks:
        # While a copy computes on the GPU, the policy's own weights are in host memory too.
        own = rank.optimizer_host + (copies + 1 if copies else 0) * rank.held.weights
        if config.offload_train:
            own += rank.held.weights + rank.held.optimizer
            own += rank.critic.weights + rank.critic.optimizer
        own += _save_buffer(config, rank)
        each = max(each, own)
    if own_critic is not None and config.critic_shares_gpus:
        each += _critic_host(config, own_critic)
    if engine is not None and config.offload_rollout:
        each += engine.graphs
    return each * config.cluster.actor_num_gpus_per_node


def _critic_host(config: Config, rank: PlannedCriticRank) -> int:
    """Host memory of a critic's rank: offloaded state, and the buffer of a checkpoint."""
    away = rank.held.weights + rank.held.optimizer if config.offloads_critic else 0
    return rank.optimizer_host + away + _critic_save_buffer(config, rank)


def _critic_save_buffer(config: Config, rank: PlannedCriticRank) -> int:
    """Host memory that a checkpoint of a critic's rank passes through."""
    return min(config.checkpoint.save_buffer_bytes, rank.saved)
