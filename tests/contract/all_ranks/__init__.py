"""Compare all ranks of a configuration with the planner and with the model of transformers.

Input: facts about each rank, from ``rlpost.extensions.rehearsal``. Output: one line for each
contradiction among groups, weights, optimizer state, parts of a checkpoint, critic, adapters,
memory and weight-update plan. They are checks of this project's code: no setting of a user can
cause one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rlpost.config.plan.shape import rank_parameters
from rlpost.config.tree import Config
from rlpost.extensions.planning.counts import stored_bytes
from rlpost.extensions.planning.planned_update import weight_update
from rlpost.extensions.planning.rank_memory import (
    RankMemory,
    held_memory,
    muon_matrices,
    parameter_bytes,
    trained_parameters,
)
from rlpost.extensions.rehearsal.all_ranks.rank_facts import RankFacts
from rlpost.trainer.model_description import description_of
from rlpost.trainer.weights.layouts import tensor_bytes
from tests.contract.all_ranks import contradictions, coverage, critic
from tests.contract.all_ranks.contradictions import Expected, Plan, update_plans
from tests.contract.all_ranks.rank_coordinates import place
from tests.contract.all_ranks.saved import SavedFacts, build_ranks

GPU_BYTES = 80 * 10**9
"""Memory of a GPU, which the buckets of an update are planned for."""

PADDING = 64
"""Alignment of parameters in Megatron's buffers, in elements."""
BUCKET_PADDING = 128
"""Alignment of the ends of Megatron's buffers, per rank that shares the optimizer's state."""
MAIN_WEIGHT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """All ranks of a configuration, and what they are compared with."""

    ranks: Mapping[int, SavedFacts]
    plans: Mapping[int, Plan]
    expected: Expected

    @property
    def problems(self) -> list[str]:
        """One line for each contradiction; computed on each access."""
        return problems(self.ranks, self.plans, self.expected)


def rehearse(config: Config, *, hf: Mapping[str, object] | None = None) -> Rehearsal:
    """Build all ranks, one after another.

    Args:
        config: the settings of the run.
        hf: config.json to compare with; by default that of the checkpoint or of the table [model].

    Raises:
        ConfigError, PlacementError, WeightError: the model or the ranks do not fit the layout.
    """
    ranks = build_ranks(config)
    plans = update_plans(ranks, config, gpu_bytes=GPU_BYTES)
    description = description_of(config)
    compared = hf or description.file_config or description.hf_config
    return Rehearsal(ranks, plans, contradictions.expected_of(config, compared, description.family))


def problems(
    ranks: Mapping[int, SavedFacts], plans: Mapping[int, Plan], expected: Expected
) -> list[str]:
    """Return all contradictions; ``ranks`` and ``plans`` hold every rank of the layout."""
    missing = [
        rank for rank in range(expected.layout.world) if rank not in ranks or rank not in plans
    ]
    if missing:
        return [f"ranks {missing}: no facts, or no plan"]
    return [
        *model_problems(ranks, plans, expected),
        *memory_problems(ranks, expected),
        *traffic_problems(plans[0], expected),
    ]


def model_problems(
    ranks: Mapping[int, SavedFacts], plans: Mapping[int, Plan], expected: Expected
) -> Iterator[str]:
    """Yield the contradictions without those of the bytes that the planner predicts."""
    layout, model = expected.layout, expected.published
    num_adapted = contradictions.num_adapted(expected)
    yield from contradictions.group_problems(ranks, layout)
    yield from coverage.weight_problems(ranks, layout, expected.shape, model)
    yield from coverage.optimizer_problems(
        ranks, spread=expected.config.perf.use_distributed_optimizer
    )
    yield from coverage.checkpoint_problems(ranks, layout, model, num_adapted=num_adapted)
    yield from contradictions.parameter_problems(ranks, expected)
    yield from contradictions.adapter_problems(ranks, expected)
    yield from contradictions.plan_problems(ranks, plans, expected)
    yield from contradictions.sender_problems(ranks, layout)
    yield from critic.problems(ranks, expected)


def memory_problems(ranks: Mapping[int, RankFacts], expected: Expected) -> Iterator[str]:
    """Compare the bytes of weights, gradients and optimizer of each stage with the planner.

    Padding of Megatron's buffers is allowed for.
    """
    layout, each = expected.layout, parameter_bytes(expected.config)
    stages: dict[int, list[RankFacts]] = {}
    for rank, facts in ranks.items():
        stages.setdefault(place(layout, rank).pipeline, []).append(facts)
    for stage, of_stage in sorted(stages.items()):
        planned = planned_bytes(expected, stage)
        padding = (
            PADDING * max(len(facts.weights) for facts in of_stage)
            + 2 * BUCKET_PADDING * layout.world
        )
        compared = (
            ("weights", max(facts.memory.weights for facts in of_stage), planned.weights, 0),
            (
                "gradients",
                max(facts.memory.gradients for facts in of_stage),
                planned.gradients,
                each.gradients,
            ),
            (
                "optimizer",
                max(map(num_optimized, of_stage)) * each.optimizer,
                planned.optimizer,
                each.optimizer,
            ),
        )
        for name, size, wanted, element in compared:
            if not wanted <= size <= wanted + padding * element:
                yield f"stage {stage}: {name} take {size} bytes on a rank, the planner says {wanted}"
    main_bytes = 0 if expected.config.perf.bf16 is False else MAIN_WEIGHT_BYTES
    for rank, facts in ranks.items():
        size, elements = facts.memory.main_weights, num_optimized(facts)
        if size != main_bytes * elements:
            yield f"rank {rank}: main weights take {size} bytes, its optimizer has {elements} elements"


def traffic_problems(
    plan: Plan, expected: Expected, *, in_fp8: bool = False, gpu_bytes: int = GPU_BYTES
) -> Iterator[str]:
    """Check buckets and bytes of the plan against ``rlpost plan``, which omits expert biases."""
    width = parameter_bytes(expected.config).weights
    said = weight_update(
        expected.config,
        expected.shape,
        expected.layout,
        gpu_bytes=gpu_bytes,
        width=width,
        in_fp8=in_fp8,
    )
    buffers = expected.published.buffers
    sizes = [
        sum(size for name, size in tensor_bytes(bucket).items() if name not in buffers)
        for bucket in plan
    ]
    engine = stored_bytes(expected.shape, 1 if in_fp8 else width)
    for what, found, wanted in (
        ("buckets", len(plan), said.num_buckets),
        ("bytes of trained weights", sum(sizes), said.total_bytes),
        ("bytes in its largest bucket", max(sizes), said.largest_bytes),
        ("bytes of trained weights in an engine", sum(sizes), engine),
    ):
        if found != wanted:
            yield f"weight update: it has {found} {what}, the planner says {wanted}"


def planned_bytes(expected: Expected, stage: int) -> RankMemory:
    """Return the planner's bytes on a rank of a stage, without optimizer offload."""
    parameters = rank_parameters(expected.shape, expected.layout, stage)
    optimizer = expected.config.optimizer.model_copy(update={"optimizer_cpu_offload": False})
    here = expected.config.model_copy(update={"optimizer": optimizer})
    trained = trained_parameters(here, expected.shape, expected.layout, stage)
    matrices = muon_matrices(here, expected.shape, expected.layout, stage)
    return held_memory(here, expected.layout, parameters, trained, matrices)[0]


def num_optimized(facts: RankFacts) -> int:
    """Return the number of elements whose optimizer state is on the rank."""
    ranges = [weight.optimizer for weight in facts.trained if weight.optimizer is not None]
    return sum(end - start for start, end in ranges)
