"""The planner's shape of the model in a Hugging Face folder. Standard library only.

Input: a parsed ``config.json``. Output: a ``Shape``. ``rlpost.models.families`` has the rules of
each family.
"""

from __future__ import annotations

from rlpost.config.plan.architecture import dense_ffn, head_dim
from rlpost.config.plan.shape import Shape, latent_of, linear_attention
from rlpost.config.plan.vision import VisionShape, vision_shape
from rlpost.errors import WeightError
from rlpost.models.families import family
from rlpost.models.family import Family
from rlpost.models.model_types import HfConfig


def hf_shape(hf: HfConfig) -> Shape:
    """The shape of a known architecture.

    Raises WeightError if the architecture is unknown or a size is missing.
    """
    known = family((hf.get("architectures") or ["none given"])[0])
    hf = known.resolved(hf)
    try:
        fields, vision = known.fields(hf), _vision(known, hf)
        return Shape(
            hidden=hf["hidden_size"],
            ffn=dense_ffn(hf),
            heads=hf["num_attention_heads"],
            groups=hf.get("num_key_value_heads") or hf["num_attention_heads"],
            head_dim=head_dim(hf),
            vocab=hf["vocab_size"],
            sparse=tuple(map(bool, fields.get("moe_layer_freq", (0,) * hf["num_hidden_layers"]))),
            tied=known.is_tied(hf),
            qkv_bias=fields.get("add_qkv_bias", False),
            qk_norm=fields.get("qk_layernorm", False) or known.projection_norms,
            qk_norm_per_layer=known.projection_norms,
            sandwich=known.sandwich_norms,
            linear_bias=fields.get("add_bias_linear", False),
            sinks=fields.get("softmax_type") == "learnable",
            stacked_experts=any(rule.is_stacked for rule in known.rules),
            output_gate=fields.get("attention_output_gate", False),
            linear=linear_attention(fields),
            num_experts=fields.get("num_moe_experts", 0),
            expert_ffn=fields.get("moe_ffn_hidden_size", 0),
            shared_ffn=fields.get("moe_shared_expert_intermediate_size") or 0,
            shared_gate=fields.get("moe_shared_expert_gate", False),
            topk=fields.get("moe_router_topk", 0),
            latent=latent_of(fields),
            vision=vision,
            lacks_encoder=bool(known.carried) and vision is None,
        )
    except KeyError as error:
        raise WeightError(
            f"config.json has no {error}, which every {hf['architectures'][0]} has"
        ) from None


def _vision(known: Family, hf: HfConfig) -> VisionShape | None:
    """The encoder of images that the trainer can run; None if it cannot."""
    if known.vision is None or known.vision.problem(hf):
        return None
    return vision_shape(
        hf["vision_config"],
        layers=known.vision.layers,
        num_deep_layers=known.vision.num_deep_layers(hf),
    )


def weight_bytes(hf: HfConfig) -> int:
    """Bytes of a weight in engines that load this folder: 1 for FP8, 4 for float32, else 2."""
    if (hf.get("quantization_config") or {}).get("quant_method") == "fp8":
        return 1
    return 4 if str(hf.get("dtype") or hf.get("torch_dtype")) == "float32" else 2
