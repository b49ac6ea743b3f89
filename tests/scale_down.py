"""Scale a recipe down to one machine, to train its algorithm and layout in a test. Pure.

Algorithm and rollout stay the same; the model is a small one of the same family.

Input: the settings of a recipe, the config.json of its model in ``jobs/models``, the number of
training ranks, and a folder for the model. Output: the scaled settings and the scaled config.json,
with which ``tests.scaled_models`` writes the model.

Scaled down: the model (layers, widths, heads, experts, by powers of two, which keeps their ratios),
the parallel layout (to the number of ranks), engines and nodes, groups of engines, the batch, and lengths.

Replaced with the model: its folder, tokenizer, prompts, and the stop tokens and reward that match
them.

Unchanged: all other settings, such as advantages, losses and corrections, sampling, filtering,
truncation and partial rollouts, colocation, precision, recomputation, optimizer and its placement,
checkpoints.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rlpost.config.groups.engines import EngineGroup
from rlpost.config.model_file import DESCRIPTION, published_path, read_model
from rlpost.config.plan.shape import Layout, layout_of
from rlpost.config.tree import Config
from rlpost.extensions.fleet.fleet_table import FleetConfig
from rlpost.models.model_types import EXPERT_KEYS, HfConfig

HIDDEN, HEAD, HEADS, LAYERS, EXPERTS, TOPK = 128, 16, 8, 4, 8, 2
"""Sizes up to these are not scaled down (TOPK: the minimum after scaling)."""
WIDTH_MULTIPLE = 16
"""Divisor of every width, for tensor parallelism and FP8 blocks."""
FP8_BLOCK = (16, 16)
VOCAB = 64
"""Vocabulary size of the tokenizer that rlpost/extensions/fetching/tiny_model.py makes."""
PROMPTS, ANSWER = 4, 32
"""Upper limits of prompts per step and tokens per answer.

Batch and lengths are halved until they fit.
"""
PACKED = 8 * ANSWER
"""Minimum tokens of a micro-batch.

Prompts are not shortened, and several samples should still share a micro-batch: without a GPU its
cost is the latency of the collectives, which does not depend on the tokens.
"""
ENGINES = 2
OBJECT_STORE = 100_000_000
MODEL, MODEL_FP8, TRAIN, HELDOUT = "model", "model-FP8", "train.jsonl", "heldout.jsonl"
ONE_ENGINE_S = (
    "enable_dp_attention",
    "enable_dp_lm_head",
    "dp_size",
    "ep_size",
    "moe_dense_tp_size",
)
"""Options of SGLang that distribute an engine over its GPUs; unset for an engine with one GPU."""
LENGTHS = (
    "rollout.rollout_max_response_len", "rollout.rollout_max_context_len", "rollout.rollout_max_prompt_len",
    "eval.eval_max_response_len", "perf.max_tokens_per_gpu", "perf.log_probs_max_tokens_per_gpu",
)  # fmt: skip
BATCHES = (
    "rollout.rollout_batch_size",
    "rollout.over_sampling_batch_size",
    "rollout.global_batch_size",
)

Values = dict[str, Any]
ROOT = Path(__file__).parents[1]


def scale_down(config: Config, folder: Path, *, ranks: int, kept: Collection[str] = ()) -> Config:
    """Return the settings of a run with at most ``ranks`` training ranks on one node.

    Args:
        config: the recipe.
        folder: the folder of its scaled-down model and of the problems.
        ranks: number of training ranks.
        kept: ``group.key`` of settings given for this run, which are not changed.
    """
    layout = folded(layout_of(config), ranks)
    values = _layout_values(config, layout)
    values |= _cluster_values(config, layout, given_gpus="cluster.rollout_num_gpus" in kept)
    values |= _batch_values(config)
    values |= _assets(config, folder)
    values |= _group_values(config, folder)
    return _changed(config, {name: value for name, value in values.items() if name not in kept})


def published_model(config: Config) -> HfConfig:
    """Return the config.json in ``jobs/models`` that the recipe names."""
    assert config.checkpoint.model is not None
    return read_model(published_path(config.checkpoint.model))


def infers_in_fp8(config: Config) -> bool:
    """Whether the recipe's engines load weights in blocks of FP8."""
    return Path(config.checkpoint.hf_checkpoint).name.endswith("FP8")


def folded(layout: Layout, ranks: int) -> Layout:
    """Reduce a layout to at most ``ranks`` ranks.

    Sizes are halved in the order DP, CP, PP, TP, first down to 2, which preserves every kind of
    parallelism of the recipe as long as possible, then down to 1. Expert parallelism is not a
    factor of the product; its size is reduced until it divides the ranks of a stage.
    """
    data = max(1, layout.data)  # 0 where the recipe's own layout has more ranks than GPUs
    sizes = {
        "data": data,
        "context": layout.context,
        "pipeline": layout.pipeline,
        "tensor": layout.tensor,
    }
    for smallest in (2, 1):
        for name in sizes:
            while _product(sizes) > ranks and sizes[name] > smallest:
                sizes[name] = sizes[name] // 2 if sizes[name] % 2 == 0 else smallest
    world, tensor, pipeline = _product(sizes), sizes["tensor"], sizes["pipeline"]
    expert_tensor = min(layout.expert_tensor, tensor)
    expert = layout.expert
    while expert > 1 and (world // pipeline) % (expert * expert_tensor):
        expert = expert // 2 if expert % 2 == 0 else 1
    return Layout(
        world=world,
        tensor=tensor,
        pipeline=pipeline,
        context=sizes["context"],
        expert=expert,
        expert_tensor=expert_tensor,
        sequence_parallel=layout.sequence_parallel and tensor > 1,
        chunk=None if layout.chunk is None or pipeline == 1 else 1,
    )


def scaled_model(hf: HfConfig, layout: Layout) -> HfConfig:
    """Return config.json with scaled sizes, which those of ``layout`` divide."""
    hidden, heads, groups = (
        hf[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    while heads > HEADS and heads % 2 == groups % 2 == 0 and (groups // 2) % layout.tensor == 0:
        heads, groups = heads // 2, groups // 2
    factor = 1
    while hidden / factor > HIDDEN:
        factor *= 2
    chunks = layout.pipeline * (2 if layout.chunk else 1)
    num_layers = _halved(hf["num_hidden_layers"], max(LAYERS, chunks))
    if num_layers != hf["num_hidden_layers"]:
        num_layers = -(-num_layers // chunks) * chunks
    changed = {
        "num_hidden_layers": num_layers,
        "hidden_size": _width(hidden, factor),
        "intermediate_size": _width(hf["intermediate_size"], factor),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": _halved(hf["head_dim"], HEAD),
        "vocab_size": min(hf["vocab_size"], VOCAB),
    }
    if key := next((key for key in EXPERT_KEYS if key in hf), None):
        changed |= _experts(hf, key, layout, factor=factor, num_layers=num_layers)
    left_out = (DESCRIPTION, "max_position_embeddings")  # of the tiny model
    return {key: value for key, value in (hf | changed).items() if key not in left_out}


def _experts(hf: HfConfig, key: str, layout: Layout, *, factor: int, num_layers: int) -> Values:
    experts, divisor = hf[key], 1
    while experts > EXPERTS and experts % 2 == 0 and (experts // 2) % layout.expert == 0:
        experts, divisor = experts // 2, divisor * 2
    topk = hf["num_experts_per_tok"]
    made: Values = {
        key: experts,
        "num_experts_per_tok": topk if divisor == 1 else max(TOPK, topk // divisor),
        "moe_intermediate_size": _width(hf["moe_intermediate_size"], factor),
    }
    if dense := hf.get("first_k_dense_replace"):
        made["first_k_dense_replace"] = max(1, dense * num_layers // hf["num_hidden_layers"])
    return made


def _width(size: int, factor: int) -> int:
    return size if factor == 1 else -(-size // (factor * WIDTH_MULTIPLE)) * WIDTH_MULTIPLE


def _halved(size: int, limit: int) -> int:
    """Halve the size, rounding up, until it is at most the limit."""
    while size > limit:
        size = -(-size // 2)
    return size


def _product(sizes: Mapping[str, int]) -> int:
    return sizes["data"] * sizes["context"] * sizes["pipeline"] * sizes["tensor"]


def _layout_values(config: Config, layout: Layout) -> Values:
    given = config.perf.expert_tensor_parallel_size
    return {
        "perf.tensor_model_parallel_size": layout.tensor,
        "perf.sequence_parallel": layout.sequence_parallel,
        "perf.pipeline_model_parallel_size": layout.pipeline,
        "perf.num_layers_per_virtual_pipeline_stage": layout.chunk,
        "perf.decoder_first_pipeline_num_layers": None,
        "perf.decoder_last_pipeline_num_layers": None,
        "perf.context_parallel_size": layout.context,
        "perf.expert_model_parallel_size": layout.expert,
        "perf.expert_tensor_parallel_size": None if given is None else layout.expert_tensor,
    }


def _cluster_values(config: Config, layout: Layout, *, given_gpus: bool) -> Values:
    """One node, with the recipe's number of engines but at most ``ENGINES``.

    ``given_gpus``: ``rollout_num_gpus`` is given for this run: the node has an engine on each.
    """
    cluster = config.cluster
    fleet = config.table(FleetConfig)
    has_fleet = bool(fleet.engines or fleet.min_engines)
    engines = min(config.num_engines or int(has_fleet), ENGINES)
    if cluster.colocate:
        engines = next((count for count in range(engines, 0, -1) if layout.world % count == 0), 0)
    elif given_gpus:
        engines = cluster.rollout_num_gpus
    size = layout.world // engines if cluster.colocate and engines else 1
    generates = 0 if cluster.colocate else engines * size
    values = {
        "cluster.nodes": 1,
        "cluster.spare_nodes": 0,
        "cluster.num_gpus_per_node": layout.world + generates + len(config.engines.started),
        "cluster.actor_num_nodes": 1,
        "cluster.actor_num_gpus_per_node": layout.world,
        "cluster.rollout_num_gpus_per_engine": size,
        "cluster.container": "none",
        "cluster.container_image": None,
        "cluster.container_mounts": (),
        "cluster.preflight_bandwidth_gbps": None,
        "fleet.engines": 0,  # one machine has no further jobs
        "fleet.min_engines": 0,
        "cluster.ray_object_store_memory": min(
            cluster.ray_object_store_memory or OBJECT_STORE, OBJECT_STORE
        ),
    }
    if generates:
        values["cluster.rollout_num_gpus"] = generates
    return values | _engine_options(config, size)


def _engine_options(config: Config, size: int) -> Values:
    given = config.sglang.server_args
    values: Values = {}
    for name in ONE_ENGINE_S:
        if name not in given:
            continue
        value = given[name]
        if size == 1:
            scaled = None
        elif type(value) is int:  # not bool
            scaled = min(value, size)
        else:
            scaled = True
        values[f"sglang.sglang_{name}"] = scaled
    return values


def _batch_values(config: Config) -> Values:
    """Divide all batch sizes by one factor, and all lengths by another."""
    batches = {name: value for name in BATCHES if (value := _get(config, name)) is not None}
    prompts, smaller = batches["rollout.rollout_batch_size"], 1
    while prompts // smaller > PROMPTS and all(
        value % (2 * smaller) == 0 for value in batches.values()
    ):
        smaller *= 2
    lengths = {name: value for name in LENGTHS if (value := _get(config, name)) is not None}
    shorter = 1
    while lengths["rollout.rollout_max_response_len"] // shorter > ANSWER:
        shorter *= 2
    values = {name: value // smaller for name, value in batches.items()}
    short = {name: -(-value // shorter) for name, value in lengths.items()}
    packs = {
        name: max(value, PACKED) for name, value in short.items() if name.endswith("tokens_per_gpu")
    }
    return values | short | (packs if shorter > 1 else {})


def _assets(config: Config, folder: Path) -> Values:
    """The files of ``tests.scaled_models``: a model, and arithmetic problems as prompts."""
    path = {name: str(folder / name) for name in (MODEL, MODEL_FP8, TRAIN, HELDOUT)}
    fp8 = infers_in_fp8(config)
    values: Values = {
        "checkpoint.model": None,
        "checkpoint.hf_checkpoint": path[MODEL_FP8] if fp8 else path[MODEL],
        "checkpoint.ref_load": path[MODEL] if config.checkpoint.ref_load or fp8 else None,
        "critic.critic_load": None,
        "rollout.prompt_data": (path[TRAIN],),
        "rollout.prompt_data_weights": (),
        "rollout.input_key": "prompt",
        "rollout.label_key": "label",
        "rollout.rollout_stop_token_ids": (),
        "rollout.rm_type": "exact_match",
    }
    if config.eval.eval_prompt_data:
        values["eval.eval_prompt_data"] = ("heldout", f"{path[HELDOUT]}@[0:{PROMPTS}]")
    return values


def _group_values(config: Config, folder: Path) -> Values:
    """One engine with one GPU and the scaled-down model for each group of engines."""
    groups = {
        name: EngineGroup(
            model=None if group.follows_policy else str(folder / MODEL),
            follows_policy=group.follows_policy,
            timeout_s=group.timeout_s,
            concurrency=group.concurrency,
        )
        for name, group in config.engines.started.items()
    }
    values: Values = {f"engines.{name}": group for name, group in groups.items()}
    if config.engines.groups and config.rollout.custom_rm_path:
        # A small untrained model gives no verdicts.
        values["rollout.custom_rm_path"] = f"{ROOT}/tests/e2e/judge.py:drawn"
    return values


def _get(config: Config, name: str) -> Any:
    group, key = name.split(".")
    return getattr(getattr(config, group), key, None)


def _changed(config: Config, values: Mapping[str, object]) -> Config:
    groups: dict[str, Values] = {}
    for name, value in values.items():
        group, key = name.split(".")
        groups.setdefault(group, {})[key] = value
    update = {}
    for group, entries in groups.items():
        node = getattr(config, group)
        given = {key: value for key, value in node if key not in entries}
        # a pass-through option of SGLang without a value is removed
        extra = set(node.model_extra or {})
        new = {
            key: value for key, value in entries.items() if value is not None or key not in extra
        }
        update[group] = type(node).model_validate(given | new)
    return config.model_copy(update=update)
