"""Rehearse a run: build every rank, run the phases, and check what all ranks did.

Input: the settings of the run. Output: a ``RehearsalResult``. Building takes a fraction of a
second a rank, so every rank is built. The phases take seconds, so two ranks of each class run them
unless all are asked for (``symmetry``).
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from common.units import counted
from rlpost.config import extensions
from rlpost.config.plan.hf_shape import hf_shape
from rlpost.config.tree import Config
from rlpost.extensions.rehearsal.all_ranks.distributed_calls import Recording
from rlpost.extensions.rehearsal.all_ranks.hangs import hangs
from rlpost.extensions.rehearsal.all_ranks.meta import MetaResults
from rlpost.extensions.rehearsal.all_ranks.phases import Phases, rehearse_phases
from rlpost.extensions.rehearsal.all_ranks.planned import PlannedStep, planned_step
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


def build_ranks(config: Config) -> dict[int, RankFacts]:
    """Build all ranks, one after another; a rank of a large model takes a third of a second.

    Raises:
        ConfigError, PlacementError, WeightError: the model or the ranks do not fit the layout.
    """
    description, world = description_of(config), config.actor_world_size
    return {
        rank: rehearse_rank(config, description, rank=rank, world=world) for rank in range(world)
    }


def rehearse_run(
    config: Config,
    options: RehearsalOptions,
    *,
    facts: Facts | None = None,
    say: Say = lambda _: None,
) -> RehearsalResult:
    """Rehearse a run.

    Args:
        config: its settings.
        options: see there.
        facts: about every rank, where they are built already.
        say: is called with the name of each step before it runs.

    Raises:
        ConfigError, PlacementError, WeightError: the model or the ranks do not fit the layout.
    """
    started = time.monotonic()
    estimate = extensions.rank_memory()
    description, world = description_of(config), config.actor_world_size
    shape = replace(hf_shape(description.hf_config), mtp=config.grpo.enable_mtp_training)
    step = planned_step(config, shape, limit=options.micro_batches)
    say(f"building {counted(world, 'rank')}")
    facts = facts or build_ranks(config)
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
    planned = max(estimate(config, shape, options.gpu_bytes, True), key=lambda rank: rank.total)
    return RehearsalResult(
        checks=(
            _schedule_check(step),
            _hangs(recorded),
            *([offload_check(recorded.recordings.values())] if phases.offloads else []),
            memory_check(memory, options.gpu_bytes, context=planned.context),
        ),
        memory=memory,
        classes=recorded.classes,
        ran=recorded.ran,
        num_calls=sum(len(one.calls) for one in recorded.recordings.values()),
        micro_batches=(len(step.batch.micro_batches), step.num_micro_batches[0]),
        gpu_bytes=options.gpu_bytes,
        planned_bytes=planned.total,
        compared=compared_parts(memory, estimate(config, shape, options.gpu_bytes, False)),
        seconds=time.monotonic() - started,
        peak_host_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


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
