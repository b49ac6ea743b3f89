"""The tensors of a checkpoint as transformers names and shapes them, on the meta device.

Nothing of it comes from this project's tables of names, so the two can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rlpost.models.families import family
from rlpost.rehearsal.rank_facts import Shape


@dataclass(frozen=True, slots=True)
class Published:
    """A model of transformers."""

    tensors: Mapping[str, Shape]
    """By the names of the safetensors that ``save_pretrained`` writes; tied ones once."""
    num_parameters: int
    """Trained elements, tied ones once."""
    buffers: frozenset[str]
    """Names of the tensors that are not trained."""


def published(
    hf: Mapping[str, Any], *, fp8_block: tuple[int, int] | None = None, with_mtp: bool = False
) -> Published:
    """The model of a config.json.

    Args:
        hf: config.json.
        fp8_block: rows and columns of a block where its weights are in FP8.
        with_mtp: add the layer for multi-token prediction, which transformers leaves out: a layer
            like the last one, and what joins it to the model (DeepSeek-V3, arXiv 2412.19437,
            section 2.2).
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    name = hf["architectures"][0]
    config_values = {
        key: value for key, value in hf.items() if key not in ("architectures", "model_type")
    }
    config = AutoConfig.for_model(hf.get("model_type") or family(name).model_type, **config_values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    num_parameters = model.num_parameters()
    if fp8_block is not None:
        _to_fp8(model, fp8_block)
    # transformers fuses the experts of a layer into one tensor; checkpoints have them apart
    tensors = revert_weight_conversion(model, model.state_dict())
    tied = set(model.all_tied_weights_keys)
    shapes = {key: tuple(one.shape) for key, one in tensors.items() if key not in tied}
    buffers = frozenset(key for key, _ in model.named_buffers() if key in shapes)
    if not with_mtp:
        return Published(shapes, num_parameters, buffers)
    mtp = _mtp_layer(shapes, hf)
    endings = tuple(key.rpartition(".")[2] for key in buffers)
    more_buffers = {key for key in mtp if key.endswith(endings)}
    trained = sum(math.prod(shape) for key, shape in mtp.items() if key not in more_buffers)
    return Published(shapes | mtp, num_parameters + trained, buffers | more_buffers)


def _mtp_layer(shapes: Mapping[str, Shape], hf: Mapping[str, Any]) -> dict[str, Shape]:
    count, hidden = hf["num_hidden_layers"], hf["hidden_size"]
    last, behind = f"model.layers.{count - 1}.", f"model.layers.{count}."
    made = {
        behind + key.removeprefix(last): shape
        for key, shape in shapes.items()
        if key.startswith(last)
    }
    norms: dict[str, Shape] = {
        f"{behind}{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")
    }
    return made | norms | {f"{behind}eh_proj.weight": (hidden, 2 * hidden)}


def _to_fp8(model: object, block: tuple[int, int]) -> None:
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    replace_with_fp8_linear(
        model,
        modules_to_not_convert=["lm_head"],
        quantization_config=FineGrainedFP8Config(weight_block_size=block),
        pre_quantized=True,
    )
