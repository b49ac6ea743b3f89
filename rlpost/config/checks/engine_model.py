"""Check that the engines can load the model's weights, get updates of them, and compute the model.

Input: a ``Config`` and the model's ``config.json``. Output: one line for each problem. Pure.
"""

from __future__ import annotations

from common.fleet_name import POLICY
from rlpost.config.groups.perf import trains_in_blocks
from rlpost.config.tree import Config
from rlpost.config.wording import spelled
from rlpost.models.families import family_of
from rlpost.models.model_types import HfConfig

BLOCK = 128
"""Rows and columns of a block of TransformerEngine's weights in FP8."""
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
    return problems


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
    problems += _grids(config, hf, key)
    if args.get("load_format") == "dummy":
        problems.append(
            "--sglang-load-format dummy with weights in FP8: scales of the cache, which no update "
            "sends, would be random; leave it out"
        )
    return problems


def _grids(config: Config, hf: HfConfig, key: str) -> list[str]:
    """Return how products in FP8 and weights of the engines are rounded differently."""
    options = config.megatron.options
    block = list((hf.get("quantization_config") or {}).get("weight_block_size") or [])
    if not options.get("fp8"):
        return []
    if trains_in_blocks(options) and block == [BLOCK, BLOCK]:
        return _parts_of_blocks(config, hf)
    recipe = f"--fp8 {options['fp8']} with --fp8-recipe {options.get('fp8_recipe', 'delayed')}"
    return [
        f"{recipe}: the trainer's products would round weights to another grid than the engines, "
        f"whose weights are in FP8 blocks of {' x '.join(map(str, block)) or 'another scheme'} "
        f"({key}), so that their log-probs differ more than with a trainer in bfloat16; leave --fp8 out, "
        f"or use --fp8-recipe blockwise with blocks of {BLOCK} x {BLOCK}"
    ]


def _parts_of_blocks(config: Config, hf: HfConfig) -> list[str]:
    """Return lengths at which a rank's weight, as Megatron joins it, begins inside a block."""
    text = {**hf, **(hf.get("text_config") or {})}
    tensor = config.perf.tensor_model_parallel_size
    of_experts = config.perf.expert_tensor_parallel_size or tensor
    heads = text.get("num_attention_heads")
    head = text.get("head_dim") or (text["hidden_size"] // heads if heads else 0)
    lengths = [
        ("head_dim", 0 if "kv_lora_rank" in text else head, 1),
        ("intermediate_size", text.get("intermediate_size") or 0, tensor),
        ("moe_intermediate_size", text.get("moe_intermediate_size") or 0, of_experts),
    ]
    return [
        f"--fp8-recipe blockwise: {name} = {length}"
        + (f" over {size} tensor-parallel ranks" if size > 1 else "")
        + f" is not a multiple of {BLOCK} each, so that blocks of the trainer's products are not those "
        "of the engines; leave --fp8 out" + (", or use fewer tensor-parallel ranks" * (size > 1))
        for name, length, size in lengths
        if length % (size * BLOCK)
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
