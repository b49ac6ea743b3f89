"""Check the precision of the trainer and of the engines. Pure.

Input: a ``Config``, and the model's config.json. Output: one line for each problem.
"""

from __future__ import annotations

from rlpost.config.engine_args import DTYPE, engine_dtype
from rlpost.config.flags import flag
from rlpost.config.groups.perf import FP8_ROWS
from rlpost.config.plan.cards import capability_of
from rlpost.config.tree import Config
from rlpost.config.wording import listed, spelled, value_text
from rlpost.models.families import family_of
from rlpost.models.fp8 import grid_of
from rlpost.models.model_types import HfConfig

_ONLY_BLOCKS = (
    "the trainer would hold weights as TransformerEngine's quantised tensors, whose bytes its offload, "
    "its copies of older weights and its updates of engines do not know"
)
_NOT_IN_FP8 = {
    "first_last_layers_bf16": "engines have the first and last layers in FP8 as the others",
    "fp8_param": _ONLY_BLOCKS,
    "fp8_param_gather": _ONLY_BLOCKS,
    "fp8_dot_product_attention": "TransformerEngine has no attention in FP8 over packed rows",
    "fp8_multi_head_attention": "TransformerEngine has no attention in FP8 over packed rows",
}
"""Options of FP8 training that are refused, and why."""
FLAG = "--sglang-dtype"
_SAME = {"float": "float32"}
"""Other words of SGLang for a dtype."""


def precision_problems(config: Config) -> list[str]:
    """Return precisions that the trainer lacks, or that differ between trainer and engines."""
    return [*_narrow_training(config), *_engine_dtype(config)]


def precision_model_problems(config: Config, hf: HfConfig) -> list[str]:
    """Return sums of gradients that TransformerEngine computes wrongly for the model's weights.

    Its norm and scaling of many gradients take the type of the first. Megatron's optimizers convert
    them to float32 before, except these two.
    """
    known = family_of(hf)
    has_float32 = known is not None and any(rule.is_float32 for rule in known.rules)
    is_mixed = has_float32 and config.perf.bf16 is not False
    if not is_mixed or config.perf.accumulate_allreduce_grads_in_fp32:
        return []
    unconverted = ("use_precision_aware_optimizer", "optimizer_cpu_offload")
    return [
        f"--accumulate-allreduce-grads-in-fp32 false with {spelled(config, name)}: this model has weights in "
        "float32, and so gradients of two types, which TransformerEngine cannot sum; use "
        "--accumulate-allreduce-grads-in-fp32 true"
        for name in unconverted
        if getattr(config.optimizer, name)
    ]


def _narrow_training(config: Config) -> list[str]:
    """Return what the trainer lacks of FP8 and FP4."""
    options = config.megatron.options
    problems = []
    if _is_on(options.get("fp4")):
        problems.append(
            f"--fp4 {options['fp4']}: the trainer pads rows for FP8 alone; leave it out, or use --fp8"
        )
    if not _is_on(options.get("fp8")):
        return problems
    recipe = options.get("fp8_recipe", "delayed")
    if recipe not in FP8_ROWS:
        problems.append(
            f"--fp8 {options['fp8']} with --fp8-recipe {recipe} (default: delayed): its scales may "
            "depend on earlier passes, which checkpoints do not store; use --fp8-recipe "
            f"{' or '.join(sorted(FP8_ROWS))}"
        )
    elif (gpu := capability_of(config.cluster.gpu_type)) and recipe not in grid_of(gpu).trains:
        others = listed(grid_of(gpu).trains)
        remedy = f"use --fp8-recipe {others}, or leave --fp8 out" if others else "leave --fp8 out"
        problems.append(
            f"--fp8-recipe {recipe} with --gpu-type {config.cluster.gpu_type}: TransformerEngine has no such "
            f"products for sm{gpu[0]}{gpu[1]}; {remedy}"
        )
    problems += [
        f"{flag(name)} {value_text(options[name])}: {reason}; leave it out"
        for name, reason in _NOT_IN_FP8.items()
        if options.get(name)
    ]
    return problems


def _is_on(value: object) -> bool:
    return value not in (None, False, "none", "None")


def _engine_dtype(config: Config) -> list[str]:
    given = config.sglang.server_args.get(DTYPE)
    wanted = engine_dtype(config.perf.bf16) or "bfloat16"
    if given is None or _SAME.get(str(given), given) == wanted:
        return []
    return [
        f"{FLAG} {given}: engines must compute in the trainer's precision, {wanted} "
        f"(--bf16), or their log-probs differ; leave it out or use {FLAG} {wanted}"
    ]
