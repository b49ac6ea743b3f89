"""Check the layout of trainer and engines: parallel sizes against GPUs, layers and heads.

Input: a ``Config`` and, if available, the model's ``config.json``.
Output: one line for each problem, with the arithmetic and valid values. Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from common.fleet_name import POLICY
from common.units import counted
from rlpost.config import extensions
from rlpost.config.engine_groups import engines_to_place
from rlpost.config.engine_nodes import nodes_for, num_that_fit
from rlpost.config.flags import flag
from rlpost.config.plan.shape import Shape
from rlpost.config.tree import Config
from rlpost.config.wording import divisors, listed, nearest, spelled, value_of, with_values
from rlpost.models.model_types import EXPERT_KEYS, HfConfig

TENSOR, PIPELINE, CONTEXT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
)
EXPERT, EXPERT_TENSOR = "expert_model_parallel_size", "expert_tensor_parallel_size"
FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
_SHORT = {TENSOR: "TP", PIPELINE: "PP", CONTEXT: "CP"}
_MORE_NODES = 64
"""Additional nodes to try in the search for a remedy."""


def layout_problems(config: Config) -> list[str]:
    """Inconsistent nodes, GPUs and parallel sizes."""
    cluster = config.cluster
    problems = []
    if config.actor_num_nodes > config.num_nodes:
        problems.append(_too_many_nodes(config))
    elif cluster.actor_num_gpus_per_node > cluster.num_gpus_per_node:
        problems.append(
            f"{spelled(config, 'actor_num_gpus_per_node')} is more than {spelled(config, 'num_gpus_per_node')}; use "
            f"--actor-num-gpus-per-node {cluster.num_gpus_per_node} or --num-gpus-per-node "
            f"{cluster.actor_num_gpus_per_node}"
        )
    else:
        problems += parallel_problems(config)
    if cluster.colocate and config.sglang.rollout_external_engine_addrs:
        problems.append(
            f"--colocate true with {spelled(config, 'rollout_external_engine_addrs')}: external engines "
            "do not run on the trainer's GPUs; use --colocate false, or leave the addresses out"
        )
    size, a_node = cluster.rollout_num_gpus_per_engine, cluster.num_gpus_per_node
    if config.rollout_num_gpus % size or (size > a_node and size % a_node):
        problems.append(_engine_size(config))
    elif not problems and not cluster.colocate:
        problems += _room_problems(config)
    return problems or group_room_problems(config) or _no_engine_problems(config)


def _no_engine_problems(config: Config) -> list[str]:
    """No engine in the run's own job, where no extension lets others join and checks that."""
    has_own = config.rollout_num_gpus or config.sglang.rollout_external_engine_addrs
    if has_own or config.grpo.is_supervised or extensions.joining_engines() is not None:
        return []
    return [
        f"{spelled(config, 'rollout_num_gpus')}: no engine is in the run's own job; use "
        f"--rollout-num-gpus {config.cluster.rollout_num_gpus_per_engine}"
    ]


def _too_many_nodes(config: Config) -> str:
    """More trainer nodes than nodes; either number may be the wrong one."""
    nodes, trains = config.num_nodes, config.actor_num_nodes
    line = f"{spelled(config, 'actor_num_nodes')} is more than {spelled(config, 'nodes')}"
    fewer = with_values(config, actor_num_nodes=nodes)
    if _fits(fewer):
        return f"{line}; use --nodes {trains} or --actor-num-nodes {nodes}"
    smaller = [f"--actor-num-nodes {nodes} {words}" for words in _smaller(fewer)]
    remedies = [f"--nodes {trains}", *smaller]
    if fewer.actor_world_size % config.model_parallel_size == 0:
        return f"{line}; use {listed(remedies)}"  # the experts do not fit into so few
    have = f"{nodes} nodes have" if nodes > 1 else "1 node has"
    return f"{line}, and {_product(config)} GPUs, but {have} {fewer.actor_world_size}; use {listed(remedies)}"


def _engine_size(config: Config) -> str:
    """Engine GPUs that are no multiple of an engine, or an engine that is no multiple of a node."""
    cluster = config.cluster
    size, a_node = cluster.rollout_num_gpus_per_engine, cluster.num_gpus_per_node
    generate = config.rollout_num_gpus
    sizes = [one for one in divisors(generate) if one <= a_node or one % a_node == 0]
    engine = spelled(config, "rollout_num_gpus_per_engine")
    if size > a_node and size % a_node:
        return (
            f"{engine} is more than a node and not a multiple of {spelled(config, 'num_gpus_per_node')}; an engine "
            f"of several nodes takes whole nodes; use {listed(sizes)}"
        )
    if cluster.colocate:
        return (
            f"{engine} does not divide the {generate} GPUs of the trainer, which the engines share with --colocate; "
            f"use {listed(sizes)}"
        )
    lower = generate // size * size
    totals = [total for total in (lower, lower + size) if total]
    also = f", or --rollout-num-gpus-per-engine {listed(sizes)}" if generate > 1 else ""
    return (
        f"{spelled(config, 'rollout_num_gpus')} is not a multiple of {engine}; use --rollout-num-gpus {listed(totals)}"
        f"{also}"
    )


def _fits(config: Config) -> bool:
    """Whether the parallel sizes divide the trainer GPUs."""
    perf, world = config.perf, config.actor_world_size
    expert_tensor = perf.expert_tensor_parallel_size or perf.tensor_model_parallel_size
    stage = world // perf.pipeline_model_parallel_size
    return (
        world % config.model_parallel_size == 0
        and stage % (expert_tensor * perf.expert_model_parallel_size) == 0
    )


def parallel_problems(config: Config) -> list[str]:
    """Parallel sizes that do not divide the trainer's GPUs, and missing companion settings."""
    perf, world = config.perf, config.actor_world_size
    if world % config.model_parallel_size:
        return [_world_problem(config)]
    problems = []
    expert_tensor = perf.expert_tensor_parallel_size or perf.tensor_model_parallel_size
    stage = world // perf.pipeline_model_parallel_size
    product = expert_tensor * perf.expert_model_parallel_size
    if stage % product:
        factor = EXPERT_TENSOR if perf.expert_tensor_parallel_size else TENSOR
        tried = [(key, _that_fit(config, key)) for key in (EXPERT, EXPERT_TENSOR)]
        remedies = [f"{flag(key)} {listed(sizes)}" for key, sizes in tried if sizes]
        problems.append(
            f"{spelled(config, EXPERT)} x {spelled(config, factor)} = {product} does not divide the {stage} GPUs of a "
            f"pipeline stage; use {remedies[0] if remedies else f'{flag(EXPERT)} 1 {flag(EXPERT_TENSOR)} 1'}"
        )
    return problems + _needs(config)


def _that_fit(config: Config, key: str) -> list[int]:
    """Values of a size that divide the GPUs and are compatible with --sequence-parallel."""
    least = 2 if key == TENSOR and config.perf.sequence_parallel else 1
    sizes = (size for size in divisors(config.actor_world_size) if size >= least)
    return [size for size in sizes if _fits(with_values(config, **{key: size}))]


def _product(config: Config) -> str:
    """``TP 8 x PP 4 x CP 2 = 64``, without sizes of 1."""
    sizes = {name: value_of(config, key) for key, name in _SHORT.items()}
    product = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    return f"{product} = {config.model_parallel_size}"


def _world_problem(config: Config) -> str:
    """A single size, or the product of all, does not divide the trainer's GPUs."""
    world = config.actor_world_size
    per_node = config.cluster.actor_num_gpus_per_node
    trains = f"{counted(config.actor_num_nodes, 'node')} x {per_node}"
    alone = [key for key in _SHORT if value_of(config, key) > 1]
    wrong = next((key for key in alone if world % value_of(config, key)), None)
    if wrong is not None and (choices := _that_fit(config, wrong)):
        line = (
            f"{spelled(config, wrong)} does not divide the {world} GPUs of the trainer ({trains}); "
            f"use {listed(choices)}"
        )
        gpus = _gpus_for(config, value_of(config, wrong))
        return f"{line}, or --actor-num-gpus-per-node {listed(gpus)}" if gpus else line
    remedies = [*_nodes_for(config), *_smaller(config)]
    if len(alone) > 1:
        line = f"{_product(config)} GPUs, but the trainer has {world} ({trains})"
    else:
        line = f"{spelled(config, alone[0])} does not divide the {world} GPUs of the trainer ({trains})"
    sizes = f"the sizes that {extensions.command('plan RECIPE --suggest')} lists"
    return f"{line}; use {listed(remedies or [sizes])}"


def _gpus_for(config: Config, size: int) -> list[int]:
    """The nearest GPUs per node that the layout divides; none if the size is the odd number."""
    cluster = config.cluster
    if _is_power_of_two(cluster.actor_num_gpus_per_node) or not _is_power_of_two(size):
        return []
    fit = []
    for number in range(1, cluster.num_gpus_per_node + 1):
        if _fits(with_values(config, actor_num_gpus_per_node=number)):
            fit.append(number)
    return nearest(fit, cluster.actor_num_gpus_per_node, 2)


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _smaller(config: Config) -> list[str]:
    """Flags that fix the layout by reducing one size as little as possible.

    The first and last stages of unequal ones have layers for that number of stages alone.
    """
    found = []
    is_uneven = value_of(config, FIRST) is not None or value_of(config, LAST) is not None
    for key in (*_SHORT, EXPERT):
        if key == PIPELINE and is_uneven:
            continue
        sizes = [size for size in _that_fit(config, key) if size < value_of(config, key)]
        found += [f"{flag(key)} {max(sizes)}"] if sizes else []
    return found


def _nodes_for(config: Config) -> list[str]:
    """Flags for the smallest larger number of nodes that the layout divides, if any."""
    cluster = config.cluster
    for nodes in range(config.actor_num_nodes + 1, config.actor_num_nodes + _MORE_NODES + 1):
        values = {"actor_num_nodes": nodes} if cluster.actor_num_nodes else {"nodes": nodes}
        if cluster.nodes is not None and cluster.nodes < nodes:
            values["nodes"] = nodes
        if _fits(with_values(config, **values)):
            return [" ".join(f"{flag(key)} {value}" for key, value in values.items())]
    return []


def _needs(config: Config) -> list[str]:
    """Settings that require others: (broken, message) for each rule."""
    perf = config.perf
    tensor, pipeline = perf.tensor_model_parallel_size, perf.pipeline_model_parallel_size
    uneven = [spelled(config, key) for key in (FIRST, LAST) if value_of(config, key) is not None]
    interleaved = perf.num_layers_per_virtual_pipeline_stage is not None
    chunk = spelled(config, "num_layers_per_virtual_pipeline_stage")
    full = perf.recompute_granularity == "full"
    recompute = {
        "recompute_method": "--recompute-method uniform",
        "recompute_num_layers": "--recompute-num-layers 1",
    }
    recompute_keys = [key for key in recompute if value_of(config, key) is not None]
    missing = [text for key, text in recompute.items() if key not in recompute_keys]
    gather_flags = ("use_distributed_optimizer", "overlap_grad_reduce")
    gather = [key for key in gather_flags if not value_of(config, key)]
    rules = [
        (
            perf.expert_model_parallel_size > 1 and tensor > 1 and not perf.sequence_parallel,
            f"{spelled(config, EXPERT)} with {spelled(config, TENSOR)} needs sequence parallelism; use "
            "--sequence-parallel true",
        ),
        (
            interleaved and pipeline == 1,
            f"{chunk} needs --pipeline-model-parallel-size 2 or more; use "
            "--num-layers-per-virtual-pipeline-stage none, or more stages",
        ),
        (
            bool(uneven) and pipeline == 1,
            f"{listed(uneven, 'and')} needs --pipeline-model-parallel-size 2 or more: the only stage has all "
            f"layers; {_without(uneven)}",
        ),
        (
            bool(uneven) and interleaved,
            f"{listed(uneven, 'and')} is incompatible with {chunk}: interleaved stages have equal sizes; "
            f"{_without(uneven)}, or --num-layers-per-virtual-pipeline-stage none",
        ),
        (
            full and len(recompute_keys) < len(recompute),
            f"--recompute-granularity full needs --recompute-method and --recompute-num-layers; add "
            f"{' '.join(missing)}",
        ),
        (
            not full and bool(recompute_keys),
            f"{listed([spelled(config, key) for key in recompute_keys], 'and')} needs --recompute-granularity full; "
            "add it, or leave the other flags out",
        ),
        (
            perf.overlap_param_gather and bool(gather),
            f"--overlap-param-gather true needs --use-distributed-optimizer and --overlap-grad-reduce; add "
            f"{' '.join(f'{flag(key)} true' for key in gather)}",
        ),
        (
            perf.log_probs_max_tokens_per_gpu is not None and not perf.use_dynamic_batch_size,
            f"{spelled(config, 'log_probs_max_tokens_per_gpu')} needs --use-dynamic-batch-size; add it with "
            "--max-tokens-per-gpu, or use --log-probs-max-tokens-per-gpu none",
        ),
    ]
    return [problem for is_broken, problem in rules if is_broken]


def _without(uneven: Sequence[str]) -> str:
    return "use " + " ".join(f"{text.split()[0]} none" for text in uneven)


def group_room_problems(config: Config) -> list[str]:
    """Groups of engines that are no whole nodes, or without free GPUs next to the others."""
    a_node = config.cluster.num_gpus_per_node
    sizes = {
        name: group.gpus_per_engine(a_node)
        for name, group in config.engines.started.items()
        if group.num_placed
    }
    for name, size in sizes.items():
        if size > a_node and size % a_node:
            lower = size // a_node
            return [
                f"[engines.{name}] gpus = {size} is more than a node and not a multiple of "
                f"{spelled(config, 'num_gpus_per_node')}; an engine of several nodes takes whole nodes; "
                f"use nodes = {lower} or {lower + 1} instead of gpus"
            ]
    engines = engines_to_place(config)
    free = gpus_beside_trainer(config)
    fits = num_that_fit(free, [gpus for _, gpus in engines], a_node)
    if not sizes or fits == len(engines):
        return []
    counts = Counter(engines)
    terms = [
        f"{count} x {gpus} of {_spelled_group(name)}" for (name, gpus), count in counts.items()
    ]
    needed, offered = sum(gpus for _, gpus in engines), sum(free)
    enough = config.num_nodes + nodes_for(free, [gpus for _, gpus in engines], a_node)
    trains = config.actor_num_nodes
    also = "" if config.cluster.actor_num_nodes else f" --actor-num-nodes {trains}"
    return [
        f"{_spelled_group(engines[fits][0])}: engines need {' + '.join(terms)} = {needed} GPUs, and "
        f"next to the trainer {config.num_nodes} x {a_node} GPUs leave {offered} (free GPUs per node: "
        f"{', '.join(map(str, free))}); use --nodes {enough}{also}, or fewer engines or gpus"
    ]


def _spelled_group(name: str) -> str:
    return "the policy" if name == POLICY else f"[engines.{name}]"


def _room_problems(config: Config) -> list[str]:
    """Engines without free GPUs next to the trainer."""
    fits = _room(config)
    if fits >= config.num_engines:
        return []
    cluster = config.cluster
    size = cluster.rollout_num_gpus_per_engine
    remedies = [f"--rollout-num-gpus {fits * size}"] if fits else []
    trains = config.actor_num_nodes  # defaults to --nodes: keep it fixed while --nodes grows
    numbers = range(config.num_nodes + 1, config.num_nodes + _MORE_NODES + 1)
    tried = ((nodes, with_values(config, nodes=nodes, actor_num_nodes=trains)) for nodes in numbers)
    enough = next((nodes for nodes, other in tried if _room(other) >= other.num_engines), None)
    also = "" if cluster.actor_num_nodes else f" --actor-num-nodes {trains}"
    remedies += [f"--nodes {enough}{also}"] if enough else []
    fewer = cluster.actor_num_gpus_per_node // 2
    if not remedies and fewer:
        remedies = [f"fewer --actor-num-gpus-per-node, such as {fewer}"]
    free = ", ".join(map(str, gpus_beside_trainer(config)))
    nodes = "node has" if config.num_nodes == 1 else f"{config.num_nodes} nodes have"
    return [
        f"{spelled(config, 'rollout_num_gpus')} is {counted(config.num_engines, 'engine')} of "
        f"{counted(size, 'GPU')}, but next to the trainer the {nodes} capacity for {fits} "
        f"(free GPUs per node: {free}); use {listed(remedies)}"
    ]


def gpus_beside_trainer(config: Config) -> list[int]:
    """GPUs of each node that the trainer leaves."""
    cluster = config.cluster
    free = [cluster.num_gpus_per_node] * config.num_nodes
    for node in range(min(config.actor_num_nodes, config.num_nodes)):
        free[node] -= cluster.actor_num_gpus_per_node
    return free


def _room(config: Config) -> int:
    """Engines that fit on the free GPUs."""
    size, a_node = config.cluster.rollout_num_gpus_per_engine, config.cluster.num_gpus_per_node
    free = gpus_beside_trainer(config)
    if size <= a_node:
        return sum(gpus // size for gpus in free)
    return sum(gpus == a_node for gpus in free) * a_node // size


def model_problems(config: Config, hf_config: HfConfig) -> list[str]:
    """Sizes in ``config.json`` that the layout does not divide; none for an invalid layout."""
    if layout_problems(config):
        return []
    perf = config.perf
    tensor, expert_tensor = perf.tensor_model_parallel_size, perf.expert_tensor_parallel_size
    by_tensor: tuple[str, ...] = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    by_tensor += ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim")  # of latent attention
    sharded: list[tuple[str, int, tuple[str, ...]]] = [(TENSOR, tensor, by_tensor)]
    experts = next((key for key in EXPERT_KEYS if key in hf_config), None)
    problems = _layer_problems(config, hf_config.get("num_hidden_layers"))
    if experts is not None:
        ffn = "moe_intermediate_size"
        if ffn not in hf_config:
            ffn = "intermediate_size"
        by_expert = EXPERT_TENSOR if expert_tensor else TENSOR
        sharded.append((EXPERT, perf.expert_model_parallel_size, (experts,)))
        sharded.append((by_expert, expert_tensor or tensor, (ffn,)))
        # Megatron's MoELayer (0.16.1) raises in the first training step.
        if hf_config[experts] and tensor > 1 and not perf.sequence_parallel:
            problems.append(
                f"{spelled(config, TENSOR)} needs sequence parallelism, because the model has experts; use "
                "--sequence-parallel true"
            )
    elif perf.expert_model_parallel_size > 1:
        problems.append(
            f"{spelled(config, EXPERT)}: the model has no experts; use --expert-model-parallel-size 1"
        )
    for name, value, keys in sharded:
        sizes = {key: hf_config[key] for key in keys if isinstance(hf_config.get(key), int)}
        wrong = [f"{key} = {size}" for key, size in sizes.items() if size % value]
        if wrong:
            common = divisors(math.gcd(*sizes.values()))
            choices = [size for size in _that_fit(config, name) if size in common]
            problems.append(
                f"{spelled(config, name)} does not divide the model's {listed(wrong, 'and')}; use "
                f"{listed(choices) if choices else f'{flag(name)} 1 --sequence-parallel false'}"
            )
    return problems


def _layer_problems(config: Config, num_layers: int | None) -> list[str]:
    if num_layers is None or _shares_layers(config, num_layers):
        return []
    uneven = [key for key in (FIRST, LAST) if value_of(config, key) is not None]
    per_chunk = config.perf.num_layers_per_virtual_pipeline_stage or 1
    chunks = (
        f" in {spelled(config, 'num_layers_per_virtual_pipeline_stage')}" if per_chunk > 1 else ""
    )
    taken = f" less {' and '.join(spelled(config, key) for key in uneven)}" if uneven else ""
    tried = [uneven[0]] if uneven else [PIPELINE]
    if per_chunk > 1:
        tried.append("num_layers_per_virtual_pipeline_stage")
    remedies = []
    for key in tried:
        values = range(1, num_layers + 1)
        works = [one for one in values if _works(with_values(config, **{key: one}), num_layers)]
        if works:
            remedies.append(f"{flag(key)} {listed(nearest(works, value_of(config, key), 6))}")
    return [
        f"{spelled(config, PIPELINE)} does not divide the model's num_hidden_layers = {num_layers}{taken} "
        f"into equal stages{chunks}; use {listed(remedies) if remedies else '--pipeline-model-parallel-size 1'}"
    ]


def _works(config: Config, num_layers: int) -> bool:
    return _shares_layers(config, num_layers) and _fits(config) and not _needs(config)


def _shares_layers(config: Config, num_layers: int) -> bool:
    """Whether stages without a given size get equal numbers of layers, in whole chunks."""
    perf = config.perf
    uneven = [layers for key in (FIRST, LAST) if (layers := value_of(config, key)) is not None]
    stages = perf.pipeline_model_parallel_size - len(uneven)
    rest = num_layers - sum(uneven)
    if rest < 0 or (rest > 0) != (stages > 0):
        return False
    return stages <= 0 or rest % (stages * (perf.num_layers_per_virtual_pipeline_stage or 1)) == 0


COLD_MINUTES = 30
"""Above the first pass of gated delta nets on a cold cache: 639 s on 16 H20 (radixark/miles#3158)."""


def cold_start_note(config: Config, shape: Shape | None) -> str | None:
    """Note on collectives that end while a stage before still compiles; None if there is none."""
    minutes = config.cluster.distributed_timeout_minutes
    is_linear = shape is not None and shape.linear is not None
    if not is_linear or config.perf.pipeline_model_parallel_size == 1 or minutes >= COLD_MINUTES:
        return None
    return (
        f"--distributed-timeout-minutes {minutes}: the first passes of linear attention compile kernels, "
        f"for 10 minutes where no node has them, while the next pipeline stage waits; use {COLD_MINUTES}"
    )
