"""Keys of verl's engines and critic. Pure data."""

from __future__ import annotations

from rlpost.config.wording import value_text
from rlpost.extensions.importing.peers.common import eager, model, sglang_option
from rlpost.extensions.importing.peers.row import (
    Convert,
    Given,
    Needless,
    NotHere,
    Row,
    Settings,
    as_count,
    below,
    lacking,
    needless,
    row,
    same,
    when,
)
from rlpost.extensions.importing.peers.verl_keys import (
    ACTOR,
    ENGINE,
    numeric,
    steps_per_rollout,
    warmup,
)

_UNSET: tuple[object, ...] = ("constant", 0, 0.5, {}, "AdamW", "adam")
"""Values of a schedule and an optimizer that are verl's own defaults."""
_OF_CRITIC = "the critic has the layout and the optimizer of the policy (docs/ppo.md)"


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


def _critic(setting: str, convert: Convert) -> Convert:
    return when("algorithm.adv_estimator", "gae", "without gae there is no critic", convert)


def _as_policy(it: Given) -> Settings:
    """A key of the critic that the policy has too: both have one value here."""
    name = it.key.removeprefix("critic.")
    other = it.look(ACTOR + name)
    if other is None and name == "grad_clip":
        other = it.look(ACTOR + "optim.clip_grad")
    if it.value is None or same(it.value, other):
        raise Needless(_OF_CRITIC)
    if other is None and any(same(it.value, one) for one in _UNSET):
        raise Needless(_OF_CRITIC)
    own = "its own default" if other is None else value_text(other)
    raise NotHere(f"{_OF_CRITIC}: {name} {own}")


def _critic_share(it: Given) -> Settings:
    steps = it.look("critic.optim.lr_warmup_steps")
    if isinstance(steps, int) and steps > 0:
        raise Needless("lr_warmup_steps decides")
    if not it.number():
        raise Needless("off, as here")
    total = it.look("trainer.total_training_steps")
    if total is None:
        raise NotHere("a share of steps that epochs decide; use --critic-lr-warmup-iters")
    rollouts = int(it.number() * as_count("trainer.total_training_steps", total))
    return {"critic_lr_warmup_iters": rollouts * steps_per_rollout(it)}


def _buffer(it: Given) -> Settings:
    return {"update_weight_buffer_size": it.count() * 2**20}


_ENGINES: tuple[Row, ...] = (
    row(ENGINE + "n", "n_samples_per_prompt", default=1),
    needless(
        ENGINE + "name",
        "engines are SGLang's",
        "sglang",
        instead="engines are SGLang's; options of vLLM and TensorRT-LLM have no counterpart",
    ),
    needless(ENGINE + "mode", "generation is always asynchronous inside a rollout"),
    row(ENGINE + "temperature", "rollout_temperature", numeric("rollout_temperature"), default=1.0),
    row(ENGINE + "top_p", "rollout_top_p", numeric("rollout_top_p"), default=1),
    row(
        ENGINE + "top_k",
        "rollout_top_k",
        lambda it: {"rollout_top_k": it.count() or -1},
        default=-1,
    ),
    lacking(ENGINE + "do_sample", "use --rollout-temperature", True),
    row(ENGINE + "prompt_length", "", _as_data("data.max_prompt_length")),
    row(ENGINE + "response_length", "", _as_data("data.max_response_length")),
    row(
        ENGINE + "tensor_model_parallel_size",
        "rollout_num_gpus_per_engine",
        _engine_size,
        default=2,
    ),
    lacking(
        ENGINE + "data_parallel_size " + ENGINE + "pipeline_model_parallel_size",
        "use --rollout-num-gpus-per-engine and SGLang's options (docs/engines.md)",
        1,
        default=1,
    ),
    row(ENGINE + "expert_parallel_size", "sglang_ep_size", _expert_engines),
    row(
        ENGINE + "gpu_memory_utilization",
        "sglang_mem_fraction_static",
        note="verl passes it to SGLang under this name",
    ),
    row(ENGINE + "enforce_eager", "sglang_disable_cuda_graph", eager),
    row(ENGINE + "free_cache_engine", "offload_rollout", _free),
    row(
        ENGINE + "max_model_len",
        "rollout_max_context_len",
        lambda it: {"rollout_max_context_len": it.value},
        note="prompt and response",
    ),
    row(ENGINE + "max_num_seqs", "sglang_max_running_requests"),
    needless(
        ENGINE + "max_num_batched_tokens", "of vLLM; SGLang has --sglang-chunked-prefill-size"
    ),
    row(
        ENGINE + "enable_chunked_prefill",
        "sglang_chunked_prefill_size",
        lambda it: _off("", "on, as here")(it) and {"sglang_chunked_prefill_size": -1},
    ),
    row(
        ENGINE + "enable_prefix_caching",
        "sglang_disable_radix_cache",
        _off("sglang_disable_radix_cache", "on, as here"),
    ),
    row(
        ENGINE + "engine_kwargs.sglang.*",
        "",
        sglang_option,
        note="the option of SGLang of that name",
    ),
    needless(
        ENGINE
        + "engine_kwargs.* "
        + ENGINE
        + "engine_kwargs.vllm.* "
        + ENGINE
        + "engine_kwargs.trtllm.*",
        "options of another engine; SGLang's are --sglang-*",
    ),
    row(ENGINE + "val_kwargs.n", "n_samples_per_eval_prompt", default=1),
    row(
        ENGINE + "val_kwargs.temperature",
        "eval_temperature",
        numeric("eval_temperature"),
        default=0,
    ),
    row(ENGINE + "val_kwargs.top_p", "eval_top_p", numeric("eval_top_p"), default=1.0),
    row(
        ENGINE + "val_kwargs.top_k",
        "eval_top_k",
        lambda it: {"eval_top_k": it.count() or -1},
        default=-1,
    ),
    needless(ENGINE + "val_kwargs.do_sample", "val_kwargs.temperature decides, 0 is greedy"),
    row(
        ENGINE + "checkpoint_engine.update_weights_bucket_megabytes",
        "update_weight_buffer_size",
        _buffer,
        note="MiB there, bytes here",
    ),
    needless(ENGINE + "checkpoint_engine.*", "see --update-weight-transport"),
    row(ENGINE + "enable_rollout_routing_replay", "use_rollout_routing_replay"),
    lacking(ENGINE + "multi_turn.enable", "write an environment (docs/agents.md)", False),
    needless(
        ENGINE + "multi_turn.*", "of tools: an environment has its own settings (docs/agents.md)"
    ),
    lacking(
        ENGINE + "agent.default_agent_loop " + ENGINE + "agent.agent_loop_config_path",
        "write an environment (docs/agents.md), or --custom-generate-function-path",
        None,
        "single_turn_agent",
    ),
    needless(ENGINE + "agent.*", "of verl's agent loops (docs/agents.md)"),
    lacking(ENGINE + "over_sample_rate", "prompts in flight: --over-sampling-batch-size", 0),
    lacking(ENGINE + "ignore_eos", "a response ends at the end of sequence", False),
    lacking(
        ENGINE + "quantization",
        "engines generate in FP8 with an --hf-checkpoint in FP8 blocks",
        None,
    ),
    lacking(ENGINE + "nnodes", "engines of their own: leave --colocate out, --rollout-num-gpus", 0),
    lacking(ENGINE + "disaggregation.enabled", "engines prefill and decode", False),
    needless(ENGINE + "disaggregation.*", "engines prefill and decode"),
    lacking(ENGINE + "full_determinism", "use --sglang-enable-deterministic-inference", False),
    needless(ENGINE + "prometheus.*", "use --use-prometheus (docs/seeing.md)"),
    needless(ENGINE + "trace.*", "use --trace-steps (docs/seeing.md)"),
    needless(
        below(
            ENGINE,
            "calculate_log_probs dtype load_format layered_summon disable_log_stats "
            "skip_tokenizer_init multi_stage_wake_up cudagraph_capture_sizes "
            "logprobs_mode scheduling_policy seed use_shm quantization_config_file "
            "mtp n_gpus_per_node moe_load_balance_metrics_interval",
        ),
        "rlpost starts the engines itself (docs/engines.md)",
    ),
)


_CRITIC: tuple[Row, ...] = (
    row("critic.optim.lr", "critic_lr", _critic("critic_lr", numeric("critic_lr")), default=1e-5),
    row(
        "critic.optim.lr_warmup_steps",
        "critic_lr_warmup_iters",
        _critic("", warmup("critic_lr_warmup_iters")),
        note="rollouts there, optimizer steps here",
    ),
    row(
        "critic.cliprange_value",
        "value_clip",
        _critic("value_clip", numeric("value_clip")),
        default=0.5,
    ),
    row(
        "critic.model.path",
        "critic_load",
        _critic("critic_load", lambda it: {"critic_load": model(it)["hf_checkpoint"]}),
    ),
    row(
        "critic.optim.lr_warmup_steps_ratio",
        "critic_lr_warmup_iters",
        _critic("", _critic_share),
        note="a share of total_training_steps there, optimizer steps here",
    ),
    row(
        below(
            "critic.",
            "ppo_mini_batch_size grad_clip loss_agg_mode optim.weight_decay optim.betas "
            "optim.clip_grad optim.optimizer optim.lr_scheduler_type optim.lr_decay_style "
            "optim.warmup_style optim.min_lr optim.min_lr_ratio optim.lr_warmup_init "
            "optim.lr_decay_steps optim.num_cycles optim.override_optimizer_config",
        ),
        "",
        _critic("", _as_policy),
        note="needless where it is the policy's value",
    ),
    lacking("critic.ppo_epochs", "each rollout is trained once", 1),
    needless("critic.enable", "--advantage-estimator ppo has a critic"),
    needless("critic.*", _OF_CRITIC),
)


ENGINES_ROWS = (*_ENGINES, *_CRITIC)
