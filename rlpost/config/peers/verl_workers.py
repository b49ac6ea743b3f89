"""Keys of verl's workers: actor, reference, engines and critic. Pure data."""

from __future__ import annotations

from rlpost.config.peers.common import lora_targets, megatron_option, model, sglang_option, text
from rlpost.config.peers.row import (
    Convert,
    Given,
    Needless,
    NotHere,
    Row,
    Settings,
    as_count,
    choice,
    lacking,
    needless,
    row,
    same,
    when,
)

ACTOR, ENGINE, MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
OPTIM = ACTOR + "optim."
MEGATRON = ACTOR + "megatron."
_LOSSES: dict[object, object] = {"vanilla": "ppo", "gspo": "gspo", "cispo": "cispo"}
_KL_TYPES: dict[object, object] = {
    "low_var_kl": "low_var_kl",
    "k3": "low_var_kl",
    "mse": "k2",
    "k2": "k2",
}
_MEANS: dict[object, object] = {"token-mean": True, "seq-mean-token-mean": False}
_IDLE = "engines and trainer offload their memory by themselves with --colocate"
_LAYOUT = "the trainer is Megatron-core, which has no such sharding; see rlpost plan --suggest"
_OF_CRITIC = "the critic has the layout and the optimizer of the policy (docs/ppo.md)"


def _steps_per_rollout(it: Given) -> int:
    """Optimizer steps of a rollout: verl's schedule counts rollouts, rlpost's optimizer steps."""
    batch, mini = (
        as_count(key, it.look(key)) for key in ("data.train_batch_size", ACTOR + "ppo_mini_batch_size")
    )
    if mini < 1 or batch % mini:
        raise NotHere("ppo_mini_batch_size does not divide train_batch_size")
    return batch // mini


def _batch(it: Given) -> Settings:
    return {"global_batch_size": it.count() * as_count(ENGINE + "n", it.look(ENGINE + "n"))}


def _warmup(setting: str) -> Convert:
    def convert(it: Given) -> Settings:
        if it.value is None or it.count() < 0:
            raise Needless("off: lr_warmup_steps_ratio decides")
        return {setting: it.count() * _steps_per_rollout(it)}

    return convert


def _warmup_share(it: Given) -> Settings:
    steps = it.look(OPTIM + "lr_warmup_steps")
    if isinstance(steps, int) and steps > 0:
        raise Needless("lr_warmup_steps decides")
    if not it.number():
        raise Needless("off, as here")
    return {"lr_warmup_fraction": it.number()}


def _decay_steps(setting: str) -> Convert:
    def convert(it: Given) -> Settings:
        if it.value is None:
            raise Needless("all steps of the run, as here")
        return {setting: it.count() * _steps_per_rollout(it)}

    return convert


def _min_lr(it: Given) -> Settings:
    if it.value is None:
        raise Needless("0, as here")
    rate = it.look(OPTIM + "lr")
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        raise NotHere("use --min-lr")
    return {"min_lr": it.number() * rate}


def _betas(it: Given) -> Settings:
    values = it.value
    if not isinstance(values, list) or len(values) != 2:
        raise NotHere("use --adam-beta1 and --adam-beta2")
    return {"adam_beta1": values[0], "adam_beta2": values[1]}


def _micro(it: Given) -> Settings:
    if same(it.look(ACTOR + "use_dynamic_bsz"), True):
        raise Needless("use_dynamic_bsz packs by tokens")
    if it.value is None:
        raise Needless("1, as here")
    return {"micro_batch_size": it.count()}


def _policy_loss(it: Given) -> Settings:
    return choice("policy_loss", _LOSSES, "use --policy-loss, or --loss-type custom_loss")(it)


def _mean(it: Given) -> Settings:
    if it.look(ACTOR + "policy_loss.loss_mode") == "gspo":
        return {"calculate_per_token_loss": False}  # verl takes the mean of answers whatever this says
    remedy = "a token weighs 1 / tokens of the batch, or 1 / (tokens of its answer x answers)"
    return choice("calculate_per_token_loss", _MEANS, remedy)(it)


def _kl_type(it: Given) -> Settings:
    remedy = "it has no gradient of the divergence in a loss; use --kl-loss-type k2 or low_var_kl"
    return choice("kl_loss_type", _KL_TYPES, remedy)(it)


def _clip_c(it: Given) -> Settings:
    if it.look(ACTOR + "policy_loss.loss_mode") != "vanilla":
        raise Needless("of the loss vanilla alone")
    return {"eps_clip_c": it.number()}


def _checkpoint(it: Given) -> Settings:
    words = it.value if isinstance(it.value, list) else [it.value]
    if "hf_model" in words:
        raise NotHere("use --save-hf for exports, --no-save-optim to leave the optimizer out")
    return {"no_save_optim": "optimizer" not in words}


def _recompute(it: Given) -> Settings:
    if it.look(ACTOR + "strategy") == "megatron" or it.look("model_engine") == "megatron":
        raise Needless("of FSDP; override_transformer_config decides")
    if not same(it.value, True):
        raise Needless("off, as here")
    return {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }


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


def _engine_size(it: Given) -> Settings:
    for name in ("data_parallel_size", "pipeline_model_parallel_size"):
        if not same(it.look(ENGINE + name), 1):
            raise NotHere(f"use --rollout-num-gpus-per-engine and SGLang's options for {name}")
    return {"rollout_num_gpus_per_engine": it.count()}


def _expert_engines(it: Given) -> Settings:
    if it.count() == 1:
        raise Needless("off, as here")
    return {"sglang_ep_size": it.count()}


def _off(setting: str, why: str) -> Convert:
    """A switch that turns something of SGLang off."""

    def convert(it: Given) -> Settings:
        if same(it.value, True):
            raise Needless(why)
        return {setting: True}

    return convert


def _eager(it: Given) -> Settings:
    if not same(it.value, True):
        raise Needless("off, as here")
    return {"sglang_disable_cuda_graph": True}


def _free(it: Given) -> Settings:
    if same(it.value, True):
        raise Needless("engines offload with --colocate")
    return {"offload_rollout": False}


def _as_data(other: str) -> Convert:
    def convert(it: Given) -> Settings:
        if not same(it.value, it.look(other)):
            raise NotHere(f"it is {other} here")
        raise Needless(f"it is {other}")

    return convert


def _routes(it: Given) -> Settings:
    if it.value in ("disabled", None):
        raise Needless("off, as here")
    table: dict[object, object] = {"R2": "use_routing_replay", "R3": "use_rollout_routing_replay"}
    if it.value not in table:
        raise NotHere("use --use-routing-replay or --use-rollout-routing-replay")
    return {str(table[it.value]): True}


def _rank(it: Given) -> Settings:
    if not it.count():
        raise Needless("off, as here")
    return {"lora_rank": it.count()}


def _lora(setting: str, convert: Convert) -> Convert:
    def checked(it: Given) -> Settings:
        ranks = (it.look(MODEL + "lora_rank"), it.look(MODEL + "lora.rank"))
        if not any(isinstance(rank, int) and rank > 0 for rank in ranks):
            raise Needless("adapters are off")
        return convert(it)

    return checked


def _value(setting: str) -> Convert:
    return lambda it: {setting: it.number()}


def _critic(setting: str, convert: Convert) -> Convert:
    return when("algorithm.adv_estimator", "gae", "without gae there is no critic", convert)


def _buffer(it: Given) -> Settings:
    return {"update_weight_buffer_size": it.count() * 2**20}


def _optimizer(it: Given) -> Settings:
    name = str(it.value).lower()
    if name in ("adam", "adamw"):
        return {"optimizer": "adam"}
    if name == "muon":
        return {"optimizer": "muon"}
    raise NotHere("use --optimizer adam or muon")


_KL = ACTOR + "use_kl_loss"
_ACTOR: tuple[Row, ...] = (
    row(ACTOR + "ppo_mini_batch_size", "global_batch_size", _batch,
        note="prompts there, answers here: times rollout.n", default=256),
    row(ACTOR + "ppo_micro_batch_size_per_gpu", "micro_batch_size", _micro,
        note="without use_dynamic_bsz"),
    lacking(ACTOR + "ppo_micro_batch_size", "it counts all GPUs; use --micro-batch-size, of one rank",
            None),
    row(ACTOR + "use_dynamic_bsz", "use_dynamic_batch_size", default=False),
    row(ACTOR + "ppo_max_token_len_per_gpu", "max_tokens_per_gpu",
        when(ACTOR + "use_dynamic_bsz", True, "use_dynamic_bsz is off",
             lambda it: {"max_tokens_per_gpu": it.count()}),
        note="with use_dynamic_bsz", default=16384),
    needless(ACTOR + "clip_ratio", "verl reads clip_ratio_low and clip_ratio_high", 0.2,
             instead="verl itself reads clip_ratio_low and clip_ratio_high, 0.2 by default"),
    row(ACTOR + "clip_ratio_low", "eps_clip", _value("eps_clip"), default=0.2),
    row(ACTOR + "clip_ratio_high", "eps_clip_high", _value("eps_clip_high"), default=0.2),
    row(ACTOR + "clip_ratio_c", "eps_clip_c", _clip_c, note="with the loss vanilla", default=3.0),
    row(ACTOR + "policy_loss.loss_mode", "policy_loss", _policy_loss, default="vanilla"),
    needless(ACTOR + "policy_loss.* " + ACTOR + "tau_pos " + ACTOR + "tau_neg",
             "of a loss that rlpost lacks: see policy_loss.loss_mode"),
    row(ACTOR + "loss_agg_mode", "calculate_per_token_loss", _mean,
        note="token-mean, seq-mean-token-mean", default="token-mean"),
    lacking(ACTOR + "loss_scale_factor", "of seq-mean-token-sum-norm, which rlpost lacks", None),
    row(ACTOR + "entropy_coeff", "entropy_coef", _value("entropy_coef"), default=0),
    row(_KL, "use_kl_loss", default=False),
    row(ACTOR + "kl_loss_coef", "kl_loss_coef",
        when(_KL, True, "use_kl_loss is off", _value("kl_loss_coef")),
        note="with use_kl_loss", default=0.001),
    row(ACTOR + "kl_loss_type", "kl_loss_type",
        when(_KL, True, "use_kl_loss is off", _kl_type),
        note="low_var_kl or k3, mse", default="low_var_kl"),
    lacking(ACTOR + "ppo_epochs", "each rollout is trained once", 1),
    lacking(ACTOR + "shuffle", "samples are trained in the order of their prompts", False),
    needless(ACTOR + "data_loader_seed", "of shuffle"),
    row(ACTOR + "grad_clip", "clip_grad", _value("clip_grad")),
    row(ACTOR + "ulysses_sequence_parallel_size " + ACTOR
        + "fsdp_config.ulysses_sequence_parallel_size", "context_parallel_size",
        lambda it: {"context_parallel_size": it.count()}, note="ranks that share a sequence"),
    row(ACTOR + "checkpoint.save_contents", "no_save_optim", _checkpoint),
    row(ACTOR + "checkpoint.async_save", "async_save"),
    needless(ACTOR + "checkpoint.*", "rlpost writes torch_dist checkpoints"),
    row(ACTOR + "router_replay.mode " + MEGATRON + "router_replay.mode",
        "use_routing_replay use_rollout_routing_replay", _routes),
    lacking(ACTOR + "router_replay.* " + MEGATRON + "router_replay.*",
            "routes are not recorded to files", None),
    needless(ACTOR + "strategy", "the trainer is Megatron-core", "megatron",
             instead="the trainer is Megatron-core; sizes: rlpost plan --suggest"),
    needless(ACTOR + "fsdp_config.param_offload " + ACTOR + "fsdp_config.optimizer_offload "
             + MEGATRON + "param_offload " + MEGATRON + "grad_offload " + MEGATRON
             + "optimizer_offload " + ACTOR + "fsdp_config.offload_policy", _IDLE),
    lacking(ACTOR + "fsdp_config.fsdp_size", _LAYOUT, -1),
    needless(ACTOR + "fsdp_config.* *.fsdp_config.* *.turbo_config.* *.fsdp.* *.veomni.*",
             "of FSDP; the trainer is Megatron-core"),
    needless("*.use_torch_compile *.use_fused_kernels *.fused_kernel_options.* "
             "*.use_remove_padding *.entropy_from_logits_with_chunking "
             "*.entropy_from_logits_chunk_size *.entropy_checkpointing *.calculate_entropy "
             "*.calculate_sum_pi_squared *.use_prefix_grouper *.pad_to_length "
             "*.pad_to_length_bucket *.pad_bshd_to_minibatch_max *.rollout_n",
             "samples are packed, and log-probs are fused or computed in chunks"),
    lacking(ACTOR + "freeze_vision_tower", "rlpost trains text models only", False),
    lacking("*.qat.enable", "weights are not trained for a quantization", False),
    needless("*.qat.*", "of quantization-aware training"),
)
_OPTIMIZER: tuple[Row, ...] = (
    row(OPTIM + "lr", "lr", _value("lr"), default=1e-6),
    row(OPTIM + "lr_warmup_steps", "lr_warmup_iters", _warmup("lr_warmup_iters"),
        note="rollouts there, optimizer steps here"),
    row(OPTIM + "lr_warmup_steps_ratio", "lr_warmup_fraction", _warmup_share),
    row(OPTIM + "weight_decay", "weight_decay", _value("weight_decay"), default=0.01),
    row(OPTIM + "betas", "adam_beta1 adam_beta2", _betas, default=[0.9, 0.999]),
    row(OPTIM + "clip_grad", "clip_grad", _value("clip_grad"), default=1.0),
    row(OPTIM + "optimizer", "optimizer", _optimizer),
    row(OPTIM + "lr_decay_style " + OPTIM + "lr_scheduler_type " + OPTIM + "warmup_style",
        "lr_decay_style", choice("lr_decay_style", {
            name: name for name in ("constant", "linear", "cosine", "inverse-square-root", "WSD")
        } | {None: "constant"}, "use --lr-decay-style")),
    row(OPTIM + "min_lr", "min_lr", _value("min_lr")),
    row(OPTIM + "min_lr_ratio", "min_lr", _min_lr, note="a share of lr"),
    row(OPTIM + "lr_warmup_init", "lr_warmup_init", _value("lr_warmup_init")),
    row(OPTIM + "lr_decay_steps", "lr_decay_iters", _decay_steps("lr_decay_iters"),
        note="rollouts there, optimizer steps here"),
    row(OPTIM + "lr_wsd_decay_steps", "lr_wsd_decay_iters", _decay_steps("lr_wsd_decay_iters"),
        note="rollouts there, optimizer steps here"),
    row(OPTIM + "lr_wsd_decay_style", "lr_wsd_decay_style"),
    row(OPTIM + "weight_decay_incr_style", "weight_decay_incr_style"),
    row(OPTIM + "use_precision_aware_optimizer", "use_precision_aware_optimizer"),
    row(OPTIM + "main_grads_dtype", "main_grads_dtype"),
    row(OPTIM + "exp_avg_dtype", "exp_avg_dtype"),
    row(OPTIM + "exp_avg_sq_dtype", "exp_avg_sq_dtype"),
    needless(OPTIM + "total_training_steps", "it follows from the steps of the run"),
    row(OPTIM + "override_optimizer_config.*", "", megatron_option,
        note="the option of Megatron-core of that name"),
    needless(OPTIM + "override_optimizer_config", "see its keys", None, {}),
    lacking(OPTIM + "num_cycles", "cosine is half a period", 0.5),
    needless(OPTIM + "optimizer_impl " + OPTIM + "zero_indexed_step " + OPTIM
             + "use_checkpoint_opt_param_scheduler", "the optimizer is Megatron-core's"),
    lacking(OPTIM + "muon_* " + OPTIM + "use_layer_wise_distributed_optimizer",
            "Muon has other settings here: --muon-momentum, --muon-scale (docs/actor.md)"),
)
_SIZES = " ".join(
    f"{MEGATRON}{name}"
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size",
                 "context_parallel_size", "expert_model_parallel_size",
                 "expert_tensor_parallel_size")
)
_MEGATRON: tuple[Row, ...] = (
    *(row(key, key.removeprefix(MEGATRON), default=None if "expert_tensor" in key else 1)
      for key in _SIZES.split()),
    lacking(MEGATRON + "virtual_pipeline_model_parallel_size",
            "stages there, layers here: --num-layers-per-virtual-pipeline-stage is the model's "
            "layers / (pipeline size x this)", None, 1),
    row(MEGATRON + "sequence_parallel", "sequence_parallel", _sequence_parallel, default=True),
    row(MEGATRON + "use_distributed_optimizer", "use_distributed_optimizer"),
    row(MEGATRON + "seed " + ACTOR + "fsdp_config.seed", "seed"),
    row(MEGATRON + "override_transformer_config.*", "", megatron_option,
        note="the option of Megatron-core of that name"),
    row(MEGATRON + "override_ddp_config.*", "", megatron_option,
        note="the option of Megatron-core of that name"),
    needless(MEGATRON + "override_transformer_config.recompute_modules", "of selective recomputation",
             ["core_attn"], None, instead="--recompute-granularity selective is attention's"),
    needless(MEGATRON + "override_*", "see its keys", None, {}),
    row(MEGATRON + "dist_checkpointing_path", "ref_load", _dist_checkpoint, note="torch_dist"),
    needless(MEGATRON + "use_dist_checkpointing", "the folder of --ref-load decides"),
    needless(MEGATRON + "use_mbridge " + MEGATRON + "vanilla_mbridge " + MEGATRON
             + "dist_checkpointing_prefix " + MEGATRON + "dist_ckpt_* " + MEGATRON + "distrib_*",
             "rlpost reads Hugging Face and torch_dist folders itself"),
    lacking(MEGATRON + "use_megatron_fsdp", _LAYOUT, False),
    lacking(MEGATRON + "dynamic_context_parallel " + MEGATRON + "max_seqlen_per_dp_cp_rank",
            "the context-parallel size is fixed", False, None),
    needless(MEGATRON + "dtype " + ACTOR + "fsdp_config.dtype", "bfloat16 on GPUs", "bfloat16",
             instead="use --bf16 true or false"),
    needless(MEGATRON + "forward_only", "of verl's own workers"),
)
_REFERENCE: tuple[Row, ...] = (
    row("actor_rollout_ref.ref.model.path", "ref_load", lambda it: {"ref_load": text(it)}),
    row("actor_rollout_ref.ref.megatron.*", "", _of_actor,
        note="the reference has the policy's layout"),
    row(ENGINE + "log_prob_max_token_len_per_gpu actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
        "log_probs_max_tokens_per_gpu",
        when(ACTOR + "use_dynamic_bsz", True, "use_dynamic_bsz is off",
             lambda it: {"log_probs_max_tokens_per_gpu": it.count()}),
        note="with use_dynamic_bsz"),
    needless("*.log_prob_use_dynamic_bsz *.log_prob_micro_batch_size "
             "*.log_prob_micro_batch_size_per_gpu",
             "passes for log-probs have the micro-batches of training"),
    needless("actor_rollout_ref.ref.*", "the reference runs on the policy's ranks, with its layout"),
)
_MODEL: tuple[Row, ...] = (
    row(MODEL + "path", "hf_checkpoint hub_models", model),
    row(MODEL + "enable_gradient_checkpointing",
        "recompute_granularity recompute_method recompute_num_layers", _recompute, default=True),
    lacking(MODEL + "enable_activation_offload", "use --recompute-granularity full", False),
    row(MODEL + "lora_rank " + MODEL + "lora.rank", "lora_rank", _rank, default=0),
    row(MODEL + "lora_alpha", "lora_alpha", _lora("lora_alpha", _value("lora_alpha")), default=16),
    row(MODEL + "lora.alpha", "lora_alpha", _lora("lora_alpha", _value("lora_alpha"))),
    row(MODEL + "lora.dropout", "lora_dropout", _lora("lora_dropout", _value("lora_dropout"))),
    row(MODEL + "target_modules " + MODEL + "lora.target_modules", "lora_targets",
        _lora("lora_targets", lora_targets)),
    lacking(MODEL + "lora.type", "adapters are plain LoRA", "lora"),
    lacking(MODEL + "lora_adapter_path " + MODEL + "lora.adapter_path",
            "an adapter starts at 0; merge it into --hf-checkpoint", None),
    lacking(MODEL + "exclude_modules " + MODEL + "lora.exclude_modules", "use --lora-targets", None, []),
    needless(MODEL + "lora.*", "adapters have one form here (docs/lora.md)"),
    row(MODEL + "mtp.enable_train", "enable_mtp_training"),
    row(MODEL + "mtp.mtp_loss_scaling_factor", "mtp_loss_scaling_factor",
        when(MODEL + "mtp.enable_train", True, "mtp.enable_train is off",
             _value("mtp_loss_scaling_factor"))),
    needless(MODEL + "mtp.enable", "see mtp.enable_train"),
    lacking(MODEL + "mtp.enable_rollout", "use SGLang's --sglang-speculative-algorithm", False),
    needless(MODEL + "mtp.*", "of speculative decoding: options of SGLang (docs/engines.md)"),
    lacking(MODEL + "tokenizer_path " + MODEL + "hf_config_path",
            "tokenizer and configuration are those of --hf-checkpoint", None),
    lacking(MODEL + "custom_chat_template", "change the tokenizer's file in --hf-checkpoint", None),
    lacking(MODEL + "external_lib", "code of users: --custom-*-path (docs/extending.md)", None),
    lacking(MODEL + "override_config " + MODEL + "override_config.*",
            "the table [model] overrides config.json (docs/models.md)", None, {}),
    lacking(MODEL + "trust_remote_code", "models are families of rlpost (docs/models.md)", False),
    needless(MODEL + "use_shm " + MODEL + "use_liger " + MODEL + "tiled_mlp.*",
             "of verl's own model code"),
    row("actor_rollout_ref.hybrid_engine", "colocate", lambda it: {"colocate": it.value},
        default=True),
    row("actor_rollout_ref.nccl_timeout", "distributed_timeout_minutes",
        lambda it: {"distributed_timeout_minutes": max(1, -(-it.count() // 60))},
        note="seconds there, minutes here"),
)
_ENGINES: tuple[Row, ...] = (
    row(ENGINE + "n", "n_samples_per_prompt", default=1),
    needless(ENGINE + "name", "engines are SGLang's", "sglang",
             instead="engines are SGLang's; options of vLLM and TensorRT-LLM have no counterpart"),
    needless(ENGINE + "mode", "generation is always asynchronous inside a rollout"),
    row(ENGINE + "temperature", "rollout_temperature", _value("rollout_temperature"), default=1.0),
    row(ENGINE + "top_p", "rollout_top_p", _value("rollout_top_p"), default=1),
    row(ENGINE + "top_k", "rollout_top_k", lambda it: {"rollout_top_k": it.count() or -1}, default=-1),
    lacking(ENGINE + "do_sample", "use --rollout-temperature", True),
    row(ENGINE + "prompt_length", "", _as_data("data.max_prompt_length")),
    row(ENGINE + "response_length", "", _as_data("data.max_response_length")),
    row(ENGINE + "tensor_model_parallel_size", "rollout_num_gpus_per_engine", _engine_size, default=2),
    lacking(ENGINE + "data_parallel_size " + ENGINE + "pipeline_model_parallel_size",
            "use --rollout-num-gpus-per-engine and SGLang's options (docs/engines.md)", 1, default=1),
    row(ENGINE + "expert_parallel_size", "sglang_ep_size", _expert_engines),
    row(ENGINE + "gpu_memory_utilization", "sglang_mem_fraction_static",
        note="verl passes it to SGLang under this name"),
    row(ENGINE + "enforce_eager", "sglang_disable_cuda_graph", _eager),
    row(ENGINE + "free_cache_engine", "offload_rollout", _free),
    row(ENGINE + "max_model_len", "rollout_max_context_len",
        lambda it: {"rollout_max_context_len": it.value}, note="prompt and response"),
    row(ENGINE + "max_num_seqs", "sglang_max_running_requests"),
    needless(ENGINE + "max_num_batched_tokens", "of vLLM; SGLang has --sglang-chunked-prefill-size"),
    row(ENGINE + "enable_chunked_prefill", "sglang_chunked_prefill_size",
        lambda it: _off("", "on, as here")(it) and {"sglang_chunked_prefill_size": -1}),
    row(ENGINE + "enable_prefix_caching", "sglang_disable_radix_cache",
        _off("sglang_disable_radix_cache", "on, as here")),
    row(ENGINE + "engine_kwargs.sglang.*", "", sglang_option, note="the option of SGLang of that name"),
    needless(ENGINE + "engine_kwargs.* " + ENGINE + "engine_kwargs.vllm.* " + ENGINE
             + "engine_kwargs.trtllm.*", "options of another engine; SGLang's are --sglang-*"),
    row(ENGINE + "val_kwargs.n", "n_samples_per_eval_prompt", default=1),
    row(ENGINE + "val_kwargs.temperature", "eval_temperature", _value("eval_temperature"), default=0),
    row(ENGINE + "val_kwargs.top_p", "eval_top_p", _value("eval_top_p"), default=1.0),
    row(ENGINE + "val_kwargs.top_k", "eval_top_k", lambda it: {"eval_top_k": it.count() or -1}, default=-1),
    needless(ENGINE + "val_kwargs.do_sample", "val_kwargs.temperature decides, 0 is greedy"),
    row(ENGINE + "checkpoint_engine.update_weights_bucket_megabytes", "update_weight_buffer_size",
        _buffer, note="MiB there, bytes here"),
    needless(ENGINE + "checkpoint_engine.*", "see --update-weight-transport"),
    row(ENGINE + "enable_rollout_routing_replay", "use_rollout_routing_replay"),
    lacking(ENGINE + "multi_turn.enable", "write an environment (docs/agents.md)", False),
    needless(ENGINE + "multi_turn.*", "of tools: an environment has its own settings (docs/agents.md)"),
    lacking(ENGINE + "agent.default_agent_loop " + ENGINE + "agent.agent_loop_config_path",
            "write an environment (docs/agents.md), or --custom-generate-function-path", None,
            "single_turn_agent"),
    needless(ENGINE + "agent.*", "of verl's agent loops (docs/agents.md)"),
    lacking(ENGINE + "over_sample_rate", "prompts in flight: --over-sampling-batch-size", 0),
    lacking(ENGINE + "ignore_eos", "a response ends at the end of sequence", False),
    lacking(ENGINE + "quantization", "engines generate in FP8 with an --hf-checkpoint in FP8 blocks",
            None),
    lacking(ENGINE + "nnodes", "engines of their own: leave --colocate out, --rollout-num-gpus", 0),
    lacking(ENGINE + "disaggregation.enabled", "engines prefill and decode", False),
    needless(ENGINE + "disaggregation.*", "engines prefill and decode"),
    lacking(ENGINE + "full_determinism", "use --sglang-enable-deterministic-inference", False),
    needless(ENGINE + "prometheus.*", "use --use-prometheus (docs/seeing.md)"),
    needless(ENGINE + "trace.*", "use --trace-steps (docs/seeing.md)"),
    needless(" ".join(ENGINE + name for name in (
        "calculate_log_probs dtype load_format layered_summon disable_log_stats skip_tokenizer_init "
        "multi_stage_wake_up cudagraph_capture_sizes logprobs_mode scheduling_policy seed use_shm "
        "quantization_config_file mtp n_gpus_per_node moe_load_balance_metrics_interval"
    ).split()), "rlpost starts the engines itself (docs/engines.md)"),
)
_CRITIC: tuple[Row, ...] = (
    row("critic.optim.lr", "critic_lr", _critic("critic_lr", _value("critic_lr")), default=1e-5),
    row("critic.optim.lr_warmup_steps", "critic_lr_warmup_iters",
        _critic("", _warmup("critic_lr_warmup_iters")), note="rollouts there, optimizer steps here"),
    row("critic.cliprange_value", "value_clip", _critic("value_clip", _value("value_clip")),
        default=0.5),
    row("critic.model.path", "critic_load",
        _critic("critic_load", lambda it: {"critic_load": model(it)["hf_checkpoint"]})),
    lacking("critic.ppo_epochs", "each rollout is trained once", 1),
    needless("critic.enable", "--advantage-estimator ppo has a critic"),
    needless("critic.*", _OF_CRITIC),
)
WORKERS = (*_ACTOR, *_OPTIMIZER, *_MEGATRON, *_REFERENCE, *_MODEL, *_ENGINES, *_CRITIC)
"""Rows of ``actor_rollout_ref`` and ``critic``."""
