"""Keys of NeMo-RL's ``policy.megatron_cfg``. Pure data."""

from __future__ import annotations

from dataclasses import replace

from rlpost.config.flags import fields
from rlpost.extensions.importing.peers.common import as_is, megatron_option, optimizer_steps
from rlpost.extensions.importing.peers.nemo_rl_keys import (
    MEGATRON,
    adapters,
    recompute,
    steps_per_rollout,
)
from rlpost.extensions.importing.peers.row import (
    Convert,
    Given,
    Needless,
    Row,
    Settings,
    below,
    lacking,
    needless,
    row,
    same,
    when,
)

_OFF_MEGATRON = "megatron_cfg is off"


def _megatron(convert: Convert) -> Convert:
    return when(MEGATRON + "enabled", True, _OFF_MEGATRON, convert)


def _option(it: Given) -> Settings:
    name = it.tail
    if name in ("bf16", "fp16", "params_dtype", "sgd_momentum"):
        raise Needless("the type of weights is --bf16, and the optimizer Adam or Muon")
    if name in ("optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d") and not same(
        it.look(MEGATRON + "optimizer.optimizer_cpu_offload"), True
    ):
        raise Needless("optimizer_cpu_offload is off")
    return {name: it.value} if name in fields() else megatron_option(it)


def _changing_decay(setting: str) -> Convert:
    def convert(it: Given) -> Settings:
        if it.look(MEGATRON + "scheduler.weight_decay_incr_style") in ("constant", None):
            raise Needless("the weight decay is constant")
        return {setting: it.value}

    return convert


def _mtp(it: Given) -> Settings:
    if not it.look(MEGATRON + "mtp_num_layers"):
        raise Needless("there are no layers for multi-token prediction")
    return megatron_option(replace(it, tail=f"mtp_{it.tail}"))


def _fp8(it: Given) -> Settings:
    if not same(it.look(MEGATRON + "fp8_cfg.enabled"), True):
        raise Needless("fp8_cfg is off")
    return megatron_option(it)


_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


MEGATRON_ROWS: tuple[Row, ...] = (
    needless(MEGATRON + "enabled", "the trainer is Megatron-core", default=False),
    *(row(MEGATRON + name, name, _megatron(as_is(name)), default=1) for name in _SIZES),
    row(MEGATRON + "sequence_parallel", "sequence_parallel", _megatron(as_is("sequence_parallel"))),
    row(
        MEGATRON + "activation_checkpointing",
        "recompute_granularity recompute_method recompute_num_layers",
        _megatron(recompute),
    ),
    needless(MEGATRON + "recompute_granularity", "see activation_checkpointing", default="full"),
    needless(
        MEGATRON + "recompute_modules",
        "of selective recomputation",
        None,
        ["core_attn"],
        instead="--recompute-granularity selective is attention's",
    ),
    lacking(
        MEGATRON + "freeze_moe_router",
        r"with experts: --freeze-params-name-list '\.router\.'",
        False,
    ),
    lacking(MEGATRON + "env_vars " + MEGATRON + "env_vars.*", "use --environment NAME=VALUE", None),
    lacking(MEGATRON + "cuda_graph_impl", "training has no CUDA graphs", "none"),
    lacking(MEGATRON + "fine_grained_activation_offloading", "use --recompute-granularity", False),
    lacking(
        MEGATRON + "model_overrides " + MEGATRON + "model_overrides.*",
        "options of Megatron-core: the table [megatron]",
        None,
        {},
    ),
    row(MEGATRON + "mtp_*", "", _megatron(_mtp), note="with mtp_num_layers"),
    needless(MEGATRON + "pipeline_dtype", "that of the weights"),
    needless(
        below(
            MEGATRON,
            "checkpoint.* force_reconvert_from_hf empty_unused_memory_level "
            "use_gloo_process_groups use_fused_linear_logprobs "
            "fused_linear_logprobs_chunk_size cuda_graph_modules "
            "cuda_graph_warmup_steps offload_modules defer_fp32_logits "
            "use_fused_weighted_squared_relu converter_type moe_per_layer_logging",
        ),
        "rlpost has its own way, or none is needed",
    ),
    *adapters(MEGATRON + "peft."),
    row(MEGATRON + "optimizer.*", "", _megatron(_option), note="the setting of that name"),
    *(
        row(
            MEGATRON + f"scheduler.{name}",
            name,
            _megatron(optimizer_steps(name, steps_per_rollout)),
            note="rollouts there, optimizer steps here",
        )
        for name in ("lr_decay_iters", "lr_warmup_iters")
    ),
    *(
        row(MEGATRON + f"scheduler.{name}", name, _megatron(_changing_decay(name)))
        for name in ("start_weight_decay", "end_weight_decay")
    ),
    row(MEGATRON + "scheduler.*", "", _megatron(_option), note="the setting of that name"),
    lacking(
        MEGATRON + "distributed_data_parallel_config.use_custom_fsdp",
        "the trainer has the distributed optimizer of Megatron-core",
        False,
    ),
    needless(
        MEGATRON + "distributed_data_parallel_config.data_parallel_sharding_strategy", "of FSDP"
    ),
    row(
        MEGATRON + "distributed_data_parallel_config.*",
        "",
        _megatron(_option),
        note="the option of Megatron-core of that name",
    ),
    needless(MEGATRON + "fp8_cfg.enabled", "its other keys are options of Megatron-core"),
    row(MEGATRON + "fp8_cfg.*", "", _megatron(_fp8), note="with fp8_cfg.enabled"),
    row(
        MEGATRON + "*",
        "",
        _megatron(megatron_option),
        note="the option of Megatron-core of that name",
    ),
)
