"""The table [lora] of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rlpost.config.groups.base import Group, Positive, PositiveNumber, several

Target = Literal["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "experts"]
DEFAULT_TARGETS: tuple[Target, ...] = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


class LoraConfig(Group):
    """Low-rank adapters: the model is frozen, and only the adapters are trained (docs/lora.md)."""

    lora_rank: Positive | None = None
    """Rank of the adapters. Unset: no adapters, all weights are trained."""
    lora_alpha: PositiveNumber = 32.0
    """Scale of the adapters: their output is multiplied by alpha / rank."""
    lora_dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Probability of dropout on the input of the adapters while training; only with --loss-type
    sft_loss."""
    lora_targets: Annotated[tuple[Target, ...], BeforeValidator(several), Field(min_length=1)] = (
        DEFAULT_TARGETS
    )
    """Linear layers with adapters, by Megatron's names: linear_qkv and linear_proj of attention,
    linear_fc1 (gate and up) and linear_fc2 (down) of dense MLPs and shared experts, and experts for
    both of all routed experts."""
    lora_export: Literal["merged", "peft"] = "merged"
    """What --save-hf writes: merged weights as a complete Hugging Face folder, or the adapters alone
    as a folder for PEFT."""
