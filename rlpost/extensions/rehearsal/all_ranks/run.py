"""Rehearse a run: build every rank, run the phases, and check what all ranks did.

Input: the settings of the run. Output: a ``RehearsalResult``. Building takes a fraction of a
second a rank, so every rank is built. The phases take seconds, so two ranks of each class run them
unless all are asked for (``symmetry``).
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from common.units import counted
from rlpost.config.plan.estimate import estimate
from rlpost.config.tree import Config
from rlpost.extensions.rehearsal.all_ranks import contradictions, coverage, critic
from rlpost.extensions.rehearsal.all_ranks.contradictions import (
    Expected,
    Plan,
    expected_of,
    update_plans,
)
from rlpost.extensions.rehearsal.all_ranks.distributed_calls import Recording
from rlpost.extensions.rehearsal.all_ranks.hangs import hangs
from rlpost.extensions.rehearsal.all_ranks.meta import MetaResults
from rlpost.extensions.rehearsal.all_ranks.other_layout import load_check
from rlpost.extensions.rehearsal.all_ranks.phases import Phases, rehearse_phases
from rlpost.extensions.rehearsal.all_ranks.planned import PlannedStep, planned_step
from rlpost.extensions.rehearsal.all_ranks.published import Published, published
from rlpost.extensions.rehearsal.all_ranks.rank import rehearse_rank
from rlpost.extensions.rehearsal.all_ranks.rank_facts import RankFacts
from rlpost.extensions.rehearsal.all_ranks.result import (
    RehearsalCheck,
    RehearsalResult,
    compared_parts,
    memory_check,
    memory_use,
    offload_check,
)
from rlpost.extensions.rehearsal.all_ranks.symmetry import Recorded, record
from rlpost.trainer.model_description import description_of

Facts = Mapping[int, RankFacts]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RehearsalOptions:
    """Options of a rehearsal.

    Attributes:
        gpu_bytes: memory of a GPU.
        all_ranks: run the phases of every rank.
        micro_batches: to rehearse; None for enough to fill the pipeline.
    """

    gpu_bytes: int = 80 * 10**9
    all_ranks: bool = False
    micro_batches: int | None = None


def rehearse_run(
    config: Config, options: RehearsalOptions, *, say: Say = lambda _: None
) -> RehearsalResult:
    """Rehearse a run.

    ``say`` is called with the name of each step before it runs.

    Raises:
        ConfigError, PlacementError, WeightError: the model or the ranks do not fit the layout.
    """
    started = time.monotonic()
    description, world = description_of(config), config.actor_world_size
    file_config = description.file_config or description.hf_config
    expected = expected_of(config, file_config, description.family)
    policy = published(file_config, description.family) if config.use_critic else expected.published
    step = planned_step(config, expected.shape, limit=options.micro_batches)
    say(f"building {counted(world, 'rank')}")
    facts = {
        rank: rehearse_rank(config, description, rank=rank, world=world) for rank in range(world)
    }
    plans = update_plans(facts, config, gpu_bytes=options.gpu_bytes)
    phases = Phases(
        step.batch,
        step.log_prob_batch,
        shares_gpus=config.cluster.colocate,
        updates=config.num_engines > 0 and config.sync.update_weight_transport != "disk",
        gpu_bytes=options.gpu_bytes,
        offloads=config.offload_train,
        has_critic=config.use_critic,
    )

    results = MetaResults()

    def run(rank: int) -> Recording:
        say(f"rank {rank}: {', '.join(phases.names)}")
        return rehearse_phases(
            config, description, phases, rank=rank, world=world, facts=facts, results=results
        )

    recorded = record(
        facts, run, all_ranks=options.all_ranks, all_gather=phases.shares_gpus, say=say
    )
    memory = tuple(
        memory_use(one, offloaded_fraction=_offloaded(config))
        for one in recorded.recordings.values()
    )
    say("a checkpoint at another layout")
    perf = config.perf.model_copy(update={"transformer_impl": "local"})
    local = config.model_copy(update={"perf": perf})
    plan = partial(estimate, shape=expected.shape, gpu_bytes=options.gpu_bytes)
    return RehearsalResult(
        checks=(
            *_built(facts, plans, expected, policy),
            _schedule_check(step),
            _hangs(recorded),
            load_check(config, facts),
            *([offload_check(recorded.recordings.values())] if phases.offloads else []),
            memory_check(memory, options.gpu_bytes, context=plan(config).fullest.context),
        ),
        memory=memory,
        classes=recorded.classes,
        ran=recorded.ran,
        num_calls=sum(len(one.calls) for one in recorded.recordings.values()),
        micro_batches=(len(step.batch.micro_batches), step.num_micro_batches[0]),
        gpu_bytes=options.gpu_bytes,
        planned_bytes=plan(config).fullest.train,
        compared=compared_parts(memory, plan(local).ranks),
        seconds=time.monotonic() - started,
        peak_host_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _built(
    facts: Facts, plans: Mapping[int, Plan], expected: Expected, policy: Published
) -> list[RehearsalCheck]:
    """The checks of what every rank built; ``policy`` has no layer for multi-token prediction."""
    layout, model = expected.layout, expected.published
    spread = expected.config.perf.use_distributed_optimizer
    ranks, tensors = counted(len(facts), "rank"), counted(len(model.tensors), "tensor")
    weights = [
        *coverage.weight_problems(facts, layout, expected.shape, model),
        *contradictions.parameter_problems(facts, expected),
        *contradictions.adapter_problems(facts, expected),
        *critic.weight_problems(facts, expected, policy),
    ]
    update = [
        *contradictions.plan_problems(facts, plans, expected),
        *contradictions.sender_problems(facts, layout),
    ]
    buckets = f"{tensors} in {counted(len(plans[0]), 'bucket')}, {counted(expected.config.num_engines, 'engine')}"
    return [
        RehearsalCheck(
            "groups of the layout", tuple(contradictions.group_problems(facts, layout)), ranks
        ),
        RehearsalCheck("each weight on its ranks, once", tuple(weights), tensors),
        RehearsalCheck(
            "optimizer state of each weight, once",
            (
                *coverage.optimizer_problems(facts, spread=spread),
                *critic.optimizer_problems(facts, spread=spread),
            ),
            ranks,
        ),
        RehearsalCheck("each weight to each engine, once", tuple(update), buckets),
        RehearsalCheck(
            "each part of a checkpoint, once",
            (
                *coverage.checkpoint_problems(
                    facts, layout, model, num_adapted=contradictions.num_adapted(expected)
                ),
                *critic.checkpoint_problems(facts, expected, policy),
            ),
            f"{sum(len(one.checkpoint) for one in facts.values())} parts",
        ),
    ]


def _schedule_check(step: PlannedStep) -> RehearsalCheck:
    counts = step.num_micro_batches
    odd = [
        f"data-parallel rank {rank} has {count} micro-batches in a step, rank 0 has {counts[0]}"
        for rank, count in enumerate(counts)
        if count != counts[0]
    ]
    extent = f"{len(counts)} data-parallel ranks, {counts[0]} micro-batches each"
    return RehearsalCheck("as many micro-batches on each rank", tuple(odd), extent)


def _hangs(recorded: Recorded) -> RehearsalCheck:
    calls = [call for one in recorded.recordings.values() for call in one.calls]
    groups = {call.group for call in calls}
    extent = f"{counted(len(calls), 'call')} in {counted(len(groups), 'group')}"
    faults = hangs(recorded.recordings)
    messages = tuple(f"the step would hang: {one.message}" for one in faults)
    return RehearsalCheck("collectives in the same order, with matching shapes", messages, extent)


def _offloaded(config: Config) -> float:
    given = config.optimizer
    return given.optimizer_offload_fraction if given.optimizer_cpu_offload else 0.0
