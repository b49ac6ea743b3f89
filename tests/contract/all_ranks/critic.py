"""Check the critic on all ranks: weights, optimizer state and part of a checkpoint. Pure.

Input: facts whose ``critic`` is set. Output: one line per contradiction. A critic is the policy
with a value head in place of the output layer and without a layer for multi-token prediction, so
its expected tensors follow from those of the policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from rlpost.extensions.planning.counts import critic_parameters
from tests.contract.all_ranks import coverage
from tests.contract.all_ranks.contradictions import Expected, parameters_of
from tests.contract.all_ranks.published import Published
from tests.contract.all_ranks.rank_coordinates import place
from tests.contract.all_ranks.saved import SavedFacts

LM_HEAD, SCORE_WEIGHT, SCORE_BIAS = "lm_head.weight", "score.weight", "score.bias"
"""Names of transformers, the last two in its classes for token classification."""


def problems(ranks: Mapping[int, SavedFacts], expected: Expected) -> Iterator[str]:
    """Yield the contradictions of all critics; ``expected`` is of the policy."""
    facts = {rank: one.critic for rank, one in ranks.items() if one.critic is not None}
    if not facts:
        return
    layout, shape = expected.layout, replace(expected.shape, tied=False, mtp=False)
    tensors = of_critic(expected)
    spread = expected.config.perf.use_distributed_optimizer
    for rank, one in facts.items():
        held = parameters_of(one)
        planned = critic_parameters(expected.shape, layout, place(layout, rank).pipeline)
        if held != planned:
            yield f"critic: rank {rank}: {held} are built, the planner counts {planned}"
    for problem in (
        *coverage.weight_problems(facts, layout, shape, tensors),
        *coverage.optimizer_problems(facts, spread=spread),
        *coverage.checkpoint_problems(facts, layout, tensors),
    ):
        yield f"critic: {problem}"


def of_critic(expected: Expected) -> Published:
    """The tensors of a critic; of ``Published`` nothing else is asked."""
    num_layers = expected.shape.num_layers
    body = {
        name: shape
        for name, shape in expected.published.tensors.items()
        if name != LM_HEAD and (coverage.layer_of(name) or 0) < num_layers
    }
    head = {SCORE_WEIGHT: (1, expected.shape.hidden), SCORE_BIAS: (1,)}
    return replace(expected.published, tensors=body | head)
