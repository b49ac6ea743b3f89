"""Keys of NeMo-RL's policy: model, batches, optimizer and generation. Pure data."""

from __future__ import annotations

from collections.abc import Mapping

from rlpost.extensions.importing.peers.common import (
    as_is,
    eager,
    hf_override,
    model,
    sglang_option,
)
from rlpost.extensions.importing.peers.nemo_rl_keys import (
    DTENSOR,
    MEGATRON,
    adapters,
    recompute,
    steps_per_rollout,
)
from rlpost.extensions.importing.peers.row import (
    Convert,
    Given,
    Needless,
    NotHere,
    Row,
    Settings,
    as_count,
    as_number,
    lacking,
    needless,
    row,
    same,
)

GENERATION = "policy.generation."


VLLM = GENERATION + "vllm_cfg."


_OFF_DTENSOR = "dtensor_cfg is off"


def _dtensor(convert: Convert) -> Convert:
    def checked(it: Given) -> Settings:
        if same(it.look(MEGATRON + "enabled"), True):
            raise Needless(_OFF_DTENSOR)
        return convert(it)

    return checked


def _is_packed(it: Given) -> bool:
    keys = ("policy.sequence_packing.enabled", "policy.dynamic_batching.enabled")
    return any(same(it.look(key), True) for key in keys)


def _micro(it: Given) -> Settings:
    if _is_packed(it):
        raise Needless("sequence_packing or dynamic_batching packs by tokens")
    return {"micro_batch_size": it.count()}


def _packs(it: Given) -> Settings:
    if not same(it.value, True):
        raise Needless("off, as here")
    return {"use_dynamic_batch_size": True}


def _context_size(it: Given) -> int:
    table = MEGATRON if same(it.look(MEGATRON + "enabled"), True) else DTENSOR
    size = it.look(table + "context_parallel_size")
    return size if isinstance(size, int) and size > 0 else 1


def _tokens(setting: str, switch: str) -> Convert:
    def convert(it: Given) -> Settings:
        if not same(it.look(f"policy.{switch}.enabled"), True):
            raise Needless(f"{switch} is off")
        # A micro-batch is shared by the context-parallel ranks; rlpost counts one GPU's part.
        return {setting: max(1, it.count() // _context_size(it))}

    return convert


def _torch_optimizer(it: Given) -> Settings:
    names: Mapping[str, str] = {"lr": "lr", "weight_decay": "weight_decay", "eps": "adam_eps"}
    if it.tail == "betas" and isinstance(it.value, list) and len(it.value) == 2:
        return {"adam_beta1": it.value[0], "adam_beta2": it.value[1]}
    if it.tail in names:
        return {names[it.tail]: it.number()}
    if it.tail in ("foreach", "fused"):
        raise Needless("the optimizer is Megatron-core's")
    raise NotHere("the optimizer is Megatron-core's Adam or Muon (docs/actor.md)")


def _torch_schedule(it: Given) -> Settings:
    """Return the warm-up of LinearLR before ConstantLR; torch's other schedules are not here."""
    stages = it.value if isinstance(it.value, list) else [it.value]
    named = [one for one in stages if isinstance(one, dict) and "name" in one]
    kinds = [str(one["name"]).rpartition(".")[2] for one in named]
    if it.value is None or kinds == ["ConstantLR"]:
        raise Needless("constant, as here")
    if kinds != ["LinearLR", "ConstantLR"]:
        raise NotHere("use --lr-decay-style, --lr-warmup-iters and --lr-decay-iters")
    linear, key = named[0].get("kwargs"), "policy.optimizer.kwargs.lr"
    if not isinstance(linear, Mapping):
        raise NotHere("use --lr-warmup-iters and --lr-warmup-init")
    rollouts = as_count("total_iters", linear.get("total_iters"))
    share = as_number("start_factor", linear.get("start_factor", 1 / 3))
    return {
        "lr_warmup_iters": rollouts * steps_per_rollout(it),
        "lr_warmup_init": as_number(key, it.look(key)) * share,
    }


def _of_model(it: Given) -> Settings:
    if same(it.value, it.look("policy.model_name")):
        raise Needless("it is the model's")
    raise NotHere("the tokenizer is that of --hf-checkpoint")


def _template(it: Given) -> Settings:
    if it.value is None:
        raise Needless("none, as here")
    return {"apply_chat_template_kwargs": {it.tail: it.value} if it.tail else it.value}


def _engine_size(it: Given) -> Settings:
    if not same(it.look(VLLM + "pipeline_parallel_size"), 1):
        raise NotHere("use --rollout-num-gpus-per-engine and --sglang-pp-size")
    return {"rollout_num_gpus_per_engine": it.count()}


def _inherited(setting: str, key: str) -> Convert:
    def convert(it: Given) -> Settings:
        if same(it.value, it.look(GENERATION + key)):
            raise Needless("that of training, as here")
        return {setting: -1 if it.value is None else it.value}

    return convert


def _list(setting: str) -> Convert:
    def convert(it: Given) -> Settings:
        if not it.value:
            raise Needless("none, as here")
        return {setting: it.value}

    return convert


def _engine_length(it: Given) -> Settings:
    if same(it.value, it.look("policy.max_total_sequence_length")):
        raise Needless("it is max_total_sequence_length")
    return {"sglang_context_length": it.count()}


def _cache_type(it: Given) -> Settings:
    if it.value == "auto":
        raise Needless("auto, as here")
    return {"sglang_kv_cache_dtype": "fp8_e4m3" if it.value == "fp8" else it.value}


def _chunk(it: Given) -> Settings:
    if it.value is None:
        raise Needless("--log-probs-chunk-size bounds memory alone")
    return {"log_probs_chunk_size": it.count()}


_TRAINER: tuple[Row, ...] = (
    row("policy.model_name", "hf_checkpoint hub_models", model),
    row("policy.tokenizer.name", "", _of_model),
    row(
        "policy.tokenizer.chat_template_kwargs policy.tokenizer.chat_template_kwargs.*",
        "apply_chat_template_kwargs",
        _template,
    ),
    lacking(
        "policy.tokenizer.chat_template",
        "change the tokenizer's file in --hf-checkpoint",
        None,
        "default",
    ),
    needless("policy.tokenizer.*", "the tokenizer is transformers'"),
    row(
        "policy.hf_config_overrides policy.hf_config_overrides.*",
        "override_hf_config",
        hf_override,
        note="keys of config.json",
    ),
    row("policy.train_global_batch_size", "global_batch_size", note="answers in both", default=512),
    row(
        "policy.train_micro_batch_size",
        "micro_batch_size",
        _micro,
        note="without sequence_packing and dynamic_batching",
        default=4,
    ),
    row(
        "policy.max_total_sequence_length",
        "rollout_max_context_len",
        note="prompt and response",
        default=512,
    ),
    needless(
        "policy.precision", "bfloat16 on GPUs", "bfloat16", instead="use --bf16 true or false"
    ),
    row("policy.logprob_chunk_size", "log_probs_chunk_size", _chunk),
    row("policy.max_grad_norm", "clip_grad", default=1.0),
    row("policy.sequence_packing.enabled", "use_dynamic_batch_size", _packs, default=True),
    row("policy.dynamic_batching.enabled", "use_dynamic_batch_size", _packs, default=False),
    row(
        "policy.sequence_packing.train_mb_tokens",
        "max_tokens_per_gpu",
        _tokens("max_tokens_per_gpu", "sequence_packing"),
        note="a micro-batch there, a GPU's part of it here",
    ),
    row(
        "policy.dynamic_batching.train_mb_tokens",
        "max_tokens_per_gpu",
        _tokens("max_tokens_per_gpu", "dynamic_batching"),
        note="a micro-batch there, a GPU's part of it here",
    ),
    row(
        "policy.sequence_packing.logprob_mb_tokens",
        "log_probs_max_tokens_per_gpu",
        _tokens("log_probs_max_tokens_per_gpu", "sequence_packing"),
    ),
    row(
        "policy.dynamic_batching.logprob_mb_tokens",
        "log_probs_max_tokens_per_gpu",
        _tokens("log_probs_max_tokens_per_gpu", "dynamic_batching"),
    ),
    needless(
        "policy.sequence_packing.* policy.dynamic_batching.*",
        "packing has no such settings here (docs/actor.md)",
    ),
    needless(
        "policy.generation_batch_size policy.logprob_batch_size "
        "policy.offload_optimizer_for_logprob policy.make_sequence_length_divisible_by",
        "sizes follow from the layout, and memory is offloaded with --colocate",
    ),
    row("policy.router_replay.enabled", "use_rollout_routing_replay"),
    lacking("policy.quant_*", "weights are not trained for a quantization", None),
    lacking("policy.draft.enabled", "use SGLang's --sglang-speculative-algorithm", False),
    needless("policy.draft.*", "of the draft model"),
    row(
        "policy.optimizer.kwargs.*",
        "lr weight_decay adam_beta1 adam_beta2 adam_eps",
        _dtensor(_torch_optimizer),
    ),
    needless(
        "policy.optimizer.name",
        "the optimizer is Megatron-core's",
        "torch.optim.AdamW",
        "torch.optim.Adam",
        instead="use --optimizer adam or muon",
    ),
    needless("policy.optimizer policy.scheduler.*", "of DTensor", None, {}),
    row(
        "policy.scheduler",
        "lr_warmup_iters lr_warmup_init",
        _dtensor(_torch_schedule),
        note="LinearLR before ConstantLR; rollouts there, optimizer steps here",
    ),
)


_DTENSOR: tuple[Row, ...] = (
    row(
        DTENSOR + "tensor_parallel_size",
        "tensor_model_parallel_size",
        _dtensor(as_is("tensor_model_parallel_size")),
    ),
    row(
        DTENSOR + "context_parallel_size",
        "context_parallel_size",
        _dtensor(as_is("context_parallel_size")),
        default=1,
    ),
    row(
        DTENSOR + "expert_parallel_size",
        "expert_model_parallel_size",
        _dtensor(as_is("expert_model_parallel_size")),
    ),
    row(DTENSOR + "sequence_parallel", "sequence_parallel", _dtensor(as_is("sequence_parallel"))),
    row(
        DTENSOR + "activation_checkpointing",
        "recompute_granularity recompute_method recompute_num_layers",
        _dtensor(recompute),
    ),
    *adapters(DTENSOR + "lora_cfg."),
    needless(
        DTENSOR + "enabled",
        "the trainer is Megatron-core",
        False,
        instead="the trainer is Megatron-core; sizes: rlpost plan --suggest",
    ),
    needless(DTENSOR + "*", "of DTensor; the trainer is Megatron-core"),
)


_GENERATION: tuple[Row, ...] = (
    needless(
        GENERATION + "backend",
        "engines are SGLang's",
        "sglang",
        instead="engines are SGLang's; options of vLLM, TensorRT-LLM and Megatron have no "
        "counterpart",
    ),
    row(GENERATION + "max_new_tokens", "rollout_max_response_len", default=512),
    row(GENERATION + "temperature", "rollout_temperature", default=1.0),
    row(GENERATION + "top_p", "rollout_top_p", default=1.0),
    row(
        GENERATION + "top_k",
        "rollout_top_k",
        lambda it: {"rollout_top_k": -1 if it.value is None else it.value},
    ),
    row(
        GENERATION + "val_temperature",
        "eval_temperature",
        _inherited("eval_temperature", "temperature"),
    ),
    row(GENERATION + "val_top_p", "eval_top_p", _inherited("eval_top_p", "top_p")),
    row(GENERATION + "val_top_k", "eval_top_k", _inherited("eval_top_k", "top_k")),
    row(GENERATION + "stop_token_ids", "rollout_stop_token_ids", _list("rollout_stop_token_ids")),
    row(GENERATION + "stop_strings", "rollout_stop", _list("rollout_stop")),
    row(VLLM + "tensor_parallel_size", "rollout_num_gpus_per_engine", _engine_size, default=1),
    lacking(VLLM + "pipeline_parallel_size", "use --sglang-pp-size", 1, default=1),
    lacking(VLLM + "expert_parallel_size", "use --sglang-ep-size", 1),
    row(
        VLLM + "gpu_memory_utilization",
        "sglang_mem_fraction_static",
        note="a share of the GPU's memory in both",
    ),
    row(VLLM + "enforce_eager", "sglang_disable_cuda_graph", eager),
    row(VLLM + "max_model_len", "sglang_context_length", _engine_length),
    row(VLLM + "kv_cache_dtype", "sglang_kv_cache_dtype", _cache_type),
    needless(
        VLLM + "precision",
        "that of --hf-checkpoint",
        "bfloat16",
        instead="engines generate in FP8 with an --hf-checkpoint in FP8 blocks",
    ),
    needless(
        VLLM + "* " + GENERATION + "vllm_kwargs " + GENERATION + "vllm_kwargs.*",
        "of vLLM; SGLang's options are --sglang-*",
    ),
    row(
        GENERATION + "sglang_cfg.sglang_server_config.num_gpus_per_engine",
        "rollout_num_gpus_per_engine",
    ),
    row(
        GENERATION + "sglang_cfg.sglang_server_config.sglang_server_concurrency",
        "sglang_server_concurrency",
    ),
    needless(
        GENERATION
        + "sglang_cfg.sglang_server_config.num_gpus "
        + GENERATION
        + "sglang_cfg.sglang_server_config.needs_offload "
        + GENERATION
        + "sglang_cfg.sglang_server_config.cpu_weight_backup "
        + GENERATION
        + "sglang_cfg.sglang_server_config.pause_generation_mode",
        "it follows from --rollout-num-gpus and --colocate",
    ),
    row(
        GENERATION + "sglang_cfg.sglang_server_config.*",
        "",
        sglang_option,
        note="the option of SGLang of that name",
    ),
    needless(GENERATION + "*", "rlpost starts the engines itself (docs/engines.md)"),
)

POLICY_ROWS = (*_TRAINER, *_DTENSOR, *_GENERATION)
