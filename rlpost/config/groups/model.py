"""The table [model] of a recipe: the model's architecture under Megatron's option names.

All settings are optional; the checkpoint's config.json supplies missing values. A given value must
agree with config.json, so that a recipe for another model fails before the job starts
(``rlpost.config.plan.architecture`` compares).
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rlpost.config.groups.base import Group, Positive

Share = Annotated[float, Field(gt=0.0, le=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]
Zero = Annotated[float, Field(ge=0.0, le=0.0)]

_PATTERN = re.compile(r"\[([01](?:,[01])*)\](?:\*(\d+))?")


def _layer_pattern(given: object) -> object:
    """Expand ``[0]*3+[1]*89`` (Megatron's syntax) to 3 zeros and 89 ones; keep a list as it is."""
    if isinstance(given, (list, tuple)) and len(given) == 1 and isinstance(given[0], str):
        given = given[0]
    if not isinstance(given, str):
        return given
    terms = given.replace(" ", "").removeprefix("(").removesuffix(")").split("+")
    found = [_PATTERN.fullmatch(term) for term in terms]
    if not all(found):
        raise ValueError("write a sum of lists of 0 and 1 such as [0]*3+[1]*89")
    return tuple(
        int(digit) for term in found if term for digit in term[1].split(",") * int(term[2] or 1)
    )


LayerPattern = Annotated[tuple[int, ...], BeforeValidator(_layer_pattern)]


class ModelConfig(Group):
    """Architecture, named as in the MODEL_ARGS of Megatron recipes. Each value must agree with
    config.json."""

    num_layers: Positive | None = None
    """Number of layers."""
    hidden_size: Positive | None = None
    """Hidden size."""
    ffn_hidden_size: Positive | None = None
    """Intermediate size of a dense MLP."""
    num_attention_heads: Positive | None = None
    """Query heads."""
    group_query_attention: bool | None = None
    """Whether query heads share key and value heads (GQA)."""
    num_query_groups: Positive | None = None
    """Key and value heads."""
    kv_channels: Positive | None = None
    """Head dimension."""
    normalization: Literal["RMSNorm"] | None = None
    """Normalization layer."""
    norm_epsilon: PositiveFloat | None = None
    """Epsilon of the normalization layers."""
    position_embedding_type: Literal["rope", "yarn"] | None = None
    """Position embedding."""
    use_rotary_position_embeddings: bool | None = None
    """Older Megatron name for --position-embedding-type rope."""
    rotary_base: PositiveFloat | None = None
    """Base of the rotary embedding (RoPE theta)."""
    local_rotary_base: PositiveFloat | None = None
    """Base of the rotary embedding in layers with a sliding window, where it is another (Gemma-3)."""
    rotary_percent: Share | None = None
    """Fraction of each head that is rotated."""
    rotary_interleaved: bool | None = None
    """Rotate adjacent pairs instead of the two halves of a head."""
    no_rope_fusion: bool = False
    """Do not use TransformerEngine's fused RoPE kernel."""
    vocab_size: Positive | None = None
    """Vocabulary size: rows of the embedding."""
    untie_embeddings_and_output_weights: bool | None = None
    """Whether the output layer has separate weights."""
    disable_bias_linear: bool | None = None
    """Whether linear layers have no bias (except query, key and value projections)."""
    add_qkv_bias: bool | None = None
    """Whether query, key and value projections have a bias."""
    qk_layernorm: bool | None = None
    """Whether queries and keys are normalized."""
    qk_norm_type: Literal["per_head", "per_layer"] | None = None
    """Whether --qk-layernorm normalizes each head, or all heads together (per_layer)."""
    post_self_attn_layernorm: bool | None = None
    """Whether attention has an additional norm at its output."""
    post_mlp_layernorm: bool | None = None
    """Whether the MLP has an additional norm at its output."""
    multi_latent_attention: bool | None = None
    """Whether queries, and keys with values, go through a narrow vector (MLA)."""
    q_lora_rank: Positive | None = None
    """Width of the narrow vector of queries (MLA)."""
    kv_lora_rank: Positive | None = None
    """Width of the narrow vector of keys and values (MLA)."""
    qk_head_dim: Positive | None = None
    """Part of a query or key head without rotary embedding (MLA)."""
    qk_pos_emb_head_dim: Positive | None = None
    """Part of a query or key head with rotary embedding (MLA)."""
    v_head_dim: Positive | None = None
    """Width of a value head (MLA)."""
    rope_type: Literal["rope", "yarn"] | None = None
    """Rotary embedding of MLA: plain, or scaled by YaRN."""
    rotary_scaling_factor: PositiveFloat | None = None
    """Factor by which YaRN extends the context (MLA)."""
    original_max_position_embeddings: Positive | None = None
    """Context before YaRN (MLA)."""
    mscale: PositiveFloat | None = None
    """YaRN's factor on the logarithm in the scale of cosine and sine (MLA)."""
    mscale_all_dim: NonNegativeFloat | None = None
    """YaRN's factor on the logarithm in the scale of the softmax (MLA)."""
    swiglu: bool | None = None
    """Whether the MLP is gated with SiLU."""
    quick_geglu: bool | None = None
    """Whether the MLP is gated with x sigmoid(1.702 x), as in gpt-oss."""
    geglu: bool | None = None
    """Whether the MLP is gated with GELU in its tanh approximation, as in Gemma."""
    softmax_scale: PositiveFloat | None = None
    """Factor of the attention scores where it is not 1 / sqrt(head dimension)."""
    softmax_type: Literal["vanilla", "learnable"] | None = None
    """Softmax of the attention; learnable has a sink for each head."""
    sliding_window: Positive | None = None
    """Keys that a query sees in layers with a sliding window, itself included."""
    window_attn_skip_freq: LayerPattern | None = None
    """For each layer 1 if it has a sliding window and 0 if it sees all keys."""
    attention_output_gate: bool | None = None
    """Whether a sigmoid gate scales the output of each attention head."""
    apply_layernorm_1p: bool | None = None
    """Whether the factor of a norm is 1 + its weight."""
    linear_attention_freq: LayerPattern | None = None
    """For each layer 1 if its attention is linear (a gated delta net) and 0 if not."""
    linear_conv_kernel_dim: Positive | None = None
    """Tokens that the short convolution of linear attention sees."""
    linear_key_head_dim: Positive | None = None
    """Width of a query or key head of linear attention."""
    linear_value_head_dim: Positive | None = None
    """Width of a value head of linear attention."""
    linear_num_key_heads: Positive | None = None
    """Query and key heads of linear attention."""
    linear_num_value_heads: Positive | None = None
    """Value heads of linear attention."""
    attention_dropout: Zero | None = None
    """Attention dropout; only 0 is supported."""
    hidden_dropout: Zero | None = None
    """Hidden-state dropout; only 0 is supported."""
    num_experts: Positive | None = None
    """Experts per MoE layer."""
    moe_layer_freq: LayerPattern | None = None
    """For each layer 1 if it is an MoE layer and 0 if it is dense, such as [0]*3+[1]*89."""
    moe_ffn_hidden_size: Positive | None = None
    """Intermediate size of an expert."""
    moe_shared_expert_intermediate_size: Positive | None = None
    """Intermediate size of the shared expert."""
    moe_shared_expert_gate: bool | None = None
    """Whether a sigmoid gate scales the output of the shared expert."""
    moe_router_topk: Positive | None = None
    """Experts per token."""
    moe_router_score_function: Literal["softmax", "sigmoid"] | None = None
    """Score function of the router."""
    moe_router_pre_softmax: bool | None = None
    """Whether the scores are normalized before top-k selection."""
    moe_router_enable_expert_bias: bool | None = None
    """Whether a per-expert bias is added for expert selection."""
    moe_router_bias_update_rate: Zero | None = None
    """Update rate of that bias; only 0 is supported, the bias stays as loaded."""
    moe_router_topk_scaling_factor: PositiveFloat | None = None
    """Scaling factor of the routing weights."""
    moe_router_num_groups: Positive | None = None
    """Expert groups for group-limited routing."""
    moe_router_group_topk: Positive | None = None
    """Groups selected per token."""
    moe_router_load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss"] | None = None
    """Auxiliary loss of the router; its coefficient must be 0, so it has no effect."""
    moe_aux_loss_coeff: Zero | None = None
    """Coefficient of that loss; only 0 is supported."""
    mtp_num_layers: Positive | None = None
    """Layers for multi-token prediction (num_nextn_predict_layers); --enable-mtp-training trains
    them."""
    moe_router_dtype: Literal["fp32", "fp64"] = "fp32"
    """Precision of the router."""
    moe_token_dispatcher_type: Literal["alltoall", "flex"] = "alltoall"
    """Token dispatcher of the experts; flex needs --moe-enable-deepep."""
    moe_enable_deepep: bool = False
    """Dispatch tokens with DeepEP, which must be installed on the nodes."""
    moe_grouped_gemm: bool | None = None
    """Compute the experts of a rank with one grouped GEMM instead of one after the other; on GPUs
    this needs TransformerEngine. Default: on where it is installed."""
    moe_permute_fusion: bool = False
    """Permute tokens with TransformerEngine's fused kernel, which must be installed on GPU
    nodes."""
    override_hf_config: tuple[str, ...] = ()
    """Keys of this table whose values override config.json instead of having to agree with it."""

    @property
    def given(self) -> dict[str, object]:
        """The values that are set, by name; all others come from config.json."""
        return {key: value for key, value in self.model_dump().items() if value is not None}
