"""Bytes that a rank holds and writes for its parameters, and its largest micro-batch. Pure.

Input: settings, the shape of the model, a layout. Output: bytes. Precisions: ZeRO (arXiv
1910.02054, section 3) for weights, gradients and Adam's state, with the state over all ranks that
hold the same weights when the optimizer is distributed; in host memory it takes 16 bytes a
parameter (float32 weight, gradient and two moments:
megatron.core.optimizer.cpu_offloading.HybridDeviceOptimizer). Muon keeps no second moment of a
matrix (``rlpost/trainer/muon.py``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from common.units import size_text
from rlpost.algorithm.schedule import KEY_SHARE
from rlpost.config.flags import flag
from rlpost.config.plan.shape import (
    Layout,
    Parameters,
    Shape,
    layout_of,
    rank_parameters,
)
from rlpost.config.plan.vision import longest_sample
from rlpost.config.tree import Config
from rlpost.extensions.planning.activations import Pass
from rlpost.extensions.planning.adapters import adapter_parameters
from rlpost.extensions.planning.counts import matrix_parameters, parameters_of_stage

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
HOST_BYTES = 16
FP8_COPIES = 2
"""Bytes of a parameter's copies in FP8, by rows and by columns.

TransformerEngine keeps them until the weights change (``get_weight_workspace``).
"""
NONE = Parameters(0)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of a parameter, or of all that a rank holds."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def parameter_bytes(config: Config) -> RankMemory:
    """Bytes per parameter on a GPU; bfloat16 adds a float32 weight to Adam's two moments."""
    given = config.optimizer
    narrow = config.perf.bf16 is not False  # the default on a GPU
    moments = DTYPE_BYTES[given.exp_avg_dtype] + DTYPE_BYTES[given.exp_avg_sq_dtype]
    return RankMemory(
        weights=2 if narrow else 4,
        gradients=2 if narrow and not config.perf.accumulate_allreduce_grads_in_fp32 else 4,
        optimizer=moments + (DTYPE_BYTES[given.main_params_dtype] if narrow else 0),
    )


def trained_parameters(config: Config, shape: Shape, layout: Layout, stage: int) -> Parameters:
    """The parameters that a rank of a pipeline stage trains: all, or adapters."""
    if config.lora.lora_rank is None:
        return rank_parameters(shape, layout, stage)
    return adapter_parameters(config.lora, shape, layout, stage)


def muon_matrices(config: Config, shape: Shape, layout: Layout, stage: int) -> Parameters:
    """The parameters that a rank of a pipeline stage updates with Muon; none with Adam."""
    if config.optimizer.optimizer != "muon":
        return NONE
    return matrix_parameters(shape, layout, stage)


def frozen_note(config: Config) -> str | None:
    """A note where weights are frozen by name, which are counted as trained; None if there is none."""
    given = config.optimizer
    names = ("only_train_params_name_list", "freeze_params_name_list")
    flags = [flag(name) for name in names if getattr(given, name)]
    if not flags:
        return None
    return (
        f"{', '.join(flags)}: all weights are counted as trained, so that gradients, optimizer and "
        "checkpoint are upper bounds; rlpost rehearse counts the weights that are trained"
    )


def held_memory(
    config: Config,
    layout: Layout,
    parameters: Parameters,
    trained: Parameters | None = None,
    matrices: Parameters = NONE,
) -> tuple[RankMemory, int]:
    """Weights, gradients and optimizer of a rank, and the optimizer's bytes in host memory.

    Args:
        config: the settings.
        layout: of the ranks.
        parameters: of the rank.
        trained: with adapters these alone have gradients and optimizer.
        matrices: the parameters without a second moment, whose optimizer is not distributed.
    """
    each = parameter_bytes(config)
    copies = FP8_COPIES if config.megatron.options.get("fp8") else 0
    frozen, float32 = 0, parameters.float32
    if config.lora.lora_rank is not None and trained is not None:
        frozen, parameters = parameters.total, trained
    state = parameters.total
    if config.perf.use_distributed_optimizer:
        state = _share(layout, parameters)
    away = 0.0
    if config.optimizer.optimizer_cpu_offload:
        away = config.optimizer.optimizer_offload_fraction
    total = parameters.total
    moment = DTYPE_BYTES[config.optimizer.exp_avg_sq_dtype]
    on_gpu = RankMemory(
        (frozen + total) * (each.weights + copies) + float32 * (4 - each.weights),
        total * each.gradients + parameters.float32 * (4 - each.gradients),
        round((state * each.optimizer - matrices.total * moment) * (1 - away)),
    )
    return on_gpu, round(state * HOST_BYTES * away)


def pinned_rounding(config: Config, shape: Shape, layout: Layout, stage: int) -> int:
    """Host memory that torch adds to the gradients of an optimizer in host memory.

    Megatron-core allocates a pinned float32 gradient for each parameter
    (``HybridDeviceOptimizer._set_sub_optimizer_grads``), and torch rounds each up to a power of two.
    A distributed optimizer shards whole parameters but for the ends of a share.
    """
    if not config.optimizer.optimizer_cpu_offload or config.lora.lora_rank is not None:
        return 0
    ranks = layout.world // layout.pipeline
    dense, experts = ranks // layout.tensor, ranks // (layout.expert_tensor * layout.expert)
    if not config.perf.use_distributed_optimizer:
        dense = experts = 1
    added = 0
    for elements, count, is_expert in parameters_of_stage(shape, layout, stage):
        wasted = (1 << (4 * elements - 1).bit_length()) - 4 * elements
        added += wasted * count // (experts if is_expert else dense)
    return round(added * config.optimizer.optimizer_offload_fraction)


def fullest_held(config: Config, shape: Shape) -> RankMemory:
    """Weights, gradients and optimizer of the rank that has most of them."""
    layout = layout_of(config)
    stages = [
        held_memory(
            config,
            layout,
            rank_parameters(shape, layout, stage),
            trained_parameters(config, shape, layout, stage),
            muon_matrices(config, shape, layout, stage),
        )[0]
        for stage in range(layout.pipeline)
    ]
    return max(stages, key=lambda held: held.total)


def forward_pass(config: Config, *, with_engine: bool = True) -> tuple[Pass, int]:
    """The largest micro-batch of a rank, and the longest sample, which may exceed the limit.

    ``with_engine``: TransformerEngine is installed; a run with adapters has other layers.
    """
    perf, longest = config.perf, longest_sample(config)
    whole = config.max_tokens or _rows_of_samples(config, longest)
    multiple = config.row_multiple
    padded = -(-max(whole, longest) // multiple) * multiple
    tokens = padded // perf.context_parallel_size
    one = Pass(
        tokens=tokens,
        width=parameter_bytes(config).weights,
        fused=with_engine and config.lora.lora_rank is None,
        recompute=perf.recompute_granularity,
        method=perf.recompute_method,
        num_recomputed=perf.recompute_num_layers or 1,
    )
    return one, longest


def _rows_of_samples(config: Config, longest: int) -> int:
    """Return the rows of --micro-batch-size samples of ``longest`` tokens.

    With --share-prefix: consecutive samples, which have at most two prompts.
    """
    number, rollout = config.perf.micro_batch_size, config.rollout
    rows = number * longest
    is_consecutive = number <= rollout.n_samples_per_prompt and not config.perf.balance_data
    if not (config.perf.share_prefix and is_consecutive) or config.answers_are_episodes:
        return rows
    prompt = max(0, longest - rollout.rollout_max_response_len)
    return rows - math.floor((1 - KEY_SHARE) * max(0, number - 2) * prompt)


def saved_weight_bytes(config: Config, layout: Layout, parameters: Parameters) -> int:
    """Bytes of weights that a rank writes: its share of what data-parallel ranks hold too."""
    return _share(layout, parameters) * parameter_bytes(config).weights


def saved_bytes(
    config: Config, layout: Layout, parameters: Parameters, matrices: Parameters = NONE
) -> int:
    """The same with the state of the optimizer; ``matrices`` have no second moment."""
    weights = saved_weight_bytes(config, layout, parameters)
    if config.checkpoint.no_save_optim or not parameters.total:
        return weights
    state = _share(layout, parameters) * parameter_bytes(config).optimizer
    absent = _share(layout, matrices) * DTYPE_BYTES[config.optimizer.exp_avg_sq_dtype]
    return weights + state - absent


def _share(layout: Layout, parameters: Parameters) -> int:
    """A rank's share of parameters that are sharded over all ranks that hold the same ones."""
    stage = layout.world // layout.pipeline
    dense = -(-parameters.dense // (stage // layout.tensor))
    if not parameters.expert:
        return dense
    return dense + -(-parameters.expert // (stage // (layout.expert_tensor * layout.expert)))


def is_only_measured(config: Config) -> bool:
    """Whether a reference is kept although no gradient and no advantage depends on it.

    With ``--use-kl-loss`` and ``--kl-loss-coef 0``, as in slime, ``train/ref_kl`` is measured.
    """
    grpo = config.grpo
    is_ours = grpo.loss_type == "policy_loss"  # a custom loss may read the reference's log-probs
    return is_ours and grpo.use_kl_loss and grpo.kl_loss_coef == 0 and grpo.kl_coef == 0


def training_share(config: Config) -> float:
    """The reference's share of the passes; a backward pass counts as two forward passes."""
    passes = (
        3.0 + (config.perf.recompute_granularity == "full") + (config.num_steps_per_rollout > 1)
    )
    return 1.0 / (passes + 1.0)


def host_bytes(config: Config, shape: Shape) -> int:
    """Host memory per node: its weights, and the policy's while the reference computes."""
    return 2 * fullest_held(config, shape).weights * config.cluster.actor_num_gpus_per_node


def reference_note(config: Config, shape: Shape | None) -> str | None:
    """The note for the user; None where the reference counts or there is none."""
    if not is_only_measured(config):
        return None
    memory = f" and {size_text(host_bytes(config, shape))} of host memory a node" if shape else ""
    return (
        "--use-kl-loss with --kl-loss-coef 0 (and --kl-coef 0) only measures train/ref_kl: that takes about "
        f"{training_share(config):.0%} of the training time{memory}; --use-kl-loss no saves both"
    )


def notes_of(config: Config, shape: Shape) -> list[str]:
    """All notes beside a plan."""
    encoder = None
    if shape.lacks_encoder:
        encoder = (
            "engines also load the model's encoder of images, whose size this plan does not count: "
            "less memory is left for the KV cache"
        )
    return [note for note in (reference_note(config, shape), frozen_note(config), encoder) if note]
