"""The grid of weights in FP8 blocks, one for the trainer's products and for engines. No torch.

A product with ``--fp8-recipe blockwise`` rounds a weight in blocks of 128 x 128, and engines with
weights in FP8 blocks get them rounded by ``weights.quantise``. Both take the rule of scales from
``rlpost.models.fp8.GRIDS``, so that both have the same bits. TransformerEngine 2.11 reads
``VARIABLE`` while it is imported, and by default makes scales powers of two.

Input: the GPU. Output: the rule, and the environment of ranks before TransformerEngine's import.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from contextlib import suppress

from common.local_gpus import read_capability
from rlpost.models.fp8 import Capability, has_powers_of_two

VARIABLE = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
"""1: scales are any float32; else powers of two."""
USED = "RLPOST_FP8_BLOCKS"
"""1 in ranks with ``--fp8-recipe blockwise``."""
_RECIPES = "transformer_engine.common.recipe"


def prepare(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set ``VARIABLE`` for this node's GPUs in ranks that use it.

    Call it before TransformerEngine's import. NVML is asked, which creates no context.
    """
    if environ.get(USED) != "1":
        return
    capability = read_capability()
    if capability is not None:
        environ[VARIABLE] = "0" if has_powers_of_two(capability) else "1"


def grid_problem(capability: Capability | None) -> str | None:
    """Return why this process's products in FP8 blocks have another grid than engines would get."""
    recipes = sys.modules.get(_RECIPES)
    if recipes is None or capability is None:
        return None
    with suppress(AttributeError):
        powers = recipes.Float8BlockScaling.fp8_quant_fwd_weight.power_2_scale
        expected = has_powers_of_two(capability)
        if powers == expected:
            return None
        rule = "powers of two" if expected else "float32"
        return (
            f"--fp8-recipe blockwise: TransformerEngine was imported with {VARIABLE}="
            f"{os.environ.get(VARIABLE, '(unset)')}, and GPUs of sm{capability[0]}{capability[1]} need "
            f"scales that are {rule}, as engines get them; set {VARIABLE}={int(not expected)} "
            "(--environment) before the rank starts"
        )
    return (
        "--fp8-recipe blockwise: the scales of this TransformerEngine are not known "
        f"({_RECIPES}.Float8BlockScaling has no fp8_quant_fwd_weight); install version 2.11"
    )
