"""Check the critic on all ranks: weights, optimizer state and part of a checkpoint. Pure.

Input: facts whose ``critic`` is set. Output: one line per contradiction. A critic is the policy
with a value head in place of the output layer, so its expected tensors follow from those of the
policy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from rlpost.config.plan.shape import critic_parameters
from rlpost.extensions.rehearsal.all_ranks import coverage
from rlpost.extensions.rehearsal.all_ranks.contradictions import Expected, parameters_of
from rlpost.extensions.rehearsal.all_ranks.published import Published
from rlpost.extensions.rehearsal.all_ranks.rank_coordinates import place
from rlpost.extensions.rehearsal.all_ranks.rank_facts import RankFacts

LM_HEAD, SCORE_WEIGHT, SCORE_BIAS = "lm_head.weight", "score.weight", "score.bias"
"""Names of transformers, the last two in its classes for token classification."""


def critics(ranks: Mapping[int, RankFacts]) -> dict[int, RankFacts]:
    """The facts about the critic of each rank; empty without one."""
    return {rank: facts.critic for rank, facts in ranks.items() if facts.critic is not None}


def of_critic(policy: Published, hidden: int) -> Published:
    """The tensors of a critic beside a policy without a layer for multi-token prediction."""
    head = {SCORE_WEIGHT: (1, hidden), SCORE_BIAS: (1,)}
    body = {name: shape for name, shape in policy.tensors.items() if name != LM_HEAD}
    removed = math.prod(policy.tensors[LM_HEAD]) if LM_HEAD in policy.tensors else 0
    return Published(body | head, policy.num_parameters - removed + hidden + 1, policy.buffers)


def weight_problems(
    ranks: Mapping[int, RankFacts], expected: Expected, policy: Published
) -> Iterator[str]:
    """Check the weights of each rank against the planner, and of all against transformers.

    ``expected`` is of the policy, and ``policy`` the model of transformers without a layer for
    multi-token prediction.
    """
    critic_facts, layout = critics(ranks), expected.layout
    if not critic_facts:
        return
    for rank, facts in critic_facts.items():
        held = parameters_of(facts)
        planned_parameters = critic_parameters(expected.shape, layout, place(layout, rank).pipeline)
        if held != planned_parameters:
            yield f"critic: rank {rank}: {held} are built, the planner counts {planned_parameters}"
    untied = replace(expected.shape, tied=False, mtp=False)
    published = of_critic(policy, expected.shape.hidden)
    yield from _named(coverage.weight_problems(critic_facts, layout, untied, published))


def optimizer_problems(ranks: Mapping[int, RankFacts], *, spread: bool) -> Iterator[str]:
    """As ``coverage.optimizer_problems``."""
    yield from _named(coverage.optimizer_problems(critics(ranks), spread=spread))


def checkpoint_problems(
    ranks: Mapping[int, RankFacts], expected: Expected, policy: Published
) -> Iterator[str]:
    """As ``coverage.checkpoint_problems``; the arguments are those of ``weight_problems``."""
    if found := critics(ranks):
        published = of_critic(policy, expected.shape.hidden)
        yield from _named(coverage.checkpoint_problems(found, expected.layout, published))


def _named(problems: Iterator[str]) -> Iterator[str]:
    return (f"critic: {problem}" for problem in problems)
