"""What a run needs on each GPU and each node in each of its phases. Pure.

Input: settings, the shape of the model and what a GPU has. Output: an ``Estimate``. Precisions:
ZeRO (arXiv 1910.02054, section 3) for weights, gradients and Adam's state, with the state over all
ranks that hold the same weights when the optimizer is distributed; in host memory it takes 16 bytes
a parameter (float32 weight, gradient and two moments:
megatron.core.optimizer.cpu_offloading.HybridDeviceOptimizer). SGLang fills ``mem_fraction_static``
of a GPU with weights and KV cache. What CUDA and NCCL take for themselves is an allowance, not a
sum: ``TRAINER_CONTEXT`` and ``ENGINE_CONTEXT``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from rlpost.config.critic_ranks import critic_ranks
from rlpost.config.plan.activations import Pass, logits_bytes, stage_bytes, transient_bytes
from rlpost.config.plan.adapters import adapter_parameters
from rlpost.config.plan.engine_weights import engine_weights, replicas
from rlpost.config.plan.shape import (
    Layout,
    Parameters,
    Shape,
    critic_parameters,
    layout_of,
    rank_parameters,
    teacher_layout,
)
from rlpost.config.plan.weight_update import FP8_WIDTH, WeightUpdate, weight_update
from rlpost.config.tree import Config

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
HOST_BYTES = 16
TRAINER_CONTEXT = 3 * 10**9
ENGINE_CONTEXT = 3 * 10**9
RESERVE = 0.95
"""Part of a GPU that sums may fill: the caching allocator does not give back every gap."""
MEM_FRACTION = 0.85
"""Where the recipe leaves the choice to SGLang, which takes something like it."""
PROMPT_TOKENS = 1024
"""Longest prompt where the settings do not bound it."""


class Sizes(TypedDict):
    """Arguments of ``estimate`` besides settings and shape."""

    gpu_bytes: int
    engine_width: int
    teacher: Shape | None


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of a parameter, or of all that a rank holds."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True, slots=True)
class Rank:
    """The rank of a pipeline stage at its fullest; bytes on its GPU but for ``optimizer_host``."""

    stage: int
    parameters: Parameters
    trained: Parameters
    """With adapters these alone, in addition to ``parameters``; otherwise the same."""
    held: RankMemory
    critic: RankMemory
    """Of a critic beside the policy; zeros without one."""
    saved: int
    """What it writes of a checkpoint."""
    optimizer_host: int
    activations: int
    logits: int
    teacher: int = 0
    """Weights of a teacher in the trainer: in host memory, and on the GPU during its pass."""
    teacher_pass: int = 0
    """What its pass takes beside them."""

    @property
    def train(self) -> int:
        """Peak of forward and backward."""
        held = self.held.total + self.critic.total
        return held + self.activations + self.logits + TRAINER_CONTEXT


@dataclass(frozen=True, slots=True)
class Engine:
    """One GPU of an engine."""

    weights: int
    kv_cache: int
    kv_bytes_per_token: float
    kv_tokens: int
    """Tokens of all the requests of an engine that fit."""

    @property
    def generate(self) -> int:
        return self.weights + max(0, self.kv_cache) + ENGINE_CONTEXT


@dataclass(frozen=True, slots=True)
class Phase:
    """What a GPU holds in a phase, by name."""

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
    ranks: tuple[Rank, ...]
    engine: Engine | None
    phases: tuple[Phase, ...]
    host_bytes_per_node: int
    checkpoint_bytes: int
    checkpoint_bytes_per_rank: int
    """What the rank that writes most writes of a checkpoint."""
    save_buffer_bytes: int
    """Host memory of a rank that a checkpoint passes through."""
    update: WeightUpdate | None
    """None without engines."""

    @property
    def fullest(self) -> Rank:
        """The rank with the highest peak."""
        return max(self.ranks, key=lambda rank: rank.train)

    @property
    def problems(self) -> tuple[str, ...]:
        """What does not fit, a line each."""
        limit = self.gpu_bytes * RESERVE
        found = [
            f"{phase.name}: {phase.total / 1e9:.1f} GB of the {limit / 1e9:.1f} GB that a GPU of "
            f"{self.gpu_bytes / 1e9:.0f} GB has for it"
            for phase in self.phases
            if phase.total > limit
        ]
        engine = self.engine
        if engine is not None and engine.kv_tokens < self.longest:
            found.append(
                f"generate: beside {engine.weights / 1e9:.1f} GB of weights the KV cache of an engine holds "
                f"{max(0, engine.kv_tokens)} tokens, and one answer may have {self.longest}"
            )
        return tuple(found)


def parameter_bytes(config: Config) -> RankMemory:
    """Bytes of one parameter on a GPU, wherever its optimizer's state lies: in bfloat16 there is a
    main weight in float32 beside Adam's two moments, in float32 there are the moments alone.
    """
    # the default on a GPU
    given, narrow = (
        config.optimizer,
        config.perf.bf16 is not False,
    )
    moments = DTYPE_BYTES[given.exp_avg_dtype] + DTYPE_BYTES[given.exp_avg_sq_dtype]
    return RankMemory(
        weights=2 if narrow else 4,
        gradients=2 if narrow and not config.perf.accumulate_allreduce_grads_in_fp32 else 4,
        optimizer=moments + (DTYPE_BYTES[given.main_params_dtype] if narrow else 0),
    )


def trained_parameters(config: Config, shape: Shape, layout: Layout, stage: int) -> Parameters:
    """What a rank of a pipeline stage trains: everything, or adapters."""
    if config.lora.lora_rank is None:
        return rank_parameters(shape, layout, stage)
    return adapter_parameters(config.lora, shape, layout, stage)


def held_memory(
    config: Config, layout: Layout, parameters: Parameters, trained: Parameters | None = None
) -> tuple[RankMemory, int]:
    """Weights, gradients and optimizer of a rank with this number of parameters, and the optimizer's bytes
    in host memory.

    With adapters, ``trained``, the parameters have neither gradients nor optimizer.
    """
    each = parameter_bytes(config)
    has_adapters = config.lora.lora_rank is not None and trained is not None
    frozen = parameters.total if has_adapters else 0
    parameters = trained if has_adapters and trained is not None else parameters
    shards = (
        (parameters.dense, layout.world // (layout.tensor * layout.pipeline)),
        (
            parameters.expert,
            layout.world // (layout.expert_tensor * layout.expert * layout.pipeline),
        ),
    )
    spread = config.perf.use_distributed_optimizer
    state = sum(-(-count // (ranks if spread else 1)) for count, ranks in shards if count)
    away = (
        config.optimizer.optimizer_offload_fraction
        if config.optimizer.optimizer_cpu_offload
        else 0.0
    )
    total = parameters.total
    on_gpu = RankMemory(
        (frozen + total) * each.weights,
        total * each.gradients,
        round(state * each.optimizer * (1 - away)),
    )
    return on_gpu, round(state * HOST_BYTES * away)


def fullest_held(config: Config, shape: Shape) -> RankMemory:
    """Weights, gradients and optimizer of the rank that has most of them."""
    layout = layout_of(config)
    stages = [
        held_memory(
            config,
            layout,
            rank_parameters(shape, layout, stage),
            trained_parameters(config, shape, layout, stage),
        )[0]
        for stage in range(layout.pipeline)
    ]
    return max(stages, key=lambda held: held.total)


def forward_pass(config: Config) -> tuple[Pass, int]:
    """The largest micro-batch of a rank, and the longest sample: a sample beyond the limit is alone
    in its own.
    """
    perf, rollout = config.perf, config.rollout
    longest = rollout.rollout_max_context_len or (
        (rollout.rollout_max_prompt_len or PROMPT_TOKENS) + rollout.rollout_max_response_len
    )
    whole = config.max_tokens or perf.micro_batch_size * longest
    tokens = -(-max(whole, longest) // perf.context_parallel_size)
    one = Pass(
        tokens=tokens,
        width=parameter_bytes(config).weights,
        fused=perf.transformer_impl != "local",
        recompute=perf.recompute_granularity,
        method=perf.recompute_method,
        num_recomputed=perf.recompute_num_layers or 1,
    )
    return one, longest


def estimate(
    config: Config,
    shape: Shape,
    *,
    gpu_bytes: int,
    engine_width: int = 2,
    teacher: Shape | None = None,
) -> Estimate:
    """All sums.

    Args:
        config: with a possible layout.
        shape: of the policy.
        gpu_bytes: memory of a GPU.
        engine_width: bytes of a weight in the engines, 1 for FP8.
        teacher: shape of a teacher in the trainer; None without one.
    """
    layout = layout_of(config)
    one, longest = forward_pass(config)
    ranks = tuple(
        _rank(config, shape, layout, one, stage=stage, teacher=teacher)
        for stage in range(layout.pipeline)
    )
    engine = (
        _engine(config, shape, gpu_bytes=gpu_bytes, width=engine_width)
        if config.num_engines
        else None
    )
    stored = parameter_bytes(config)
    state = 0 if config.checkpoint.no_save_optim else stored.optimizer
    total = trained_parameters(config, shape, Layout(), 0).total
    kept = total * stored.weights * config.num_kept_weights
    if config.use_critic:
        total += critic_parameters(shape, Layout(), 0).total
    fullest = max(ranks, key=lambda rank: rank.train)
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
            *_phases(config, fullest, engine, update),
            *_teacher_phase(config, ranks, engine, update),
            *_critic_phase(config, shape),
        ),
        host_bytes_per_node=_host(config, ranks),
        checkpoint_bytes=total * (stored.weights + state) + kept,
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
    teacher: Shape | None = None,
) -> Rank:
    parameters = rank_parameters(shape, layout, stage)
    trained = trained_parameters(config, shape, layout, stage)
    held, host = held_memory(config, layout, parameters, trained)
    critic, of_critic = Parameters(0), RankMemory(0, 0, 0)
    if config.use_critic and not config.has_own_critic:
        critic = critic_parameters(shape, layout, stage)
        of_critic, more = held_memory(config, layout, critic, critic)
        host += more
    is_last = stage == layout.pipeline - 1
    of_teacher, passing = 0, 0
    if teacher is not None:
        own = teacher_layout(config, layout)
        of_teacher = rank_parameters(teacher, own, stage).total * parameter_bytes(config).weights
        logits = logits_bytes(teacher, own, one, config.grpo.log_probs_chunk_size)
        passing = transient_bytes(teacher, own, one) + (logits if is_last else 0)
    return Rank(
        stage=stage,
        parameters=parameters,
        trained=trained,
        held=held,
        critic=of_critic,
        saved=_saved(config, layout, trained)
        + _saved(config, layout, critic)
        + _saved_weights(config, layout, trained) * config.num_kept_weights,
        optimizer_host=host,
        activations=stage_bytes(shape, layout, one, stage) + transient_bytes(shape, layout, one),
        logits=logits_bytes(shape, layout, one, config.grpo.log_probs_chunk_size) if is_last else 0,
        teacher=of_teacher,
        teacher_pass=passing,
    )


def _engine(config: Config, shape: Shape, *, gpu_bytes: int, width: int) -> Engine:
    copies, weights = replicas(config), engine_weights(config, shape, width)
    fraction = float(config.sglang.server_args.get("mem_fraction_static", MEM_FRACTION))
    heads = max(1.0, shape.groups * copies / config.cluster.rollout_num_gpus_per_engine)
    per_token = 2 * shape.num_layers * heads * shape.head_dim * 2
    if shape.latent is not None:  # one narrow vector for all heads, on each GPU
        per_token = 2 * shape.num_layers * (shape.latent.kv_rank + shape.latent.position)
    cache = int(fraction * gpu_bytes) - weights
    return Engine(weights, cache, per_token, int(cache / per_token) * copies)


def _phases(
    config: Config, rank: Rank, engine: Engine | None, update: WeightUpdate | None
) -> tuple[Phase, ...]:
    held = rank.held
    kept = (("weights", held.weights), ("gradients", held.gradients), ("optimizer", held.optimizer))
    of_critic = (("critic", rank.critic.total),) if rank.critic.total else ()
    context = ("CUDA, NCCL", TRAINER_CONTEXT)
    passing = (("activations", rank.activations), ("logits", rank.logits))
    if engine is None or update is None or not config.cluster.colocate:
        alone = () if engine is None else (_generate(engine, ()),)
        return (Phase("train", (*kept, *of_critic, *passing, context)), *alone)
    buffers = ("buffers", update.gpu_bytes)
    shadow = () if config.offload_train else (*kept, *of_critic)
    there = (
        () if config.offload_rollout else (("engine", engine.weights + max(0, engine.kv_cache)),)
    )
    beside = ("engine's CUDA", ENGINE_CONTEXT)
    return (
        Phase("train", (*kept, *of_critic, *passing, context, beside, *there)),
        Phase(
            "synchronise",
            (("weights", held.weights), ("engine", engine.weights), buffers, context, beside),
        ),
        _generate(engine, (*shadow, context)),
    )


def _critic_phase(config: Config, shape: Shape) -> tuple[Phase, ...]:
    """What the GPUs of a critic hold that has its own; nothing without."""
    if not config.has_own_critic:
        return ()
    own = critic_ranks(config)
    layout, one = layout_of(own), forward_pass(own)[0]
    phases = []
    for stage in range(layout.pipeline):
        parameters = critic_parameters(shape, layout, stage)
        held, _ = held_memory(own, layout, parameters, parameters)
        activations = stage_bytes(shape, layout, one, stage) + transient_bytes(shape, layout, one)
        parts = (
            ("weights", held.weights),
            ("gradients", held.gradients),
            ("optimizer", held.optimizer),
            ("activations", activations),
            ("CUDA, NCCL", TRAINER_CONTEXT),
        )
        phases.append(Phase("critic", parts))
    return (max(phases, key=lambda phase: phase.total),)


def _teacher_phase(
    config: Config, ranks: tuple[Rank, ...], engine: Engine | None, update: WeightUpdate | None
) -> tuple[Phase, ...]:
    """The pass of a teacher in the trainer, on the rank where it takes most; nothing without one."""
    rank = max(ranks, key=lambda rank: rank.held.total + rank.teacher + rank.teacher_pass)
    if not rank.teacher:
        return ()
    train = _phases(config, rank, engine, update)[0]
    kept = (part for part in train.parts if part[0] not in ("activations", "logits"))
    own = (("teacher", rank.teacher), ("its pass", rank.teacher_pass))
    return (Phase("teacher", (*kept, *own)),)


def _generate(engine: Engine, more: tuple[tuple[str, int], ...]) -> Phase:
    own = (
        ("engine", engine.weights),
        ("KV cache", max(0, engine.kv_cache)),
        ("engine's CUDA", ENGINE_CONTEXT),
    )
    return Phase("generate", (*own, *more))


def _saved_weights(config: Config, layout: Layout, parameters: Parameters) -> int:
    """Bytes of weights that a rank writes: its share of what data-parallel ranks hold too."""
    return _share(layout, parameters) * parameter_bytes(config).weights


def _saved(config: Config, layout: Layout, parameters: Parameters) -> int:
    """The same with the state of the optimizer."""
    state = 0 if config.checkpoint.no_save_optim else parameter_bytes(config).optimizer
    return _saved_weights(config, layout, parameters) + _share(layout, parameters) * state


def _share(layout: Layout, parameters: Parameters) -> int:
    """Parameters that a rank writes."""
    dense = layout.world // (layout.tensor * layout.pipeline)
    expert = layout.world // (layout.expert_tensor * layout.expert * layout.pipeline)
    return -(-parameters.dense // dense) + (
        -(-parameters.expert // expert) if parameters.expert else 0
    )


def _save_buffer(config: Config, rank: Rank) -> int:
    """Slots of host memory are made as they are needed, so a small state takes less than
    --save-buffer-gb. Policy and critic have a buffer each.
    """
    buffers = 2 if rank.critic.total else 1
    return min(buffers * int(config.checkpoint.save_buffer_gb * 1e9), rank.saved)


def _host(config: Config, ranks: tuple[Rank, ...]) -> int:
    """The fullest node: offloaded optimizer, what leaves the GPU while engines generate, the weights
    of the reference and of the old policy with the policy's own beside them while these compute, a
    teacher's weights, and the buffer of a checkpoint.
    """
    # with adapters the reference is the base, whose weights are on the GPU
    uses_reference = config.lora.lora_rank is None and (
        config.grpo.use_kl_loss or config.grpo.kl_coef > 0
    )
    copies = uses_reference + config.keeps_old_policy
    each = 0
    for rank in ranks:
        own = rank.optimizer_host + (copies + 1 if copies else 0) * rank.held.weights
        if config.offload_train:
            own += rank.held.weights + rank.held.optimizer
            own += rank.critic.weights + rank.critic.optimizer
        own += rank.teacher + _save_buffer(config, rank)
        each = max(each, own)
    return each * config.cluster.actor_num_gpus_per_node
