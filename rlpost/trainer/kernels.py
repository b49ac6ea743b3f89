"""Select the fused kernels of the model.

Input: the description of the checkpoint, the settings, and the implementation of the layers.
Output: fields of Megatron's TransformerConfig. Invariant: no requested kernel is dropped silently.
A kernel that is not available is an error on CUDA, and a warning on a CPU, where TransformerEngine
has no kernels.
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers

from rlpost.config.groups.perf import trains_in_blocks
from rlpost.config.transformer_engine import RULED_OUT, Need, needs
from rlpost.config.tree import Config
from rlpost.errors import ConfigError
from rlpost.models.rope import attention_factor
from rlpost.trainer import device, fp8_grid, optional_packages
from rlpost.trainer.attention_backends import Choice, Options, choose
from rlpost.trainer.layer_specs import LOCAL, has_transformer_engine
from rlpost.trainer.model_description import ModelDescription

logger = logging.getLogger(__name__)

APEX_KERNEL = "fused_weight_gradient_mlp_cuda"
"""The extension of Apex that computes a gradient and accumulates it in one kernel."""
FUSED_GRADIENT = "fuse_wgrad_accumulation"
"""The attribute of TransformerEngine's linear layers for the same."""


def kernel_fields(
    description: ModelDescription, config: Config, *, implementation: str
) -> dict[str, object]:
    """Return the fields that select kernels.

    Raises:
        ConfigError: requested kernels are not available here; one line for each.
    """
    _check(description, config, implementation=implementation)
    perf, fields = config.perf, description.fields
    with_engine, interleaved = implementation != LOCAL, bool(fields.get("rotary_interleaved"))
    is_grouped = _is_grouped(config, implementation=implementation)
    chosen = {
        # SwiGLU as one kernel of torch.compile. (Without dropout the residual sum is one kernel
        # anyway.)
        "bias_activation_fusion": torch.cuda.is_available()
        and fields.get("activation_func") != "gelu_tanh"
        and (is_grouped or not _clamps_before_bias(description))
        and not config.megatron.options.get("use_te_activation_func"),
        "masked_softmax_fusion": False,  # of an attention that is not used here
        "persist_layer_norm": False,  # of Apex
        # Of Apex for the output layer, unless requested; ``accumulate_in_products`` sets the others.
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": with_engine
        and not interleaved
        and attention_factor(description.rope) == 1.0
        and not config.takes_images  # the kernel knows one position a token
        # Latent attention has another kernel, for YaRN alone; --apply-rope-fusion true selects it.
        and not fields.get("multi_latent_attention")
        and not perf.no_rope_fusion,
        # Megatron's default dispatcher requires rows of equal length.
        "moe_token_dispatcher_type": perf.moe_token_dispatcher_type,
    }
    if "num_moe_experts" not in fields:
        return chosen
    return chosen | {
        "moe_router_dtype": perf.moe_router_dtype,
        "moe_enable_deepep": perf.moe_enable_deepep,
        "moe_grouped_gemm": is_grouped,
        "moe_permute_fusion": with_engine and perf.moe_permute_fusion is not False,
        # On a second CUDA stream.
        "moe_shared_expert_overlap": with_engine
        and torch.cuda.is_available()
        and bool(fields.get("moe_shared_expert_intermediate_size"))
        and config.overlaps_shared_experts,
    }


def accumulate_in_products(chunk: torch.nn.Module, config: Config) -> None:
    """Let TransformerEngine's products add gradients of weights to those of the step themselves.

    Otherwise each micro-batch writes a gradient in the weights' precision, which Megatron adds to
    the float32 sum in another kernel: 12 bytes of traffic a parameter instead of 8, and one more
    rounding to bfloat16. Megatron's own setting would demand Apex for the output layer, which is not
    TransformerEngine's. The products read this attribute in each pass. ``main_grad`` is Megatron's
    DDP's; frozen weights have none, and the products do not ask for it.

    ``--gradient-accumulation-fusion false`` turns it off.
    """
    if config.megatron.options.get("gradient_accumulation_fusion") is False:
        return
    for module in chunk.modules():
        if hasattr(module, FUSED_GRADIENT):
            setattr(module, FUSED_GRADIENT, True)


def chosen_attention(
    description: ModelDescription, config: Config, *, implementation: str
) -> Choice:
    """Return what computes attention here.

    Raises:
        ConfigError: nothing can compute it with these settings on this GPU.
    """
    is_16_bit = device.weight_dtype(config.perf.bf16) != torch.float32
    choice = choose(
        description.attention(config, is_16_bit=is_16_bit),
        device.gpu(),
        with_engine=implementation != LOCAL,
        options=Options.of(config.megatron.options),
    )
    if isinstance(choice, str):
        raise ConfigError(choice)
    if choice.reason and _is_first_rank():
        logger.info("attention: torch's kernels in place of TransformerEngine's: %s", choice.reason)
    return choice


def _check(description: ModelDescription, config: Config, *, implementation: str) -> None:
    problems = _packages_missing(config) + _wrong_rotation(description, config)
    is_grouped = _is_grouped(config, implementation=implementation)
    fuses = config.megatron.options.get("bias_activation_fusion")
    if fuses and not is_grouped and _clamps_before_bias(description):
        problems.append(
            "--bias-activation-fusion true: the kernel clamps the activations of this model before "
            "it adds the bias of an expert, so the logits would be wrong; omit the option, or use "
            "--moe-grouped-gemm true with TransformerEngine"
        )
    if trains_in_blocks(config.megatron.options) and (
        problem := fp8_grid.grid_problem(device.capability())
    ):
        problems.append(problem)
    if implementation == LOCAL:
        lacking = _needs(description, config)
        lack = _lack()
        if torch.cuda.is_available():
            problems += [need.problem(lack) for need in lacking if need.is_required]
            warned = [need for need in lacking if not need.is_required]
        else:
            warned = [need for need in lacking if need.is_required]
        if not problems and _is_first_rank():
            for need in warned:
                logger.warning(need.warning(lack))
    if problems:
        raise ConfigError("\n".join(problems))


def _is_grouped(config: Config, *, implementation: str) -> bool:
    """Return whether one kernel computes the experts of a rank."""
    return implementation != LOCAL and config.perf.moe_grouped_gemm is not False


def _clamps_before_bias(description: ModelDescription) -> bool:
    """Return whether the fused activation would clamp before the bias is added, as for gpt-oss.

    ``weighted_bias_quick_geglu_impl`` of Megatron-core 0.16.1 (fused_bias_geglu.py) does so; the
    unfused activation clamps the sum (mlp.py). Grouped experts have added the bias before.
    """
    fields = description.fields
    return bool(fields.get("activation_func_clamp_value") and fields.get("add_bias_linear"))


def _packages_missing(config: Config) -> list[str]:
    problems = []
    if config.perf.moe_token_dispatcher_type == "flex" and (
        problem := optional_packages.deep_ep_problem()
    ):
        problems.append(f"--moe-token-dispatcher-type flex: {problem}; or choose alltoall")
    fuses = config.megatron.options.get("gradient_accumulation_fusion")
    if fuses and not layers._grad_accum_fusion_available:
        problems.append(
            f"--gradient-accumulation-fusion true needs a kernel of Apex ({APEX_KERNEL}) for the output layer, which "
            "is not installed on this node; install Apex with --cpp_ext and --cuda_ext or omit the option: "
            "TransformerEngine's layers fuse it by default"
        )
    return problems


def _wrong_rotation(description: ModelDescription, config: Config) -> list[str]:
    """Reject the fused rotary embedding for a model with interleaved rotation, or with YaRN.

    Megatron-core 0.16.1 passes neither ``interleaved`` nor ``mscale`` to TransformerEngine's kernel
    for packed sequences (``rope_utils.py``: ``fused_apply_rotary_pos_emb_thd`` has no such
    parameters). Latent attention has another kernel, which has both.
    """
    fields = description.fields
    if not config.megatron.options.get("apply_rope_fusion") or fields.get("multi_latent_attention"):
        return []
    problems = []
    if fields.get("rotary_interleaved"):
        problems.append(
            "--apply-rope-fusion true: the kernel rotates the two halves of a head, but this model "
            "rotates adjacent pairs, so its logits would be wrong; omit the option"
        )
    if (factor := attention_factor(description.rope)) != 1.0:
        problems.append(
            f"--apply-rope-fusion true: the kernel lacks the factor {factor:.4g} of YaRN on queries "
            "and keys, so the logits would be wrong; omit the option"
        )
    return problems


def _needs(description: ModelDescription, config: Config) -> list[Need]:
    """Return the features of this model that need TransformerEngine and that local layers lack."""
    found = needs(config, description.fields)
    return [need for need in found if need.is_of_layers or not has_transformer_engine()]


def _lack() -> str:
    if not torch.cuda.is_available():
        return "and there is no CUDA here"
    if has_transformer_engine():
        return RULED_OUT
    return "which is not installed on this node"


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
