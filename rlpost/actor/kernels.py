"""Which fused kernels the model computes with: what is asked for, what is here, and what is said where these differ.

Input: the description of the checkpoint, the settings and whose modules the layers are made of. Output: fields of
Megatron's TransformerConfig. Invariant: nothing that was asked for is dropped in silence. On CUDA it is refused, on a
CPU, where no kernel of TransformerEngine exists, a warning names it.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import torch
import torch.distributed as dist

from rlpost.actor.layer_specs import LOCAL, has_transformer_engine
from rlpost.actor.model_description import ModelDescription
from rlpost.actor.settings import ActorSettings
from rlpost.config.transformer_engine import RULED_OUT, Need, needs
from rlpost.errors import ConfigError

logger = logging.getLogger(__name__)

APEX_KERNEL = "fused_weight_gradient_mlp_cuda"
"""The extension of Apex that adds a gradient to what was accumulated before, while it is computed."""


def kernel_fields(description: ModelDescription, settings: ActorSettings, *, implementation: str) -> dict[str, Any]:
    """How to compute, where there is a choice.

    Raises:
        ConfigError: a kernel that was asked for cannot be had here, a line for each.
    """
    _check(description, settings, implementation=implementation)
    given, fields = settings.model_args, description.fields
    with_engine, interleaved = implementation != LOCAL, bool(fields.get("rotary_interleaved"))
    chosen = {
        # SwiGLU in one kernel, which torch.compile makes. (The sum of the residual is one kernel without dropout.)
        "bias_activation_fusion": torch.cuda.is_available() and not settings.megatron.get("use_te_activation_func"),
        "masked_softmax_fusion": False,  # of an attention that is not used here
        "persist_layer_norm": False,  # of Apex
        "gradient_accumulation_fusion": False,  # of Apex, unless it is asked for
        "apply_rope_fusion": with_engine and not interleaved and not given.get("no_rope_fusion", False),
        "moe_token_dispatcher_type": given.get(
            "moe_token_dispatcher_type", "alltoall"
        ),  # Megatron's own: equal lengths
    }
    if "num_moe_experts" not in fields:
        return chosen
    grouped = given.get("moe_grouped_gemm")
    return chosen | {
        "moe_router_dtype": given.get("moe_router_dtype", "fp32"),
        "moe_enable_deepep": given.get("moe_enable_deepep", False),
        "moe_grouped_gemm": with_engine and (grouped is None or grouped),
        "moe_permute_fusion": with_engine and given.get("moe_permute_fusion", False),
    }


def _check(description: ModelDescription, settings: ActorSettings, *, implementation: str) -> None:
    problems = _packages_missing(settings) + _wrong_rotation(description, settings)
    if implementation == LOCAL:
        lacking = _needs(description, settings)
        lack = _lack()
        if torch.cuda.is_available():
            problems += [need.problem(lack) for need in lacking if need.is_required]
            # who chooses local modules has chosen what they cost
            warned = [need for need in lacking if not need.is_required and settings.transformer_impl != LOCAL]
        else:
            warned = [need for need in lacking if need.is_required]
        if not problems and _is_first_rank():
            for need in warned:
                logger.warning(need.warning(lack))
    if problems:
        raise ConfigError("\n".join(problems))


def _packages_missing(settings: ActorSettings) -> list[str]:
    problems = []
    if settings.model_args.get("moe_token_dispatcher_type") == "flex" and not _is_installed("deep_ep"):
        problems.append(
            "--moe-token-dispatcher-type flex: DeepEP (the package deep_ep) is not "
            "installed on this node; install it or choose alltoall"
        )
    if settings.megatron.get("gradient_accumulation_fusion") and not _is_installed(APEX_KERNEL):
        problems.append(
            "--gradient-accumulation-fusion true: the output layer adds "
            f"gradients with a kernel of Apex ({APEX_KERNEL}), which is not installed on this node; install Apex with "
            "--cpp_ext and --cuda_ext or leave the option out"
        )
    return problems


def _wrong_rotation(description: ModelDescription, settings: ActorSettings) -> list[str]:
    """Megatron-core 0.16.1 does not tell TransformerEngine's kernel for packed sequences that a model rotates
    neighbours with each other (``rope_utils.py``: ``fused_apply_rotary_pos_emb_thd`` takes no ``interleaved``)."""
    if not (settings.megatron.get("apply_rope_fusion") and description.fields.get("rotary_interleaved")):
        return []
    return [
        "--apply-rope-fusion true: the kernel rotates the halves of a head with each "
        "other, this model's neighbours, so its logits would be wrong; leave the option out"
    ]


def _needs(description: ModelDescription, settings: ActorSettings) -> list[Need]:
    """What this model needs TransformerEngine for that local layers lack; settings of experts do not count where there
    are none."""
    fields = description.fields
    model = dict(settings.model_args)
    if "num_moe_experts" not in fields:
        model = {name: value for name, value in model.items() if not name.startswith("moe_")}
    model |= {"num_experts": fields.get("num_moe_experts"), "rotary_interleaved": fields.get("rotary_interleaved")}
    found = needs(model, settings, transformer_impl=settings.transformer_impl, megatron=settings.megatron)
    return [need for need in found if need.is_of_layers or not has_transformer_engine()]


def _lack() -> str:
    if not torch.cuda.is_available():
        return "and there is no CUDA here"
    if has_transformer_engine():
        return RULED_OUT
    return "which is not installed on this node"


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
