"""The table [model] of a recipe: the model's architecture in Megatron's words, to be checked against its config.json.

Nothing here needs to be given: what is not comes from the checkpoint. What is given must agree with it, so that a
recipe made for another model is found out before a job starts (``rlpost.actor.architecture`` compares).
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from rlpost.config.groups.base import Group, Positive

Share = Annotated[float, Field(gt=0.0, le=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
Zero = Annotated[float, Field(ge=0.0, le=0.0)]

_PATTERN = re.compile(r"\[([01](?:,[01])*)\](?:\*(\d+))?")


def _layer_pattern(given: Any) -> Any:
    """``[0]*3+[1]*89``, as Megatron takes it, is three zeros and 89 ones; a list of numbers is left as it is."""
    if isinstance(given, (list, tuple)) and len(given) == 1 and isinstance(given[0], str):
        given = given[0]
    if not isinstance(given, str):
        return given
    terms = given.replace(" ", "").removeprefix("(").removesuffix(")").split("+")
    found = [_PATTERN.fullmatch(term) for term in terms]
    if not all(found):
        raise ValueError("write a sum of lists of 0 (dense) and 1 (experts) such as [0]*3+[1]*89")
    return tuple(int(digit) for term in found if term for digit in term[1].split(",") * int(term[2] or 1))


LayerPattern = Annotated[tuple[int, ...], BeforeValidator(_layer_pattern)]


class ModelConfig(Group):
    """Architecture as MODEL_ARGS of Megatron recipes give it; each value must agree with config.json."""

    num_layers: Positive | None = None
    """Layers."""
    hidden_size: Positive | None = None
    """Width of the model."""
    ffn_hidden_size: Positive | None = None
    """Width inside a dense MLP."""
    num_attention_heads: Positive | None = None
    """Heads of queries."""
    group_query_attention: bool | None = None
    """Whether several heads of queries share keys and values."""
    num_query_groups: Positive | None = None
    """Heads of keys and values."""
    kv_channels: Positive | None = None
    """Width of a head."""
    normalization: Literal["RMSNorm"] | None = None
    """Kind of the norms."""
    norm_epsilon: PositiveFloat | None = None
    """Added to the mean square in a norm."""
    position_embedding_type: Literal["rope"] | None = None
    """Kind of the position embedding."""
    use_rotary_position_embeddings: bool | None = None
    """The same, in Megatron's older words."""
    rotary_base: PositiveFloat | None = None
    """Base of the rotary embedding's wave lengths."""
    rotary_percent: Share | None = None
    """Part of each head that is rotated."""
    rotary_interleaved: bool | None = None
    """Whether neighbours are rotated with each other, instead of the two halves of a head."""
    no_rope_fusion: bool = False
    """Do not rotate with TransformerEngine's fused kernel where there is one."""
    vocab_size: Positive | None = None
    """Rows of the embedding."""
    untie_embeddings_and_output_weights: bool | None = None
    """Whether the output layer has weights of its own."""
    disable_bias_linear: bool | None = None
    """Whether linear layers are without bias (those of query, key and value apart)."""
    add_qkv_bias: bool | None = None
    """Whether query, key and value have a bias."""
    qk_layernorm: bool | None = None
    """Whether queries and keys are normed."""
    post_self_attn_layernorm: bool | None = None
    """Whether attention ends with a norm of its own."""
    post_mlp_layernorm: bool | None = None
    """Whether the MLP ends with a norm of its own."""
    swiglu: bool | None = None
    """Whether the MLP is gated, with SiLU."""
    attention_dropout: Zero | None = None
    """Dropout in attention; there is none."""
    hidden_dropout: Zero | None = None
    """Dropout of hidden states; there is none."""
    num_experts: Positive | None = None
    """Experts of a layer."""
    moe_layer_freq: LayerPattern | None = None
    """For each layer 1 where it has experts and 0 where it is dense, such as [0]*3+[1]*89."""
    moe_ffn_hidden_size: Positive | None = None
    """Width inside an expert."""
    moe_shared_expert_intermediate_size: Positive | None = None
    """Width inside the shared expert."""
    moe_router_topk: Positive | None = None
    """Experts that a token goes to."""
    moe_router_score_function: Literal["softmax", "sigmoid"] | None = None
    """How the router scores experts."""
    moe_router_pre_softmax: bool | None = None
    """Whether scores are normalised before the best are chosen."""
    moe_router_enable_expert_bias: bool | None = None
    """Whether a bias takes part in choosing experts."""
    moe_router_bias_update_rate: Zero | None = None
    """How fast that bias is adapted; it stays as it came."""
    moe_router_topk_scaling_factor: PositiveFloat | None = None
    """Factor of the experts' weights."""
    moe_router_num_groups: Positive | None = None
    """Groups of experts of which the router first chooses some."""
    moe_router_group_topk: Positive | None = None
    """How many of these groups."""
    moe_router_load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss"] | None = None
    """Auxiliary loss of the router; its weight must be 0, so that it makes no difference."""
    moe_aux_loss_coeff: Zero | None = None
    """Weight of that loss; there is none."""
    moe_router_dtype: Literal["fp32", "fp64"] = "fp32"
    """Precision in which the router computes."""
    moe_token_dispatcher_type: Literal["alltoall", "flex"] = "alltoall"
    """How tokens travel to their experts; flex needs --moe-enable-deepep."""
    moe_enable_deepep: bool = False
    """Send tokens with DeepEP, which must be installed on the nodes."""
    moe_grouped_gemm: bool | None = None
    """Compute the experts of a rank together, for which true needs TransformerEngine on GPUs; where it is installed
    unless given. Otherwise they run one after the other."""
    moe_permute_fusion: bool = False
    """Sort tokens by expert with a fused kernel of TransformerEngine, which it needs on GPUs."""
    override_hf_config: tuple[str, ...] = ()
    """Names of this table whose values win over config.json instead of having to agree with it."""
