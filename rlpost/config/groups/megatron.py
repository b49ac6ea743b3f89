"""The table [megatron] of a recipe: what is Megatron-core's own."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict

from rlpost.config.groups.base import Group


class MegatronConfig(Group):
    """Any field of Megatron-core's TransformerConfig, OptimizerConfig or DistributedDataParallelConfig that is no
    setting of another table; as a flag or a key by the field's name."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    @property
    def options(self) -> dict[str, Any]:
        """What was given, by the names of Megatron's fields."""
        return dict(self.model_extra or {})
