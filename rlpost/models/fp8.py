"""FP8 blocks of weights, in one place for trainer, engines, converter, planner and checks. Pure.

Input: the rules of a family, and a GPU's compute capability. Output: the weights that a folder in
FP8 blocks has quantised, the rule of their scales, and config.json's words for them.

The format is that of DeepSeek-V3's checkpoints (arXiv 2412.19437, section 3.3): ``NAME`` in e4m3,
``NAME_scale_inv`` in float32, weight = value x scale of its block.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Set
from dataclasses import dataclass

from rlpost.models.model_types import HfConfig
from rlpost.models.names import Rule

Capability = tuple[int, int]
"""Compute capability of a GPU."""


@dataclass(frozen=True, slots=True)
class Grid:
    """What the GPUs of an architecture do with weights in FP8."""

    since: Capability
    generates: bool
    """Whether engines keep blocks as they are sent: SGLang 0.5.21 repacks them for its Marlin kernels
    before sm89, and on sm100 unless ``engines.blackwell`` chooses the kernels."""
    trains: tuple[str, ...]
    """Values of ``--fp8-recipe`` for which TransformerEngine 2.11 has products."""
    has_powers_of_two: bool
    """Whether scales of blocks, float32 in any case, are powers of two: TransformerEngine computes
    blocks by MXFP8 from sm100 on, whose scales are exponents."""


BLOCKWISE = "blockwise"
"""The only ``--fp8-recipe`` whose weights engines can have: updates have no MXFP8, with its scales of
1 x 32 values, and ``tensorwise`` has one scale for a whole shard of the trainer."""
GRIDS = (
    Grid((0, 0), False, (), False),
    Grid((8, 9), True, ("tensorwise",), False),
    Grid((9, 0), True, ("tensorwise", BLOCKWISE), False),
    Grid((10, 0), True, ("tensorwise", BLOCKWISE, "mxfp8"), True),
    Grid((12, 0), True, ("tensorwise",), True),
)
"""By the compute capability from which a row holds; one row for trainer and engines."""
WHOLE_CACHES = ("auto", "bf16", "bfloat16")
"""Values of ``--sglang-kv-cache-dtype`` with which engines attend to what the trainer attends to."""


def grid_of(capability: Capability) -> Grid:
    """Return the row of a GPU."""
    return [grid for grid in GRIDS if grid.since <= capability][-1]


def has_powers_of_two(capability: Capability | None) -> bool:
    """Return whether scales of blocks are powers of two; None is a CPU."""
    return capability is not None and grid_of(capability).has_powers_of_two


SIDE = 128
"""Rows and columns of a block: of TransformerEngine, DeepGEMM and the published folders."""
SUFFIX = "_scale_inv"
FOLDER = "-FP8"
"""End of the name of a converted folder, beside that of its source."""
_LINEAR = re.compile(r"\.(linear_\w+|in_proj_qkvz|out_proj)\.weight$")
_SHARED = re.compile(r"\.shared_experts?\.")
_NODE = 8
_NUMBERS = re.compile(r"\\{(layer|expert)\\}")
"""A placeholder of a rule, after ``re.escape``."""


def keeps_shared_experts(width: int) -> bool:
    """Return whether a folder in FP8 blocks keeps shared experts in bfloat16.

    Engines shard a shared expert over all their GPUs, and SGLang 0.5.21 refuses shards that are not
    whole blocks (``validate_block_quant_shapes``). The folder serves engines of up to a node:
    GLM-4.5's 1536 columns are 12 blocks, which 8 GPUs cannot share.
    """
    return width % (_NODE * SIDE) != 0


def has_other_shared_experts(hf: HfConfig) -> bool:
    """Return whether config.json has weights in FP8, and shared experts that are not."""
    quantised = hf.get("quantization_config") or {}
    kept = quantised.get("modules_to_not_convert") or ()
    is_fp8 = quantised.get("quant_method") == "fp8"
    return is_fp8 and any(_SHARED.search(f".{name}.") for name in kept)


def is_quantised(rule: Rule, *, shared_width: int = 0) -> bool:
    """Return whether folders in FP8 blocks have quantised the Hugging Face tensors of a rule.

    They are the matrices of linear layers: no embeddings, norms, biases, routers or convolutions.

    Args:
        rule: of a Megatron parameter.
        shared_width: columns of the shared expert; 0 without one.
    """
    if rule.is_stacked or not _LINEAR.search(rule.megatron):
        return False
    is_shared = any(_SHARED.search(name) for name in rule.hugging_face)
    return not (is_shared and keeps_shared_experts(shared_width))


def quantised_names(
    names: Iterable[str], rules: Iterable[Rule], *, shared_width: int = 0
) -> Set[str]:
    """Return those of ``names`` that a folder in FP8 blocks has quantised.

    Args:
        names: of the Hugging Face tensors of a model.
        rules: of its family.
        shared_width: columns of the shared expert; 0 without one.
    """
    templates: list[str] = []
    for rule in rules:
        if is_quantised(rule, shared_width=shared_width):
            templates += map(re.escape, rule.hugging_face)
    pattern = re.compile(_NUMBERS.sub(lambda _: r"\d+", "|".join(templates)))
    return frozenset(name for name in names if pattern.fullmatch(name))


def quantization_config(
    kept: Iterable[str], block: tuple[int, int] = (SIDE, SIDE)
) -> dict[str, object]:
    """Return the part of config.json that describes weights in FP8 blocks.

    Args:
        kept: modules with a matrix that is not quantised. The output layer is always one: a model
            whose output layer is its embedding has no tensor for it.
        block: rows and columns.
    """
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
        "modules_to_not_convert": sorted({"lm_head", *kept}),
    }
