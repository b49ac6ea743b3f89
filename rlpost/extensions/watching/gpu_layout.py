"""The GPUs of a run by what uses them. Pure.

Input: the settings of a run. Output: a ``GpuLayout``, of which the goodput of the run is computed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from common.fleet_name import POLICY

if TYPE_CHECKING:  # a list of ended runs does without the settings
    from rlpost.config.tree import Config


@dataclass(frozen=True, slots=True)
class GpuLayout:
    """GPUs of a run. ``trainer`` and ``engines`` are the same GPUs with ``is_colocated``.

    ``num_nodes`` includes spare nodes. In synchronous runs engines are idle while the trainer
    works. ``groups``: GPUs of engines by the group [engines.NAME]; ``evaluates``: the group that
    evaluates.
    """

    gpus_per_node: int
    num_nodes: int
    trainer: int
    engines: int
    is_colocated: bool = False
    is_synchronous: bool = True
    gpu_hour_price: float | None = None
    groups: Mapping[str, int] = field(default_factory=dict)
    evaluates: str | None = None

    def use_of(self, group: str) -> Literal["trained", "evaluation"]:
        """Return the use of the time in which engines of a group work."""
        return "evaluation" if group == self.evaluates != POLICY else "trained"

    @classmethod
    def of(cls, config: Config) -> GpuLayout:
        """The layout that settings request."""
        cluster = config.cluster
        return cls(
            gpus_per_node=cluster.num_gpus_per_node,
            num_nodes=config.num_nodes + cluster.spare_nodes,
            trainer=config.actor_world_size,
            engines=config.rollout_num_gpus,
            is_colocated=cluster.colocate,
            is_synchronous=config.rollout.rollout_mode == "sync",
            gpu_hour_price=cluster.gpu_hour_price,
            groups=config.gpus_by_group,
            evaluates=config.eval.eval_engines,
        )

    @classmethod
    def of_settings(cls, settings: Mapping[str, object]) -> GpuLayout | None:
        """The layout of a run.json; None when it is missing, or has settings that are gone."""
        if not settings:
            return None
        from rlpost.config.load import read_dump

        try:
            config, gone = read_dump(json.dumps(settings))
            return None if gone else cls.of(config)
        except ValueError:  # pydantic's ValidationError is one
            return None
