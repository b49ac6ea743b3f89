"""The tensors of a checkpoint as transformers names and shapes them, on the meta device.

Nothing of it comes from this project's tables of names, so the two can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rlpost.extensions.rehearsal.all_ranks.rank_facts import Shape
from rlpost.models.config_file import NESTED, TIED, language_model
from rlpost.models.families import family
from rlpost.models.family import Family
from rlpost.models.model_types import HfConfig
from rlpost.models.names import renamed


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
    hf: Mapping[str, Any],
    known: Family | None = None,
    *,
    fp8_block: tuple[int, int] | None = None,
    with_mtp: bool = False,
) -> Published:
    """The model of a config.json, without an encoder of images.

    Args:
        hf: config.json, the whole file.
        known: its family, as the folder stores the model; None for that of the architecture.
        fp8_block: rows and columns of a block where its weights are in FP8.
        with_mtp: add the layer for multi-token prediction, which transformers leaves out: a layer
            like the last one, and what joins it to the model (DeepSeek-V3, arXiv 2412.19437,
            section 2.2).
    """
    known = known or family(hf["architectures"][0])
    model, prefixes = _model(hf, known)
    num_parameters = model.num_parameters()
    if fp8_block is not None:
        _to_fp8(model, fp8_block)
    every = {renamed(key, prefixes): shape for key, shape in _stored(model, known).items()}
    of_model = frozenset(renamed(key, prefixes) for key, _ in model.named_buffers())
    shapes = {key: shape for key, shape in every.items() if not key.startswith(known.carried)}
    carried = every.keys() - shapes.keys() - of_model
    num_parameters -= sum(math.prod(every[key]) for key in carried)
    buffers = of_model & shapes.keys()
    if not with_mtp:
        return Published(shapes, num_parameters, buffers)
    mtp = _mtp_layer(shapes, hf)
    endings = tuple(key.rpartition(".")[2] for key in buffers)
    more_buffers = {key for key in mtp if key.endswith(endings)}
    trained = sum(math.prod(shape) for key, shape in mtp.items() if key not in more_buffers)
    return Published(shapes | mtp, num_parameters + trained, buffers | more_buffers)


def _model(hf: HfConfig, known: Family) -> tuple[torch.nn.Module, Mapping[str, str]]:
    """Build the model of transformers; with it the prefixes that its names have otherwise.

    Of a model with images that transformers does not have, its language model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    has_encoder = NESTED in hf or "vision_config" in hf
    is_whole = has_encoder and hf["model_type"] in CONFIG_MAPPING
    values = dict(hf if is_whole else language_model(hf))
    kind = values.pop("model_type", None)
    del values["architectures"]
    values[TIED] = known.is_tied(language_model(hf))
    config = AutoConfig.for_model(kind if kind in CONFIG_MAPPING else known.model_type, **values)
    with torch.device("meta"):
        if is_whole:
            return AutoModelForImageTextToText.from_config(config), {}
        return AutoModelForCausalLM.from_config(config), known.renamed


def _stored(model: Any, known: Family) -> dict[str, Shape]:
    """The shapes of the tensors that ``save_pretrained`` writes.

    transformers fuses the experts of a layer into one tensor; checkpoints have them apart, except
    those of a family whose folders have the fused ones.
    """
    from transformers.core_model_loading import revert_weight_conversion

    tied, layouts = set(model.all_tied_weights_keys), {rule.layout for rule in known.rules}
    state = {key: tensor for key, tensor in model.state_dict().items() if key not in tied}
    fused: dict[str, torch.Tensor] = {}
    if known.other_rules and any(rule.is_stacked for rule in known.rules):
        fused = {key: tensor for key, tensor in state.items() if ".mlp.experts." in key}
    tensors = revert_weight_conversion(
        model, {key: tensor for key, tensor in state.items() if key not in fused}
    )
    if "transposed_gated" in layouts:  # transformers turns them when it loads
        fused = {key: tensor.mT for key, tensor in fused.items()}
    return {key: tuple(tensor.shape) for key, tensor in {**tensors, **fused}.items()}


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
