"""Check that the engines can load the model's weights, get updates of them, and compute the model.

Input: a ``Config`` and the model's ``config.json``. Output: one line for each problem. Pure.
"""

from __future__ import annotations

from common.fleet_name import POLICY
from rlpost.config.engine_args import attention_gpus
from rlpost.config.extensions import command
from rlpost.config.groups.perf import trains_in_blocks
from rlpost.config.plan.cards import capability_of
from rlpost.config.plan.hf_shape import hf_shape
from rlpost.config.tree import Config
from rlpost.config.wording import spelled, value_text
from rlpost.errors import WeightError
from rlpost.models.families import family_of
from rlpost.models.family import Family
from rlpost.models.fp8 import (
    BLOCKWISE,
    SIDE,
    WHOLE_CACHES,
    grid_of,
    has_other_shared_experts,
)
from rlpost.models.model_types import HfConfig
from rlpost.models.rope import rope

MXFP4, FP8 = "mxfp4", "fp8"
"""Values of ``quant_method`` whose weights the trainer reads; engines with the second take updates.
"""


def engine_model_problems(
    config: Config, hf: HfConfig, *, longest: int, ignored_window: int | None
) -> list[str]:
    """Return the problems of this model in the engines.

    Args:
        config: the settings.
        hf: the model's config.json.
        longest: tokens that a sequence of the run may have.
        ignored_window: the sliding window if SGLang's model of this architecture ignores it; None
            without a window, or with an engine that has it.
    """
    key = f"--hf-checkpoint {config.checkpoint.hf_checkpoint}"
    debug = config.debug
    generates = config.generates
    method = (hf.get("quantization_config") or {}).get("quant_method")
    problems = []
    if method not in (None, MXFP4, FP8):
        problems.append(
            f"{key}: its weights are quantised with {method}, which is not supported; use a "
            "checkpoint in bfloat16, or in FP8 blocks"
        )
    elif method == MXFP4 and generates and not debug.debug_rollout_only:
        problems.append(
            f"{key}: its weights are in MXFP4, and engines that load them cannot receive the "
            "trainer's updates in bfloat16; write the folder in bfloat16 with "
            "tools/convert_hf_to_torch_dist.py and tools/convert_torch_dist_to_hf.py, and use that"
        )
    if generates and method == FP8:
        problems += _fp8_problems(config, hf, key)
    if generates and config.megatron.options.get("fp8"):
        problems += _grids(config, hf, key)
    if generates and ignored_window is not None and longest > ignored_window:
        problems.append(
            f"{key}: its layers have a sliding window of {ignored_window} tokens, which SGLang "
            f"ignores for this model, and a sequence may have {longest} tokens; use a checkpoint "
            f"without use_sliding_window, or --rollout-max-context-len {ignored_window}"
        )
    known = family_of(hf)
    all_sparse = known is not None and known.engines_lack_dense_layers
    if generates and all_sparse and _dense_layers(hf):
        problems.append(
            f"{key}: layers {_dense_layers(hf)} have no experts (mlp_only_layers, "
            "decoder_sparse_step), and SGLang gives experts to every layer of this model; use a "
            "checkpoint with mlp_only_layers = [] and decoder_sparse_step = 1"
        )
    if generates and known is not None and known.engines_lack_nested_rotary_factor:
        problems += _rotary_factor_problems(known, hf, key)
    return problems


def _rotary_factor_problems(known: Family, hf: HfConfig, key: str) -> list[str]:
    """Return whether engines would rotate another part of each head than the file says."""
    name = "partial_rotary_factor"
    top = hf.get(name) or known.defaults[name]
    nested = rope(known.resolved(hf)).get(name)
    if nested in (None, top):
        return []
    return [
        f"{key}: {name} = {nested} in rope_parameters of its config.json, and SGLang reads {top} beside them; "
        f"write {name} = {nested} there, too"
    ]


def _fp8_problems(config: Config, hf: HfConfig, key: str) -> list[str]:
    """Return what engines with weights in FP8 blocks would compute wrongly."""
    problems, args = [], config.sglang.server_args
    cache, dtype = "--sglang-kv-cache-dtype", str(args.get("kv_cache_dtype"))
    known = family_of(hf)
    if known is not None and known.engines_lack_fp8_scales:
        problems.append(
            f"{key}: SGLang does not load the scales of FP8 blocks for this architecture; use a "
            "checkpoint in bfloat16"
        )
    if (
        config.offload_rollout
        and dtype.startswith("fp8")
        and not args.get("enable_weights_cpu_backup")
    ):
        problems.append(
            f"{cache} {dtype} with --offload-rollout and weights in FP8: engines release the "
            f"scales of the cache with their weights, and no update sends them; leave {cache} out, "
            "or add --sglang-enable-weights-cpu-backup"
        )
    gpu = capability_of(config.cluster.gpu_type)
    if gpu is not None and not grid_of(gpu).generates:
        problems.append(
            f"{key} with --gpu-type {config.cluster.gpu_type}: SGLang repacks weights in FP8 for kernels of "
            f"sm{gpu[0]}{gpu[1]}, and updates would not fit; use a checkpoint in bfloat16"
        )
    problems += _engine_shards(config, hf, key)
    if config.sync.update_weight_transport == "disk":
        problems.append(
            f"--update-weight-transport disk: {key} is in FP8, and files of updates have the trainer's "
            "precision; use memory"
        )
    if args.get("load_format") == "dummy":
        problems.append(
            "--sglang-load-format dummy with weights in FP8: scales of the cache, which no update "
            "sends, would be random; leave it out"
        )
    return problems


def _grids(config: Config, hf: HfConfig, key: str) -> list[str]:
    """Return what products in FP8 round differently from the weights and the cache of engines."""
    options, quantised = config.megatron.options, hf.get("quantization_config") or {}
    block = list(quantised.get("weight_block_size") or [])
    recipe = f"--fp8 {options['fp8']} with --fp8-recipe {options.get('fp8_recipe', 'delayed')}"
    dtype = str(config.sglang.server_args.get("kv_cache_dtype", "auto"))
    problems = []
    if dtype not in WHOLE_CACHES:
        problems.append(
            f"{recipe} and --sglang-kv-cache-dtype {dtype}: the trainer's attention does not round keys "
            "and values, so that log-probs differ; leave one of them out"
        )
    if not trains_in_blocks(options) or block != [SIDE, SIDE]:
        weights = "bfloat16"
        if quantised:
            weights = f"FP8 blocks of {' x '.join(map(str, block)) or 'another scheme'}"
        return [
            *problems,
            f"{recipe}: the trainer's products would round weights to another grid than the engines, "
            f"whose weights are in {weights} ({key}), so that their log-probs differ more than with a "
            f"trainer in bfloat16; leave --fp8 out, or use --fp8-recipe {BLOCKWISE} with a checkpoint in "
            f"blocks of {SIDE} x {SIDE} ({command('convert RECIPE --to fp8')})",
        ]
    if has_other_shared_experts(hf):
        problems.append(
            f"{recipe}: the trainer's products would round shared experts, which the engines have in "
            f"bfloat16 ({key}, modules_to_not_convert); leave --fp8 out"
        )
    if hf.get("linear_num_value_heads"):
        problems.append(
            f"{recipe}: linear attention computes in bfloat16 in the trainer, and the engines have its "
            f"projections in FP8 blocks ({key}); leave --fp8 out"
        )
    return problems + _parts_of_blocks(config, hf)


def _engine_shards(config: Config, hf: HfConfig, key: str) -> list[str]:
    """Return matrices whose shards SGLang would refuse, because they are not whole blocks.

    ``Fp8LinearMethod.validate_block_quant_shapes`` and ``Fp8MoEMethod.create_weights`` (0.5.21):
    the shards of matrices that are split or joined.
    """
    block = (hf.get("quantization_config") or {}).get("weight_block_size")
    gpus = config.cluster.rollout_num_gpus_per_engine
    if not block or config.sglang.rollout_external_engine_addrs:
        return []
    try:
        shape = hf_shape(hf)
    except WeightError:
        return []  # reported by ``read_description``
    args = config.sglang.server_args
    attention, side = attention_gpus(config), max(block)
    heads = {
        "num_attention_heads x head_dim": shape.heads * shape.head_dim,
        "num_key_value_heads x head_dim": max(shape.groups, attention) * shape.head_dim,
    }
    if shape.latent is not None:
        queries, *_ = [rows for rows, _ in shape.attention_matrices[-3:]]
        heads = {"query rows": queries, "value columns": shape.heads * shape.latent.value}
        heads = heads if attention > 1 else {}
    shards = [
        (name, length, attention, "enable_dp_attention, dp_size") for name, length in heads.items()
    ]
    if not all(shape.sparse):
        dense = 1 if args.get("moe_dense_tp_size") == 1 else gpus
        shards.append(("intermediate_size", shape.ffn, dense, "moe_dense_tp_size"))
    if any(shape.sparse):
        experts = max(1, gpus // int(args.get("ep_size", 1)))
        shards.append(("moe_intermediate_size", shape.expert_ffn, experts, "ep_size"))
    if shape.shared_ffn and not has_other_shared_experts(hf):
        is_whole = args.get("moe_a2a_backend") not in (None, "none")
        shards.append(("shared experts", shape.shared_ffn, 1 if is_whole else gpus, ""))
    return [
        f"{key}: {name} = {length} over {ranks} GPUs of an engine is not a multiple of {side} each, and "
        f"SGLang refuses parts of FP8 blocks; {_fewer_shards(remedy)}"
        for name, length, ranks, remedy in shards
        if length % (ranks * side)
    ]


def _fewer_shards(settings: str) -> str:
    if not settings:
        return f"write the folder with {command('convert RECIPE --to fp8')}, which keeps them in bfloat16"
    flags = " and ".join(f"--sglang-{name.replace('_', '-')}" for name in settings.split(", "))
    return f"use {flags}, or a smaller --rollout-num-gpus-per-engine"


def _parts_of_blocks(config: Config, hf: HfConfig) -> list[str]:
    """Return lengths at which a rank's weight, as Megatron joins it, begins inside a block."""
    tensor = config.perf.tensor_model_parallel_size
    expert_parallel = config.perf.expert_tensor_parallel_size or tensor
    heads = hf.get("num_attention_heads")
    head = hf.get("head_dim") or (hf["hidden_size"] // heads if heads else 0)
    lengths = [
        ("head_dim", 0 if "kv_lora_rank" in hf else head, 1),
        ("intermediate_size", hf.get("intermediate_size") or 0, tensor),
        ("moe_intermediate_size", hf.get("moe_intermediate_size") or 0, expert_parallel),
    ]
    return [
        f"--fp8-recipe blockwise: {name} = {length}"
        + (f" over {size} tensor-parallel ranks" if size > 1 else "")
        + f" is not a multiple of {SIDE} each, so that blocks of the trainer's products are not those "
        "of the engines; leave --fp8 out" + (", or use fewer tensor-parallel ranks" * (size > 1))
        for name, length, size in lengths
        if length % (size * SIDE)
    ]


def _dense_layers(hf: HfConfig) -> list[int]:
    """Layers without experts, by the rule of ``Qwen3MoeDecoderLayer`` in transformers."""
    dense, step = hf.get("mlp_only_layers") or [], hf.get("decoder_sparse_step") or 1
    layers = range(hf.get("num_hidden_layers", 0))
    return [number for number in layers if number in dense or (number + 1) % step]


def load_format_problems(config: Config) -> list[str]:
    """Engines that start with random weights which no update replaces.

    With transport memory, every update fills all that an engine stores
    (tests/contract/forked/test_engine_parameters.py). SGLang reads files of updates by the same
    setting.
    """
    if config.sglang.server_args.get("load_format") != "dummy":
        return []
    sync, debug = config.sync, config.debug
    args = config.sglang.server_args
    has_draft = args.get("speculative_algorithm") is not None
    reads_files = config.eval.eval_engines == POLICY
    reasons = [
        (sync.update_weight_transport == "disk", spelled(config, "update_weight_transport")),
        (debug.debug_rollout_only, "--debug-rollout-only true"),
        (has_draft, "--sglang-speculative-algorithm, whose weights may not be sent"),
        (reads_files, f"--eval-engines {POLICY}, for which engines read weights from files"),
        ("quantization" in args, "--sglang-quantization, whose scales are not sent"),
    ]
    return [
        f"--sglang-load-format dummy with {reason}: engines would keep random weights; leave it out"
        for is_so, reason in reasons
        if is_so
    ]


CACHES_OUTSIDE = ("hicache_storage_backend", "enable_lmcache", "enable_flexkv")
"""SGLang's settings of caches outside an engine, which /flush_cache leaves as they are. Their keys
are tokens and the name of the model (``HiCacheFile`` in ``srt/mem_cache/hicache_storage.py``)."""


def update_problems(config: Config) -> list[str]:
    """Settings with which engines compute with weights of other updates, or with others' weights."""
    if not config.generates or config.debug.debug_rollout_only:
        return []
    args, problems = config.sglang.server_args, []
    for name in CACHES_OUTSIDE:
        if args.get(name):
            problems.append(
                f"--sglang-{name.replace('_', '-')} {value_text(args[name])}: engines would read "
                "back the keys and values of earlier weights, which no update removes; leave it out"
            )
    if config.sync.update_weight_transport == "disk":
        problems += draft_problems(config, spelled(config, "update_weight_transport"))
    if config.eval.eval_engines == POLICY:
        problems += draft_problems(config, f"--eval-engines {POLICY}")
    return problems


def draft_problems(config: Config, setting: str) -> list[str]:
    """Problems of a draft model with a setting by which engines read the files of an update."""
    draft = config.sglang.server_args.get("speculative_draft_model_path")
    if draft is None or config.sends_adapters:
        return []
    return [
        f"--sglang-speculative-draft-model-path {draft} with {setting}: SGLang reads the files of an "
        "update into the draft model too; leave one of them out"
    ]
