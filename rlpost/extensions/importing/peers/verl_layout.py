"""Keys of verl's model, reference and Megatron layout. Pure data."""

from __future__ import annotations

from rlpost.extensions.importing.peers.common import (
    RECOMPUTE_ALL,
    hf_override,
    lora_targets,
    megatron_option,
    model,
    rank_of_adapters,
    text,
)
from rlpost.extensions.importing.peers.row import (
    Convert,
    Given,
    Needless,
    NotHere,
    Row,
    Settings,
    lacking,
    needless,
    row,
    same,
    when,
)
from rlpost.extensions.importing.peers.verl_keys import (
    ACTOR,
    ENGINE,
    LAYOUT,
    MEGATRON,
    MODEL,
    numeric,
    trains_adapters,
)


def _recompute(it: Given) -> Settings:
    if it.look(ACTOR + "strategy") == "megatron" or it.look("model_engine") == "megatron":
        raise Needless("of FSDP; override_transformer_config decides")
    if not same(it.value, True):
        raise Needless("off, as here")
    return {**RECOMPUTE_ALL}


def _sequence_parallel(it: Given) -> Settings:
    size = it.look(MEGATRON + "tensor_model_parallel_size")
    if not isinstance(size, int) or size < 2:
        raise Needless("without tensor parallelism it has no effect")
    return {"sequence_parallel": it.value}


def _of_actor(it: Given) -> Settings:
    other = it.look(MEGATRON + it.tail)
    if same(it.value, other) or it.value is None:
        raise Needless("the reference runs on the policy's ranks, with its layout")
    raise NotHere("the reference has the policy's layout")


def _dist_checkpoint(it: Given) -> Settings:
    if it.value is None or not same(it.look(MEGATRON + "use_dist_checkpointing"), True):
        raise Needless("use_dist_checkpointing is off")
    return {"ref_load": text(it)}


def _lora(setting: str, convert: Convert) -> Convert:
    def checked(it: Given) -> Settings:
        if not trains_adapters(it):
            raise Needless("adapters are off")
        return convert(it)

    return checked


_SIZES = " ".join(
    f"{MEGATRON}{name}"
    for name in (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
    )
)


_MEGATRON: tuple[Row, ...] = (
    *(
        row(key, key.removeprefix(MEGATRON), default=None if "expert_tensor" in key else 1)
        for key in _SIZES.split()
    ),
    lacking(
        MEGATRON + "virtual_pipeline_model_parallel_size",
        "stages there, layers here: --num-layers-per-virtual-pipeline-stage is the model's "
        "layers / (pipeline size x this)",
        None,
        1,
    ),
    row(MEGATRON + "sequence_parallel", "sequence_parallel", _sequence_parallel, default=True),
    row(MEGATRON + "use_distributed_optimizer", "use_distributed_optimizer"),
    row(MEGATRON + "seed " + ACTOR + "fsdp_config.seed", "seed"),
    row(
        MEGATRON + "override_transformer_config.*",
        "",
        megatron_option,
        note="the option of Megatron-core of that name",
    ),
    row(
        MEGATRON + "override_ddp_config.*",
        "",
        megatron_option,
        note="the option of Megatron-core of that name",
    ),
    needless(
        MEGATRON + "override_transformer_config.recompute_modules",
        "of selective recomputation",
        ["core_attn"],
        None,
        instead="--recompute-granularity selective is attention's",
    ),
    needless(MEGATRON + "override_*", "see its keys", None, {}),
    row(MEGATRON + "dist_checkpointing_path", "ref_load", _dist_checkpoint, note="torch_dist"),
    needless(MEGATRON + "use_dist_checkpointing", "the folder of --ref-load decides"),
    needless(
        MEGATRON
        + "use_mbridge "
        + MEGATRON
        + "vanilla_mbridge "
        + MEGATRON
        + "dist_checkpointing_prefix "
        + MEGATRON
        + "dist_ckpt_* "
        + MEGATRON
        + "distrib_*",
        "rlpost reads Hugging Face and torch_dist folders itself",
    ),
    lacking(MEGATRON + "use_megatron_fsdp", LAYOUT, False),
    lacking(
        MEGATRON + "dynamic_context_parallel " + MEGATRON + "max_seqlen_per_dp_cp_rank",
        "the context-parallel size is fixed",
        False,
        None,
    ),
    needless(
        MEGATRON + "dtype " + ACTOR + "fsdp_config.dtype",
        "bfloat16 on GPUs",
        "bfloat16",
        instead="use --bf16 true or false",
    ),
    needless(MEGATRON + "forward_only", "of verl's own workers"),
)


_REFERENCE: tuple[Row, ...] = (
    row("actor_rollout_ref.ref.model.path", "ref_load", lambda it: {"ref_load": text(it)}),
    row(
        "actor_rollout_ref.ref.megatron.*",
        "",
        _of_actor,
        note="the reference has the policy's layout",
    ),
    row(
        ENGINE
        + "log_prob_max_token_len_per_gpu actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
        "log_probs_max_tokens_per_gpu",
        when(
            ACTOR + "use_dynamic_bsz",
            True,
            "use_dynamic_bsz is off",
            lambda it: {"log_probs_max_tokens_per_gpu": it.count()},
        ),
        note="with use_dynamic_bsz",
    ),
    needless(
        "*.log_prob_use_dynamic_bsz *.log_prob_micro_batch_size "
        "*.log_prob_micro_batch_size_per_gpu",
        "passes for log-probs have the micro-batches of training",
    ),
    needless(
        "actor_rollout_ref.ref.*", "the reference runs on the policy's ranks, with its layout"
    ),
)


_MODEL: tuple[Row, ...] = (
    row(MODEL + "path", "hf_checkpoint hub_models", model),
    row(
        MODEL + "enable_gradient_checkpointing",
        "recompute_granularity recompute_method recompute_num_layers",
        _recompute,
        default=True,
    ),
    lacking(MODEL + "enable_activation_offload", "use --recompute-granularity full", False),
    row(MODEL + "lora_rank " + MODEL + "lora.rank", "lora_rank", rank_of_adapters, default=0),
    row(MODEL + "lora_alpha", "lora_alpha", _lora("lora_alpha", numeric("lora_alpha")), default=16),
    row(MODEL + "lora.alpha", "lora_alpha", _lora("lora_alpha", numeric("lora_alpha"))),
    row(MODEL + "lora.dropout", "lora_dropout", _lora("lora_dropout", numeric("lora_dropout"))),
    row(
        MODEL + "target_modules " + MODEL + "lora.target_modules",
        "lora_targets",
        _lora("lora_targets", lora_targets),
    ),
    lacking(MODEL + "lora.type", "adapters are plain LoRA", "lora"),
    lacking(
        MODEL + "lora_adapter_path " + MODEL + "lora.adapter_path",
        "an adapter starts at 0; merge it into --hf-checkpoint",
        None,
    ),
    lacking(
        MODEL + "exclude_modules " + MODEL + "lora.exclude_modules", "use --lora-targets", None, []
    ),
    needless(MODEL + "lora.*", "adapters have one form here (docs/lora.md)"),
    row(MODEL + "mtp.enable_train", "enable_mtp_training"),
    row(
        MODEL + "mtp.mtp_loss_scaling_factor",
        "mtp_loss_scaling_factor",
        when(
            MODEL + "mtp.enable_train",
            True,
            "mtp.enable_train is off",
            numeric("mtp_loss_scaling_factor"),
        ),
    ),
    needless(MODEL + "mtp.enable", "see mtp.enable_train"),
    lacking(MODEL + "mtp.enable_rollout", "use SGLang's --sglang-speculative-algorithm", False),
    needless(MODEL + "mtp.*", "of speculative decoding: options of SGLang (docs/engines.md)"),
    lacking(
        MODEL + "tokenizer_path " + MODEL + "hf_config_path",
        "tokenizer and configuration are those of --hf-checkpoint",
        None,
    ),
    lacking(MODEL + "custom_chat_template", "change the tokenizer's file in --hf-checkpoint", None),
    lacking(MODEL + "external_lib", "code of users: --custom-*-path (docs/extending.md)", None),
    row(
        MODEL + "override_config " + MODEL + "override_config.*",
        "override_hf_config",
        hf_override,
        note="keys of config.json",
    ),
    needless(MODEL + "trust_remote_code", "no code of a model's folder runs (docs/models.md)"),
    needless(
        MODEL + "use_shm " + MODEL + "use_liger " + MODEL + "tiled_mlp.*",
        "of verl's own model code",
    ),
    row(
        "actor_rollout_ref.hybrid_engine",
        "colocate",
        lambda it: {"colocate": it.value},
        default=True,
    ),
    row(
        "actor_rollout_ref.nccl_timeout",
        "distributed_timeout_minutes",
        lambda it: {"distributed_timeout_minutes": max(1, -(-it.count() // 60))},
        note="seconds there, minutes here",
    ),
)


LAYOUT_ROWS = (*_MEGATRON, *_REFERENCE, *_MODEL)
