"""Keys of verl's actor: batches, losses and optimizer. Pure data."""

from __future__ import annotations

from rlpost.extensions.importing.peers.common import megatron_option, optimizer_steps
from rlpost.extensions.importing.peers.row import (
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
from rlpost.extensions.importing.peers.verl_keys import (
    ACTOR,
    ENGINE,
    IMAGES,
    LAYOUT,
    MEGATRON,
    numeric,
    steps_per_rollout,
    trains_adapters,
    warmup,
)

OPTIM = ACTOR + "optim."


_LOSSES: dict[object, object] = {"vanilla": "ppo", "gspo": "gspo", "cispo": "cispo"}


_KL_TYPES: dict[object, object] = {
    "low_var_kl": "low_var_kl",
    "k3": "low_var_kl",
    "mse": "k2",
    "k2": "k2",
}


_MEANS: dict[object, object] = {"token-mean": True, "seq-mean-token-mean": False}


_IDLE = "engines and trainer offload their memory by themselves with --colocate"


def _batch(it: Given) -> Settings:
    return {"global_batch_size": it.count() * as_count(ENGINE + "n", it.look(ENGINE + "n"))}


def _warmup_share(it: Given) -> Settings:
    steps = it.look(OPTIM + "lr_warmup_steps")
    if isinstance(steps, int) and steps > 0:
        raise Needless("lr_warmup_steps decides")
    if not it.number():
        raise Needless("off, as here")
    return {"lr_warmup_fraction": it.number()}


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
        return {
            "calculate_per_token_loss": False
        }  # verl takes the mean of answers whatever this says
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


def _routes(it: Given) -> Settings:
    if it.value in ("disabled", None):
        raise Needless("off, as here")
    table = {"R2": "use_routing_replay", "R3": "use_rollout_routing_replay"}
    if str(it.value) not in table:
        raise NotHere("use --use-routing-replay or --use-rollout-routing-replay")
    return {table[str(it.value)]: True}


def _encoder(it: Given) -> Settings:
    if it.look(IMAGES) is None:
        raise Needless("of models that read images")
    if same(it.value, True) or trains_adapters(it):
        return {"vision_tower": "frozen"}
    return {"vision_tower": "all"}


def _optimizer(it: Given) -> Settings:
    name = str(it.value).lower()
    if name in ("adam", "adamw"):
        return {"optimizer": "adam"}
    if name == "muon":
        return {"optimizer": "muon"}
    raise NotHere("use --optimizer adam or muon")


_KL = ACTOR + "use_kl_loss"


_ACTOR: tuple[Row, ...] = (
    row(
        ACTOR + "ppo_mini_batch_size",
        "global_batch_size",
        _batch,
        note="prompts there, answers here: times rollout.n",
        default=256,
    ),
    row(
        ACTOR + "ppo_micro_batch_size_per_gpu",
        "micro_batch_size",
        _micro,
        note="without use_dynamic_bsz",
    ),
    lacking(
        ACTOR + "ppo_micro_batch_size",
        "it counts all GPUs; use --micro-batch-size, of one rank",
        None,
    ),
    row(ACTOR + "use_dynamic_bsz", "use_dynamic_batch_size", default=False),
    row(
        ACTOR + "ppo_max_token_len_per_gpu",
        "max_tokens_per_gpu",
        when(
            ACTOR + "use_dynamic_bsz",
            True,
            "use_dynamic_bsz is off",
            lambda it: {"max_tokens_per_gpu": it.count()},
        ),
        note="with use_dynamic_bsz",
        default=16384,
    ),
    needless(
        ACTOR + "clip_ratio",
        "verl reads clip_ratio_low and clip_ratio_high",
        0.2,
        instead="verl itself reads clip_ratio_low and clip_ratio_high, 0.2 by default",
    ),
    row(ACTOR + "clip_ratio_low", "eps_clip", numeric("eps_clip"), default=0.2),
    row(ACTOR + "clip_ratio_high", "eps_clip_high", numeric("eps_clip_high"), default=0.2),
    row(ACTOR + "clip_ratio_c", "eps_clip_c", _clip_c, note="with the loss vanilla", default=3.0),
    row(ACTOR + "policy_loss.loss_mode", "policy_loss", _policy_loss, default="vanilla"),
    needless(
        ACTOR + "policy_loss.* " + ACTOR + "tau_pos " + ACTOR + "tau_neg",
        "of a loss that rlpost lacks: see policy_loss.loss_mode",
    ),
    row(
        ACTOR + "loss_agg_mode",
        "calculate_per_token_loss",
        _mean,
        note="token-mean, seq-mean-token-mean",
        default="token-mean",
    ),
    lacking(ACTOR + "loss_scale_factor", "of seq-mean-token-sum-norm, which rlpost lacks", None),
    row(ACTOR + "entropy_coeff", "entropy_coef", numeric("entropy_coef"), default=0),
    row(_KL, "use_kl_loss", default=False),
    row(
        ACTOR + "kl_loss_coef",
        "kl_loss_coef",
        when(_KL, True, "use_kl_loss is off", numeric("kl_loss_coef")),
        note="with use_kl_loss",
        default=0.001,
    ),
    row(
        ACTOR + "kl_loss_type",
        "kl_loss_type",
        when(_KL, True, "use_kl_loss is off", _kl_type),
        note="low_var_kl or k3, mse",
        default="low_var_kl",
    ),
    lacking(ACTOR + "ppo_epochs", "each rollout is trained once", 1),
    lacking(ACTOR + "shuffle", "samples are trained in the order of their prompts", False),
    needless(ACTOR + "data_loader_seed", "of shuffle"),
    row(ACTOR + "grad_clip", "clip_grad", numeric("clip_grad")),
    row(
        ACTOR
        + "ulysses_sequence_parallel_size "
        + ACTOR
        + "fsdp_config.ulysses_sequence_parallel_size",
        "context_parallel_size",
        lambda it: {"context_parallel_size": it.count()},
        note="ranks that share a sequence",
    ),
    row(ACTOR + "checkpoint.save_contents", "no_save_optim", _checkpoint),
    row(ACTOR + "checkpoint.async_save", "async_save"),
    needless(ACTOR + "checkpoint.*", "rlpost writes torch_dist checkpoints"),
    row(
        ACTOR + "router_replay.mode " + MEGATRON + "router_replay.mode",
        "use_routing_replay use_rollout_routing_replay",
        _routes,
    ),
    lacking(
        ACTOR + "router_replay.* " + MEGATRON + "router_replay.*",
        "routes are not recorded to files",
        None,
    ),
    needless(
        ACTOR + "strategy",
        "the trainer is Megatron-core",
        "megatron",
        instead="the trainer is Megatron-core; sizes: rlpost plan --suggest",
    ),
    needless(
        ACTOR
        + "fsdp_config.param_offload "
        + ACTOR
        + "fsdp_config.optimizer_offload "
        + MEGATRON
        + "param_offload "
        + MEGATRON
        + "grad_offload "
        + MEGATRON
        + "optimizer_offload "
        + ACTOR
        + "fsdp_config.offload_policy",
        _IDLE,
    ),
    lacking(ACTOR + "fsdp_config.fsdp_size", LAYOUT, -1),
    needless(
        ACTOR + "fsdp_config.* *.fsdp_config.* *.turbo_config.* *.fsdp.* *.veomni.*",
        "of FSDP; the trainer is Megatron-core",
    ),
    needless(
        "*.use_torch_compile *.use_fused_kernels *.fused_kernel_options.* "
        "*.use_remove_padding *.entropy_from_logits_with_chunking "
        "*.entropy_from_logits_chunk_size *.entropy_checkpointing *.calculate_entropy "
        "*.calculate_sum_pi_squared *.use_prefix_grouper *.pad_to_length "
        "*.pad_to_length_bucket *.pad_bshd_to_minibatch_max *.rollout_n",
        "samples are packed, and log-probs are fused or computed in chunks",
    ),
    row(ACTOR + "freeze_vision_tower", "vision_tower", _encoder, default=False),
    lacking("*.qat.enable", "weights are not trained for a quantization", False),
    needless("*.qat.*", "of quantization-aware training"),
)


_OPTIMIZER: tuple[Row, ...] = (
    row(OPTIM + "lr", "lr", numeric("lr"), default=1e-6),
    row(
        OPTIM + "lr_warmup_steps",
        "lr_warmup_iters",
        warmup("lr_warmup_iters"),
        note="rollouts there, optimizer steps here",
    ),
    row(OPTIM + "lr_warmup_steps_ratio", "lr_warmup_fraction", _warmup_share),
    row(OPTIM + "weight_decay", "weight_decay", numeric("weight_decay"), default=0.01),
    row(OPTIM + "betas", "adam_beta1 adam_beta2", _betas, default=[0.9, 0.999]),
    row(OPTIM + "clip_grad", "clip_grad", numeric("clip_grad"), default=1.0),
    row(OPTIM + "optimizer", "optimizer", _optimizer),
    row(
        OPTIM + "lr_decay_style " + OPTIM + "lr_scheduler_type " + OPTIM + "warmup_style",
        "lr_decay_style",
        choice(
            "lr_decay_style",
            {name: name for name in ("constant", "linear", "cosine", "inverse-square-root", "WSD")}
            | {None: "constant"},
            "use --lr-decay-style",
        ),
    ),
    row(OPTIM + "min_lr", "min_lr", numeric("min_lr")),
    row(OPTIM + "min_lr_ratio", "min_lr", _min_lr, note="a share of lr"),
    row(OPTIM + "lr_warmup_init", "lr_warmup_init", numeric("lr_warmup_init")),
    row(
        OPTIM + "lr_decay_steps",
        "lr_decay_iters",
        optimizer_steps("lr_decay_iters", steps_per_rollout),
        note="rollouts there, optimizer steps here",
    ),
    row(
        OPTIM + "lr_wsd_decay_steps",
        "lr_wsd_decay_iters",
        optimizer_steps("lr_wsd_decay_iters", steps_per_rollout),
        note="rollouts there, optimizer steps here",
    ),
    row(OPTIM + "lr_wsd_decay_style", "lr_wsd_decay_style"),
    row(OPTIM + "weight_decay_incr_style", "weight_decay_incr_style"),
    row(OPTIM + "use_precision_aware_optimizer", "use_precision_aware_optimizer"),
    row(OPTIM + "main_grads_dtype", "main_grads_dtype"),
    row(OPTIM + "exp_avg_dtype", "exp_avg_dtype"),
    row(OPTIM + "exp_avg_sq_dtype", "exp_avg_sq_dtype"),
    needless(OPTIM + "total_training_steps", "it follows from the steps of the run"),
    row(
        OPTIM + "override_optimizer_config.*",
        "",
        megatron_option,
        note="the option of Megatron-core of that name",
    ),
    needless(OPTIM + "override_optimizer_config", "see its keys", None, {}),
    lacking(OPTIM + "num_cycles", "cosine is half a period", 0.5),
    needless(
        OPTIM
        + "optimizer_impl "
        + OPTIM
        + "zero_indexed_step "
        + OPTIM
        + "use_checkpoint_opt_param_scheduler",
        "the optimizer is Megatron-core's",
    ),
    lacking(
        OPTIM + "muon_* " + OPTIM + "use_layer_wise_distributed_optimizer",
        "Muon has other settings here: --muon-momentum, --muon-scale (docs/actor.md)",
    ),
)


ACTOR_ROWS = (*_ACTOR, *_OPTIMIZER)
