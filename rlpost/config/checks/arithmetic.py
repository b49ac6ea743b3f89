"""Arithmetic checks of the settings: what can be known wrong from numbers alone.

In: a ``Config`` and, where there is one, the model's own ``config.json``. Out: one line for each problem with the
arithmetic shown. Pure but for the file of --eval-config, which holds settings; ``rlpost.check`` adds the checks that
read other files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlpost.config.tree import Config
from rlpost.errors import ConfigError

EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")
"""Where families write the number of experts."""


def layout_problems(config: Config) -> list[str]:
    """Nodes, GPUs and parallel sizes that do not fit together."""
    cluster = config.cluster
    problems = []
    if config.actor_num_nodes > config.num_nodes:
        problems.append(
            f"cluster.actor_num_nodes = {config.actor_num_nodes}: the run has only cluster.nodes = {config.num_nodes}; "
            f"lower it or raise --nodes"
        )
    if cluster.actor_num_gpus_per_node > cluster.num_gpus_per_node:
        problems.append(
            f"cluster.actor_num_gpus_per_node = {cluster.actor_num_gpus_per_node}: a node has only "
            f"cluster.num_gpus_per_node = {cluster.num_gpus_per_node}"
        )
    if cluster.colocate and config.sglang.rollout_external_engine_addrs:
        problems.append(
            "cluster.colocate = true: engines of sglang.rollout_external_engine_addrs are not on the trainer's GPUs; "
            "leave one of them out"
        )
    problems += parallel_problems(config)
    per_engine = cluster.rollout_num_gpus_per_engine
    generate = "the GPUs that train (colocate)" if cluster.colocate else "cluster.rollout_num_gpus"
    if config.rollout_num_gpus % per_engine:
        problems.append(
            f"cluster.rollout_num_gpus_per_engine = {per_engine} does not divide {generate} = "
            f"{config.rollout_num_gpus}; choose {_choices(config.rollout_num_gpus)}"
        )
    elif per_engine > cluster.num_gpus_per_node and per_engine % cluster.num_gpus_per_node:
        problems.append(
            f"cluster.rollout_num_gpus_per_engine = {per_engine} is more than a node and no multiple of "
            f"cluster.num_gpus_per_node = {cluster.num_gpus_per_node}; an engine takes whole nodes"
        )
    elif not problems and not cluster.colocate:
        problems += _room_problems(config)
    return problems


def parallel_problems(config: Config) -> list[str]:
    """Sizes of the trainer's layout that do not divide its GPUs, and settings that need each other."""
    perf, world = config.perf, config.actor_world_size
    problems = []
    left = world
    for key in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        size = getattr(perf, key)
        if left % size:
            of = "" if left == world else f", {left} of them for each part that other sizes cut"
            return [
                f"perf.{key} = {size} does not divide the {world} GPUs that train (actor_num_nodes "
                f"{config.actor_num_nodes} x actor_num_gpus_per_node {config.cluster.actor_num_gpus_per_node}{of}); "
                f"choose {_choices(left)}"
            ]
        left //= size
    expert_tensor = perf.expert_tensor_parallel_size or perf.tensor_model_parallel_size
    experts, stage = expert_tensor * perf.expert_model_parallel_size, world // perf.pipeline_model_parallel_size
    if stage % experts:
        problems.append(
            f"perf.expert_model_parallel_size = {perf.expert_model_parallel_size} x expert_tensor_parallel_size = "
            f"{expert_tensor} does not divide the {stage} GPUs of a pipeline stage; choose a product of "
            f"{_choices(stage)}"
        )
    return problems + _needs(config)


def _needs(config: Config) -> list[str]:
    """Settings that only work with others."""
    perf = config.perf
    tensor, uneven = perf.tensor_model_parallel_size, "decoder_first_pipeline_num_layers or ..._last_..."
    is_uneven = (perf.decoder_first_pipeline_num_layers or perf.decoder_last_pipeline_num_layers) is not None
    interleaved = perf.num_layers_per_virtual_pipeline_stage is not None
    full = perf.recompute_granularity == "full"
    given = (perf.recompute_method is not None, perf.recompute_num_layers is not None)
    rules = [
        (perf.sequence_parallel and tensor == 1, "sequence_parallel = True", "tensor_model_parallel_size of 2 or more"),
        (
            perf.expert_model_parallel_size > 1 and tensor > 1 and not perf.sequence_parallel,
            f"expert_model_parallel_size = {perf.expert_model_parallel_size}, tensor_model_parallel_size = {tensor}",
            "sequence_parallel = true",
        ),
        (
            interleaved and perf.pipeline_model_parallel_size == 1,
            f"num_layers_per_virtual_pipeline_stage = {perf.num_layers_per_virtual_pipeline_stage}",
            "pipeline_model_parallel_size of 2 or more",
        ),
        (is_uneven and perf.pipeline_model_parallel_size == 1, uneven, "pipeline_model_parallel_size of 2 or more"),
        (is_uneven and interleaved, uneven, "num_layers_per_virtual_pipeline_stage not to be given"),
        (full and not all(given), "recompute_granularity = full", "recompute_method and recompute_num_layers"),
        (not full and any(given), "recompute_method and recompute_num_layers", "recompute_granularity = full"),
        (
            perf.overlap_param_gather and not (perf.use_distributed_optimizer and perf.overlap_grad_reduce),
            "overlap_param_gather = True",
            "use_distributed_optimizer and overlap_grad_reduce",
        ),
        (
            perf.log_probs_max_tokens_per_gpu is not None and not perf.use_dynamic_batch_size,
            f"log_probs_max_tokens_per_gpu = {perf.log_probs_max_tokens_per_gpu}",
            "use_dynamic_batch_size = true",
        ),
    ]
    return [f"perf.{given} needs perf.{needed}" for broken, given, needed in rules if broken]


def _room_problems(config: Config) -> list[str]:
    cluster = config.cluster
    free = [
        cluster.num_gpus_per_node - (cluster.actor_num_gpus_per_node if node < config.actor_num_nodes else 0)
        for node in range(config.num_nodes)
    ]
    size, a_node = cluster.rollout_num_gpus_per_engine, cluster.num_gpus_per_node
    whole = sum(gpus == a_node for gpus in free)
    fits = sum(gpus // size for gpus in free) if size <= a_node else whole * a_node // size
    if fits >= config.num_engines:
        return []
    return [
        f"cluster.rollout_num_gpus = {cluster.rollout_num_gpus} needs {config.num_engines} engines of "
        f"{cluster.rollout_num_gpus_per_engine} GPUs, but beside the trainer the {config.num_nodes} nodes have room "
        f"for {fits} (free GPUs a node: {', '.join(map(str, free))}); lower it or raise --nodes or --num-gpus-per-node"
    ]


def batch_problems(config: Config) -> list[str]:
    """Batch sizes that do not fit together or do not spread evenly over the data-parallel ranks."""
    rollout = config.rollout
    samples, steps = config.samples_per_rollout, config.num_steps_per_rollout
    shown = f"rollout_batch_size {rollout.rollout_batch_size} x n_samples_per_prompt {rollout.n_samples_per_prompt}"
    problems = []
    given = rollout.global_batch_size
    if samples % steps or (given is not None and given * steps != samples):
        problems.append(
            f"rollout.global_batch_size = {given} and num_steps_per_rollout = {steps} must multiply to the "
            f"{samples} samples of a rollout ({shown})"
        )
    elif not layout_problems(config) and (samples // steps) % (config.data_parallel_size * config.micro_batch_multiple):
        rounds = (
            f", in rounds of {config.micro_batch_multiple} micro-batches" if config.micro_batch_multiple > 1 else ""
        )
        problems.append(
            f"{samples // steps} samples an optimizer step ({shown} / {steps} steps) do not spread evenly over "
            f"{config.data_parallel_size} data-parallel ranks{rounds}; change one of them"
        )
    if config.perf.use_dynamic_batch_size and config.perf.max_tokens_per_gpu is None:
        problems.append("perf.use_dynamic_batch_size = True needs perf.max_tokens_per_gpu (tokens of a micro-batch)")
    if config.grpo.kl_loss_coef and not config.grpo.use_kl_loss:
        problems.append(f"grpo.kl_loss_coef = {config.grpo.kl_loss_coef} needs grpo.use_kl_loss = true")
    compares = config.grpo.loss_type != "sft_loss" and config.grpo.custom_advantage_function_path is None
    if compares and rollout.n_samples_per_prompt == 1 and config.grpo.advantage_estimator != "reinforce_plus_plus":
        problems.append(
            f"rollout.n_samples_per_prompt = 1: {config.grpo.advantage_estimator} compares the answers to one prompt "
            "with each other and learns nothing from a single one; choose 2 or more"
        )
    return problems


def model_problems(config: Config, hf_config: Mapping[str, Any]) -> list[str]:
    """Sizes of the model, as in its ``config.json``, that its layout does not divide; once the layout fits the GPUs."""
    if layout_problems(config):
        return []
    perf = config.perf
    tensor = "perf.tensor_model_parallel_size", perf.tensor_model_parallel_size
    cut = [(tensor, key) for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size")]
    experts = next((key for key in EXPERT_KEYS if key in hf_config), None)
    if experts is not None:
        expert_tensor = perf.expert_tensor_parallel_size or perf.tensor_model_parallel_size
        cut.append((("perf.expert_model_parallel_size", perf.expert_model_parallel_size), experts))
        cut.append((("perf.expert_tensor_parallel_size", expert_tensor), "moe_intermediate_size"))
    problems = _layer_problems(config, hf_config.get("num_hidden_layers"))
    if experts is None and perf.expert_model_parallel_size > 1:
        problems.append(
            f"perf.expert_model_parallel_size = {perf.expert_model_parallel_size}: the model has no experts"
        )
    for (name, divisor), key in cut:
        size = hf_config.get(key)
        if isinstance(size, int) and size % divisor:
            problems.append(f"{name} = {divisor} does not divide the model's {key} = {size}; choose {_choices(size)}")
    return problems


def _layer_problems(config: Config, num_layers: int | None) -> list[str]:
    perf = config.perf
    first, last = perf.decoder_first_pipeline_num_layers, perf.decoder_last_pipeline_num_layers
    uneven = [layers for layers in (first, last) if layers is not None]
    stages = perf.pipeline_model_parallel_size - len(uneven)
    per_chunk = perf.num_layers_per_virtual_pipeline_stage or 1
    if num_layers is None:
        return []
    rest = num_layers - sum(uneven)
    if rest < 0 or (rest > 0) != (stages > 0) or (stages > 0 and rest % (stages * per_chunk)):
        taken = f" less {' and '.join(map(str, uneven))}" if uneven else ""
        chunks = f" in chunks of {per_chunk}" if per_chunk > 1 else ""
        return [
            f"perf.pipeline_model_parallel_size = {perf.pipeline_model_parallel_size}: the model's num_hidden_layers = "
            f"{num_layers}{taken} cannot be shared evenly by {stages} stages{chunks}; change one of them"
        ]
    return []


def rollout_problems(config: Config) -> list[str]:
    """Settings of the rollout that contradict each other."""
    rollout = config.rollout
    problems = []
    over = rollout.over_sampling_batch_size
    if over is not None and over < rollout.rollout_batch_size:
        problems.append(
            f"rollout.over_sampling_batch_size = {over} is less than rollout.rollout_batch_size = "
            f"{rollout.rollout_batch_size}; it is the number of prompts started to get that many groups"
        )
    if rollout.rollout_mode != "sync" and config.cluster.colocate:
        problems.append(
            f"rollout.rollout_mode = {rollout.rollout_mode} generates while the trainer trains; with cluster.colocate "
            "= True they take turns on the same GPUs: use sync, or leave --colocate out"
        )
    if over is not None and rollout.rollout_mode == "fully_async":
        problems.append(
            f"rollout.over_sampling_batch_size = {over} says nothing with rollout.rollout_mode = fully_async, where "
            "rollout.max_staleness bounds how much is generated ahead"
        )
    if rollout.max_staleness is not None and rollout.rollout_mode != "fully_async":
        problems.append(
            f"rollout.max_staleness = {rollout.max_staleness} says nothing with rollout.rollout_mode = "
            f"{rollout.rollout_mode}; it is for fully_async"
        )
    if rollout.mask_offpolicy_in_partial_rollout and not rollout.partial_rollout and rollout.rollout_mode == "sync":
        problems.append("rollout.mask_offpolicy_in_partial_rollout = True needs rollout.partial_rollout = True")
    return problems


def eval_problems(config: Config) -> list[str]:
    """Evaluation settings that contradict each other, or a file of sets that cannot be used."""
    pairs, file = config.eval.eval_prompt_data, config.eval.eval_config
    if len(pairs) % 2 and len(pairs) > 1:
        return [f"eval.eval_prompt_data = {list(pairs)}: needs pairs NAME PATH or one PATH, got {len(pairs)} words"]
    if pairs and file is not None:
        return [f"eval.eval_config = {file} and eval.eval_prompt_data both name sets; give one of them"]
    if config.eval.eval_interval is not None and not pairs and file is None:
        return [
            f"eval.eval_interval = {config.eval.eval_interval} needs eval.eval_prompt_data (pairs NAME PATH) or "
            "eval.eval_config"
        ]
    try:
        names = [name for name, _ in config.eval_sets]
    except ConfigError as error:
        return str(error).splitlines()
    twice = next((name for name in names if names.count(name) > 1), None)
    return [] if twice is None else [f"eval.eval_prompt_data: two sets are called {twice}; give each a NAME of its own"]


def debug_problems(config: Config) -> list[str]:
    """Recorded rollouts without a place for the step; debugging one half with what the other half makes."""
    debug = config.debug
    problems = [
        f"debug.{key} = {path!r} needs '{{rollout_id}}' in it: there is one file a step"
        for key in ("save_debug_rollout_data", "load_debug_rollout_data")
        if (path := getattr(debug, key)) is not None and "{rollout_id}" not in path
    ]
    if debug.debug_train_only and debug.load_debug_rollout_data is None:
        problems.append("debug.debug_train_only = True needs debug.load_debug_rollout_data: what to train on")
    if debug.debug_rollout_only and (debug.debug_train_only or debug.load_debug_rollout_data is not None):
        problems.append("debug.debug_rollout_only = True generates; it goes with neither of the other two")
    return problems


def _choices(number: int) -> str:
    divisors = [str(d) for d in range(1, number + 1) if number % d == 0][:12]
    return divisors[0] if len(divisors) == 1 else f"{', '.join(divisors[:-1])} or {divisors[-1]}"
