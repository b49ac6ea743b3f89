"""MiniMax-M2: a mixture of experts with norms over all query heads and all key heads.

Source: https://huggingface.co/MiniMaxAI/MiniMax-M2.
"""

from __future__ import annotations

from rlpost.errors import WeightError
from rlpost.models import names
from rlpost.models.family import Family, expert_fields
from rlpost.models.model_types import HfConfig
from rlpost.models.names import in_layer


def _fields(hf: HfConfig) -> dict[str, object]:
    """Sigmoid router whose bias only selects experts; every layer is sparse.

    Raises:
        WeightError: config.json describes another router or other norms.
    """
    for key, needed in (
        ("scoring_func", "sigmoid"),
        ("qk_norm_type", "per_layer"),
        ("use_qk_norm", True),
        ("use_routing_bias", True),
    ):
        if hf.get(key, needed) != needed:
            raise WeightError(
                f"{key} = {hf[key]!r} is not supported; use a checkpoint with {key} = {needed!r}"
            )
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_pre_softmax": True,
        **expert_fields(
            hf,
            num_experts=hf["num_local_experts"],
            layer_is_sparse=[True] * hf["num_hidden_layers"],
            ffn="intermediate_size",
        ),
    }


_EXPERT = "mlp.experts.local_experts.{expert}."
_EXPERT_THERE = "block_sparse_moe.experts.{expert}."

FAMILIES: dict[str, Family] = {
    "MiniMaxM2ForCausalLM": Family(
        rules=(
            *names.OUTSIDE_LAYERS,
            *names.ATTENTION,
            *names.QK_NORM,
            *names.MLP_NORM,
            in_layer("mlp.router.weight", "block_sparse_moe.gate.weight"),
            in_layer("mlp.router.expert_bias", "block_sparse_moe.e_score_correction_bias"),
            in_layer(
                _EXPERT + "linear_fc1.weight",
                _EXPERT_THERE + "w1.weight",
                _EXPERT_THERE + "w3.weight",
                layout="gated",
            ),
            in_layer(_EXPERT + "linear_fc2.weight", _EXPERT_THERE + "w2.weight"),
        ),
        fields=_fields,
        model_type="minimax_m2",
        page="minimax-m2",
        models="MiniMax-M2: sigmoid router with a bias, norms over all heads",
        defaults={"head_dim": 128},
        refused=("sliding_window", "shared_intermediate_size", "router_jitter_noise"),
        projection_norms=True,
    ),
}
