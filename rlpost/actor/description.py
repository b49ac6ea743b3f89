"""What config.json of a checkpoint says about its model, and whether this trainer can train it. Standard library only.

In: a Hugging Face folder. Out: a ModelDescription. Families stand in one table, ``MODEL_SPECS``; a new one is a row
here and a table of names in ``rlpost.weights.names``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlpost.errors import ConfigError, WeightError
from rlpost.weights.names import Dimensions


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What a family adds to the common dense decoder (RMSNorm, rotary embedding, gated SiLU, no biases)."""

    transformer_fields: Mapping[str, Any] = field(default_factory=dict)  # of Megatron's TransformerConfig


MODEL_SPECS: dict[str, ModelSpec] = {
    "Qwen3ForCausalLM": ModelSpec({"qk_layernorm": True}),
}
"""By the first entry of ``architectures``."""


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """One checkpoint's architecture, read once."""

    path: Path
    architecture: str
    hf_config: Mapping[str, Any]

    @property
    def spec(self) -> ModelSpec:
        return MODEL_SPECS[self.architecture]

    @property
    def head_dim(self) -> int:
        hf = self.hf_config
        return hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]

    @property
    def dims(self) -> Dimensions:
        return Dimensions(self.hf_config["num_key_value_heads"], self.head_dim, self.hf_config["vocab_size"])

    @property
    def rope_theta(self) -> float:
        """The base of the rotary embedding; transformers 5 writes it under another key than 4 did."""
        return (self.hf_config.get("rope_parameters") or self.hf_config)["rope_theta"]

    def check_tensor_parallel(self, size: int) -> None:
        """Raises ConfigError when the model cannot be cut into ``size`` equal parts."""
        for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            if self.hf_config[key] % size:
                raise ConfigError(
                    f"tensor_model_parallel_size={size} does not divide {key}={self.hf_config[key]} of {self.path}; "
                    "choose a divisor"
                )

    def num_valid_columns(self, *, tp_rank: int, tp_size: int) -> int:
        """How many columns of a rank's logits are tokens; the rest pads the vocabulary to a multiple of the ranks."""
        vocab_size = self.hf_config["vocab_size"]
        per_rank = -(-vocab_size // tp_size)
        return min(max(vocab_size - tp_rank * per_rank, 0), per_rank)


def read_description(hf_checkpoint: str | Path) -> ModelDescription:
    """Read config.json of a Hugging Face folder.

    Raises WeightError when there is none, for an architecture of no row, and for options the model here does not have:
    a model that computes something else than its checkpoint must not be trained.
    """
    path = Path(hf_checkpoint) / "config.json"
    if not path.is_file():
        raise WeightError(f"hf_checkpoint={hf_checkpoint} has no config.json; point it at a Hugging Face folder")
    hf = json.loads(path.read_text())
    architecture = (hf.get("architectures") or ["none given"])[0]
    if architecture not in MODEL_SPECS:
        raise WeightError(f"{path}: architecture {architecture!r} is not known; known: {sorted(MODEL_SPECS)}")
    rope_type = (hf.get("rope_parameters") or hf.get("rope_scaling") or {}).get("rope_type", "default")
    unsupported = {
        "rope_type": rope_type if rope_type != "default" else None,
        "attention_bias": hf.get("attention_bias"),
        "use_sliding_window": hf.get("use_sliding_window"),
        "hidden_act": hf["hidden_act"] if hf.get("hidden_act", "silu") != "silu" else None,
        "attention_dropout": hf.get("attention_dropout"),
    }
    for key, value in unsupported.items():
        if value:
            raise WeightError(f"{path}: {key}={value!r} is not supported; use a checkpoint without it")
    return ModelDescription(path, architecture, hf)
