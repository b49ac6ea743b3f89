"""Rehearse a whole configuration: all its ranks, their weight-update plans, and what contradicts in
them.

Input: the settings and, where it is known, config.json of the model as published. Output: a
``Rehearsal``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlpost.actor.settings import ActorSettings
from rlpost.config.tree import Config
from rlpost.rehearsal.check import Expected, expected_of, problems
from rlpost.rehearsal.facts import RankFacts
from rlpost.rehearsal.model import description_of
from rlpost.rehearsal.rank import rehearse_rank
from rlpost.rehearsal.update_plan import Plan, update_plans


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """All ranks of a configuration, and what they are compared with."""

    ranks: Mapping[int, RankFacts]
    plans: Mapping[int, Plan]
    expected: Expected

    @property
    def problems(self) -> list[str]:
        """One line for each contradiction; computed on each access."""
        return problems(self.ranks, self.plans, self.expected)


def rehearse(
    config: Config, settings: ActorSettings, *, hf: Mapping[str, object] | None = None
) -> Rehearsal:
    """Build all ranks, one after another; about a third of a second for each of a large model.

    Args: config: the settings of the run. settings: those of an actor, made from ``config``. hf:
        config.json to compare with; that of the checkpoint or of the table [model] unless given.

    Raises:
        ConfigError, PlacementError, WeightError: the model or the ranks do not fit the layout.
    """
    description, world = description_of(settings), config.actor_world_size
    ranks = {
        rank: rehearse_rank(settings, description, rank=rank, world=world) for rank in range(world)
    }
    plans = update_plans(ranks, config)
    compared = description.hf_config if hf is None else hf
    return Rehearsal(ranks, plans, expected_of(config, compared))
