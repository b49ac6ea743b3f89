"""Llama 3 and 3.1 (arXiv 2407.21783), Mistral (arXiv 2310.06825)."""

from __future__ import annotations

from rlpost.models import names
from rlpost.models.family import Family, window_fields
from rlpost.models.model_types import HfConfig


def _mistral(hf: HfConfig) -> dict[str, object]:
    """Every layer has the window, if there is one (``MistralModel`` in transformers).

    Raises KeyError without the key: transformers would take one of 4096, engines none.
    """
    if hf["sliding_window"] is None:
        return {}
    return window_fields(hf, ["sliding_attention"] * hf["num_hidden_layers"])


_RULES = (*names.OUTSIDE_LAYERS, *names.ATTENTION, *names.MLP_NORM, *names.DENSE_MLP)

FAMILIES: dict[str, Family] = {
    "MistralForCausalLM": Family(
        rules=_RULES,
        fields=_mistral,
        model_type="mistral",
        page="llama",
        models="Mistral 7B, Nemo, Small",
        engines_lack_windows=True,
        engines_lack_fp8_scales=True,
    ),
    "LlamaForCausalLM": Family(
        rules=_RULES,
        refused=("attention_bias", "mlp_bias"),
        model_type="llama",
        page="llama",
        models="Llama 3, Llama 3.1 (scaled rotary embedding), SmolLM2",
        adapters=True,
        engines_lack_fp8_scales=True,
    ),
}
