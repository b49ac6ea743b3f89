"""Qwen2.5 and Qwen3, dense and mixture of experts; Qwen2-MoE.

Sources: arXiv 2412.15115 (Qwen2.5), arXiv 2505.09388 (Qwen3), arXiv 2407.10671 (Qwen2-MoE).
``qwen_hybrid`` has the families with linear attention.
"""

from __future__ import annotations

from collections.abc import Callable

from rlpost.errors import WeightError
from rlpost.models import names
from rlpost.models.family import Family, expert_fields, window_fields
from rlpost.models.model_types import HfConfig

_DENSE = (*names.OUTSIDE_LAYERS, *names.ATTENTION, *names.MLP_NORM, *names.DENSE_MLP)

_WINDOWS: dict[str, object] = {"use_sliding_window": False, "max_window_layers": 28}
"""transformers' defaults of the windows; ``Qwen3MoeConfig`` has only the first."""
EXPERTS: dict[str, object] = {"norm_topk_prob": False, "decoder_sparse_step": 1}
"""transformers' defaults of ``Qwen3MoeConfig`` and ``Qwen2MoeConfig``."""


def _windows(hf: HfConfig, is_windowed: Callable[[int, int], bool]) -> dict[str, object]:
    """Fields of the sliding windows.

    Without ``layer_types``, ``is_windowed`` says whether a layer has a window, from its number and
    ``max_window_layers``.

    Raises:
        WeightError: a layer has a window that is switched off; transformers fails on it.
    """
    kinds, bound = hf.get("layer_types"), hf["max_window_layers"]
    if hf["use_sliding_window"] and hf["sliding_window"] is not None:
        if kinds is None:
            kinds = [
                "sliding_attention" if is_windowed(number, bound) else "full_attention"
                for number in range(hf["num_hidden_layers"])
            ]
        return window_fields(hf, kinds)
    if "sliding_attention" in (kinds or ()):
        raise WeightError(
            "layer_types has sliding_attention while use_sliding_window is false; set "
            "use_sliding_window = true, or full_attention for each layer"
        )
    return {}


def _dense_windows(hf: HfConfig) -> dict[str, object]:
    """Windows in the layers from ``max_window_layers`` on (``Qwen3Config`` in transformers)."""
    return _windows(hf, lambda number, bound: number >= bound)


def mixture(hf: HfConfig) -> dict[str, object]:
    """Layers are sparse by the rule of ``Qwen3MoeDecoderLayer`` in transformers."""
    step, dense = hf["decoder_sparse_step"], hf.get("mlp_only_layers") or []
    sparse = [
        number not in dense and (number + 1) % step == 0
        for number in range(hf["num_hidden_layers"])
    ]
    return {
        # Softmax over all experts, divided by the sum of the selected, is softmax over the
        # selected.
        "moe_router_pre_softmax": not hf["norm_topk_prob"],
        **expert_fields(
            hf, num_experts=hf.get("num_experts") or hf["num_local_experts"], layer_is_sparse=sparse
        ),
    }


def _qwen3_moe(hf: HfConfig) -> dict[str, object]:
    """Every layer has the window (``Qwen3MoeModel`` in transformers)."""
    every = {**hf, "layer_types": None, "max_window_layers": None}
    windows = _windows(every, lambda number, bound: True)
    return {"qk_layernorm": True, **mixture(hf), **windows}


def gated_shared_expert(hf: HfConfig) -> dict[str, object]:
    """TransformerConfig fields of a shared expert whose output a sigmoid gate scales."""
    return {
        "moe_shared_expert_intermediate_size": hf["shared_expert_intermediate_size"],
        "moe_shared_expert_gate": True,
    }


def _qwen2_moe(hf: HfConfig) -> dict[str, object]:
    """Windows in every other layer before ``max_window_layers`` (``Qwen2MoeConfig``)."""
    return {
        **_windows(hf, lambda number, bound: number % 2 == 0 and number < bound),
        "add_qkv_bias": hf["qkv_bias"],
        **gated_shared_expert(hf),
        **mixture(hf),
    }


FAMILIES: dict[str, Family] = {
    "Qwen2ForCausalLM": Family(
        rules=(*_DENSE, *names.QKV_BIAS),
        fields=lambda hf: {"add_qkv_bias": True, **_dense_windows(hf)},
        model_type="qwen2",
        page="qwen2",
        models="Qwen2.5",
        adapters=True,
        defaults=_WINDOWS,
        engines_lack_windows=True,
    ),
    "Qwen2MoeForCausalLM": Family(
        rules=(*_DENSE, *names.QKV_BIAS, *names.EXPERTS, *names.GATED_SHARED_EXPERT),
        fields=_qwen2_moe,
        model_type="qwen2_moe",
        page="qwen2",
        models="Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B: shared expert with a gate",
        engines_lack_dense_layers=True,
        defaults=_WINDOWS | EXPERTS | {"qkv_bias": True},
        engines_lack_windows=True,
    ),
    "Qwen3ForCausalLM": Family(
        rules=(*_DENSE, *names.QK_NORM),
        fields=lambda hf: {"qk_layernorm": True, **_dense_windows(hf)},
        model_type="qwen3",
        page="qwen3",
        models="Qwen3",
        adapters=True,
        defaults=_WINDOWS | {"head_dim": 128},
        refused=("attention_bias",),
        engines_lack_windows=True,
    ),
    "Qwen3MoeForCausalLM": Family(
        rules=(*_DENSE, *names.QK_NORM, *names.EXPERTS),
        fields=_qwen3_moe,
        model_type="qwen3_moe",
        page="qwen3",
        models="Qwen3 with experts: 30B-A3B, 235B-A22B",
        adapters=True,
        engines_lack_dense_layers=True,
        defaults=EXPERTS | {"use_sliding_window": False},
        refused=("attention_bias",),
        engines_lack_windows=True,
    ),
}
