"""Llama 3 and 3.1 (arXiv 2407.21783)."""

from __future__ import annotations

from rlpost.models import names
from rlpost.models.family import Family

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        rules=(*names.OUTSIDE_LAYERS, *names.ATTENTION, *names.MLP_NORM, *names.DENSE_MLP),
        refused=("attention_bias", "mlp_bias"),
        describes=lambda given: True,
        model_type="llama",
        page="llama",
        models="Llama 3, Llama 3.1 (scaled rotary embedding), SmolLM2",
        adapters=True,
        engines_lack_fp8_scales=True,
    ),
}
