"""Types for the two forms in which the architecture of a model is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HfConfig = Mapping[str, Any]
"""A model's config.json; ``rlpost.models.family`` lists the keys of each architecture."""
EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")
"""Keys of the number of experts in config.json, by model family."""
MegatronFields = dict[str, Any]
"""Fields of Megatron's ``TransformerConfig``, by name."""
