"""Arithmetic checks of the settings, pure: what can be known wrong from numbers alone.

In: a ``Config`` and, where there is one, the model's own ``config.json``. Out: one line for each problem with the
arithmetic shown. ``rlpost.check`` adds the checks that read files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlpost.config.tree import Config


def layout_problems(config: Config) -> list[str]:
    """Nodes, GPUs and parallel sizes that do not fit together."""
    cluster, perf = config.cluster, config.perf
    problems = []
    if config.actor_num_nodes > cluster.nodes:
        problems.append(
            f"cluster.actor_num_nodes = {config.actor_num_nodes}: the run has only cluster.nodes = {cluster.nodes}; "
            f"lower it or raise --nodes"
        )
    if cluster.actor_num_gpus_per_node > cluster.num_gpus_per_node:
        problems.append(
            f"cluster.actor_num_gpus_per_node = {cluster.actor_num_gpus_per_node}: a node has only "
            f"cluster.num_gpus_per_node = {cluster.num_gpus_per_node}"
        )
    tensor, world = perf.tensor_model_parallel_size, config.actor_world_size
    if world % tensor:
        problems.append(
            f"perf.tensor_model_parallel_size = {tensor} does not divide the {world} GPUs that train (actor_num_nodes "
            f"{config.actor_num_nodes} x actor_num_gpus_per_node {cluster.actor_num_gpus_per_node}); "
            f"choose {_choices(world)}"
        )
    if perf.sequence_parallel and tensor == 1:
        problems.append("perf.sequence_parallel = True needs perf.tensor_model_parallel_size of 2 or more, got 1")
    per_engine = cluster.rollout_num_gpus_per_engine
    if cluster.rollout_num_gpus % per_engine:
        problems.append(
            f"cluster.rollout_num_gpus_per_engine = {per_engine} does not divide cluster.rollout_num_gpus = "
            f"{cluster.rollout_num_gpus}; choose {_choices(cluster.rollout_num_gpus)}"
        )
    elif not problems:
        problems += _room_problems(config)
    return problems


def _room_problems(config: Config) -> list[str]:
    cluster = config.cluster
    free = [
        cluster.num_gpus_per_node - (cluster.actor_num_gpus_per_node if node < config.actor_num_nodes else 0)
        for node in range(cluster.nodes)
    ]
    fits = sum(gpus // cluster.rollout_num_gpus_per_engine for gpus in free)
    if fits >= config.num_engines:
        return []
    return [
        f"cluster.rollout_num_gpus = {cluster.rollout_num_gpus} needs {config.num_engines} engines of "
        f"{cluster.rollout_num_gpus_per_engine} GPUs, but beside the trainer the {cluster.nodes} nodes have room for "
        f"{fits} (free GPUs a node: {', '.join(map(str, free))}); lower it or raise --nodes or --num-gpus-per-node"
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
    elif not layout_problems(config) and (samples // steps) % config.data_parallel_size:
        problems.append(
            f"{samples // steps} samples an optimizer step ({shown} / {steps} steps) do not spread evenly over "
            f"{config.data_parallel_size} data-parallel ranks; change one of them"
        )
    if config.perf.use_dynamic_batch_size and config.perf.max_tokens_per_gpu is None:
        problems.append("perf.use_dynamic_batch_size = True needs perf.max_tokens_per_gpu (tokens of a micro-batch)")
    if rollout.n_samples_per_prompt == 1:
        problems.append(
            "rollout.n_samples_per_prompt = 1: GRPO compares the answers to one prompt with each other and learns "
            "nothing from a single one; choose 2 or more"
        )
    return problems


def model_problems(config: Config, hf_config: Mapping[str, Any]) -> list[str]:
    """Sizes of the model, as in its ``config.json``, that tensor parallelism does not divide; once the layout fits."""
    if layout_problems(config):
        return []
    tensor = config.perf.tensor_model_parallel_size
    sizes = {key: hf_config.get(key) for key in ("num_attention_heads", "num_key_value_heads", "vocab_size")}
    return [
        f"perf.tensor_model_parallel_size = {tensor} does not divide the model's {key} = {size}; "
        f"choose {_choices(size)}"
        for key, size in sizes.items()
        if isinstance(size, int) and size % tensor
    ]


def eval_problems(config: Config) -> list[str]:
    """Evaluation settings that contradict each other."""
    pairs = config.eval.eval_prompt_data
    if len(pairs) % 2:
        return [f"eval.eval_prompt_data = {list(pairs)}: needs pairs NAME PATH, got {len(pairs)} words"]
    if config.eval.eval_interval is not None and not pairs:
        return [f"eval.eval_interval = {config.eval.eval_interval} needs eval.eval_prompt_data (pairs NAME PATH)"]
    return []


def debug_problems(config: Config) -> list[str]:
    """Paths of recorded rollouts without a place for the step."""
    return [
        f"debug.{key} = {path!r} needs '{{rollout_id}}' in it: there is one file a step"
        for key, path in config.debug.model_dump().items()
        if path is not None and "{rollout_id}" not in path
    ]


def _choices(number: int) -> str:
    divisors = [str(d) for d in range(1, number + 1) if number % d == 0][:12]
    return divisors[0] if len(divisors) == 1 else f"{', '.join(divisors[:-1])} or {divisors[-1]}"
