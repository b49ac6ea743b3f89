"""The tensors of a checkpoint as transformers itself names and shapes them: the model on the meta device.

Nothing of it comes from this project's tables of names, so the two can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rlpost.actor.hf_config import MODEL_TYPES
from rlpost.rehearsal.facts import Shape


@dataclass(frozen=True, slots=True)
class Published:
    """A model of transformers."""

    tensors: Mapping[str, Shape]
    """By the names of the safetensors that ``save_pretrained`` writes; tied ones once."""
    num_parameters: int
    """Trained elements, tied ones once."""
    buffers: frozenset[str]
    """Those of the tensors that are not trained."""


def published(hf: Mapping[str, Any], *, fp8_block: tuple[int, int] | None = None) -> Published:
    """The model of a config.json. Args: ``fp8_block``: rows and columns of a block where its weights are in FP8."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    name = hf["architectures"][0]
    given = {key: value for key, value in hf.items() if key not in ("architectures", "model_type")}
    config = AutoConfig.for_model(hf.get("model_type") or MODEL_TYPES[name], **given)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    num_parameters = model.num_parameters()
    if fp8_block is not None:
        _to_fp8(model, fp8_block)
    # transformers fuses the experts of a layer into one tensor; checkpoints have them apart
    tensors = revert_weight_conversion(model, model.state_dict())
    tied = set(model.all_tied_weights_keys)
    shapes = {key: tuple(one.shape) for key, one in tensors.items() if key not in tied}
    return Published(shapes, num_parameters, frozenset(key for key, _ in model.named_buffers() if key in shapes))


def _to_fp8(model: Any, block: tuple[int, int]) -> None:
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    replace_with_fp8_linear(
        model,
        modules_to_not_convert=["lm_head"],
        quantization_config=FineGrainedFP8Config(weight_block_size=block),
        pre_quantized=True,
    )
