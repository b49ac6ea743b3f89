"""Run the phases of one rank: log-probs, one train step, one weight update, on the meta device.

Input: settings, description, the batch of the rank. Output: its ``Recording``. The rank is an
``Actor``, so the code is that of a run; ``given`` has the values that meta tensors lack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer

from rlpost.columns import FloatColumn
from rlpost.config.tree import Config
from rlpost.errors import WeightError
from rlpost.extensions.rehearsal.all_ranks.distributed_calls import (
    OFFLOAD,
    TRAIN,
    UPDATE,
    OffloadCycle,
    Recording,
)
from rlpost.extensions.rehearsal.all_ranks.given import Schedule, given_values
from rlpost.extensions.rehearsal.all_ranks.meta import MetaResults, as_rank, building
from rlpost.extensions.rehearsal.all_ranks.rank import as_on_gpu
from rlpost.extensions.rehearsal.all_ranks.rank_facts import RankFacts
from rlpost.extensions.rehearsal.all_ranks.recorder import CallRecorder
from rlpost.trainer import actor as actor_module
from rlpost.trainer import critic as critic_module
from rlpost.trainer import device, frozen, memory, step
from rlpost.trainer.actor import Actor
from rlpost.trainer.memory import GRADS, OPTIMIZER, WEIGHTS, DeviceMemory
from rlpost.trainer.model import inventory_of
from rlpost.trainer.model_description import ModelDescription
from rlpost.trainer.packing import PackedMicroBatch
from rlpost.trainer.passes import Logprobs
from rlpost.trainer.torch_dist import optimizer_state
from rlpost.trainer.value_model import value_inventory
from rlpost.trainer.weights.importer import HuggingFaceFolder
from rlpost.trainer.weights.inventory import Entry
from rlpost.trainer.weights.layouts import pack
from rlpost.types import TrainBatch, TrainSample

LOG_PROBS, VALUES, TRAIN_CRITIC = "log-probs", "values", "train critic"


@dataclass(frozen=True, slots=True)
class Phases:
    """The phases of every rank in a rehearsal.

    Attributes:
        batch: micro-batches of a train step.
        log_prob_batch: those of the passes before it; None when there are none.
        shares_gpus: the engines are on the trainer's GPUs, so each rank gathers every bucket.
        updates: whether engines receive weights over the network or from the same GPU.
        gpu_bytes: memory of a GPU, which the size of the buckets depends on.
        offloads: whether the trainer is offloaded while engines generate.
        has_critic: whether a critic is trained before the policy.
    """

    batch: TrainBatch
    log_prob_batch: TrainBatch | None
    shares_gpus: bool
    updates: bool = True
    gpu_bytes: int = 80 * 10**9
    offloads: bool = False
    has_critic: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The phases in order."""
        given = {
            LOG_PROBS: self.log_prob_batch is not None,
            VALUES: self.has_critic,
            TRAIN_CRITIC: self.has_critic,
            TRAIN: True,
            UPDATE: self.updates,
            OFFLOAD: self.offloads,
        }
        return tuple(name for name, is_there in given.items() if is_there)


def rehearse_phases(
    config: Config,
    description: ModelDescription,
    phases: Phases,
    *,
    rank: int,
    world: int,
    facts: Mapping[int, RankFacts],
    results: MetaResults | None = None,
) -> Recording:
    """Run all phases of one rank of ``world``.

    ``facts`` are those of all ranks, from ``rehearse_rank``: pipeline stages exchange the entries
    of their weights when a run starts. ``results`` are those of operations, which all ranks of a
    rehearsal add to and read; without them every operation is dispatched.

    Raises:
        ConfigError, PlacementError: the model or the number of ranks does not fit the layout.
        RuntimeError: the code reads a value that a rehearsal does not have; with the line.
    """
    config = as_on_gpu(config)
    topk = int(description.fields.get("moe_router_topk") or 0)
    recorder = CallRecorder(transfers=False, results=results, topk=topk)
    with (
        as_rank(rank, world, config, num_virtual_stages=description.num_virtual_stages(config)),
        recorder.recording(),
        recorder.during("build"),
    ):
        actor = Actor(config, description)
        with building(), _without_files(actor, facts, gpu_bytes=phases.gpu_bytes):
            actor.build()
            placeholders = {one: _moments(one) for one in _optimizers(actor)}
        # As in a run, tensors without a device are in host memory from here on.
        with (
            given_values() as schedule,
            _followed(actor, schedule),
            _replaced_at_first_step(placeholders),
            without_host_memory(),
        ):
            cycle = run_phases(actor, phases, recorder)
        return recorder.recorded(rank, _held(actor), cycle)


@contextmanager
def _without_files(
    actor: Actor, facts: Mapping[int, RankFacts], *, gpu_bytes: int
) -> Iterator[None]:
    """Context in which an actor is built without its weights, for a GPU of this size."""
    entries = {rank: one.entries for rank, one in facts.items()}
    critic_entries = {rank: one.critic.entries for rank, one in facts.items() if one.critic}

    inventory = partial(inventory_of, gather=partial(_exchanged, entries))
    inventory_of_critic = partial(value_inventory, gather=partial(_exchanged, critic_entries))
    with (
        patch.object(actor, "_read_initial_weights"),
        patch.object(actor_module, "HuggingFaceFolder", _folder),
        patch.object(actor_module, "inventory_of", inventory),
        patch.object(critic_module, "value_inventory", inventory_of_critic),
        patch.object(device, "total_memory", partial(int, gpu_bytes)),
        patch.object(frozen, "check_frozen", partial(_check_frozen, frozen.check_frozen, facts)),
    ):
        yield


def _check_frozen(
    check: Callable[..., None],
    facts: Mapping[int, RankFacts],
    chunks: Sequence[torch.nn.Module],
    config: Config,
    *,
    stage: int,
) -> None:
    """Check the patterns of frozen weights with the weights of every rank."""
    exchange = dist.all_gather_object

    def gathered(objects: list[object], mine: object, **options: object) -> None:
        exchange(objects, mine, **options)
        objects[:] = [_trains(one) for _, one in sorted(facts.items())]

    with patch.object(dist, "all_gather_object", gathered):
        check(chunks, config, stage=stage)


def _trains(facts: RankFacts) -> tuple[int, bool, list[str]]:
    """Stage, whether it trains a weight, and names of its weights."""
    names = [one.name for one in (*facts.weights, *facts.adapters)]
    return facts.groups["pipeline"].index(facts.rank), any(facts.trained), names


def _exchanged(
    entries: Mapping[int, Sequence[Entry]], mine: list[Entry], group: dist.ProcessGroup
) -> list[list[Entry]]:
    """The entries of weights that pipeline stages exchange."""
    found: list[object] = [None] * group.size()
    dist.all_gather_object(found, mine, group=group)
    return [list(entries[rank]) for rank in dist.get_process_group_ranks(group)]


def _folder(path: str) -> HuggingFaceFolder | SimpleNamespace:
    """The folder of the checkpoint; one without quantised weights where it is not here."""
    try:
        return HuggingFaceFolder(path)
    except WeightError:
        return SimpleNamespace(quantisation=None)


def run_phases(actor: Actor, phases: Phases, recorder: CallRecorder) -> OffloadCycle | None:
    """Run the phases on a built actor, real or rehearsed; return what offload moved."""
    old: Logprobs | None = None
    if phases.log_prob_batch is not None:
        with recorder.during(LOG_PROBS):
            actor.compute_logprobs(phases.log_prob_batch)
        old = _as_zeros(phases.batch) if _is_last_stage() else []
    if phases.has_critic:
        with recorder.during(VALUES):
            actor.compute_values(phases.batch)
        with recorder.during(TRAIN_CRITIC):
            zeros = _as_zeros(phases.batch)
            values = zeros if _is_last_stage() else None
            actor.train_critic(phases.batch, values, list(chain.from_iterable(zeros)))
    with recorder.during(TRAIN):
        actor.train_step(phases.batch, old)
    update = partial(_update, actor, phases, recorder)
    if not phases.offloads:
        update()
        return None
    with recorder.during(OFFLOAD):
        return run_cycle(actor.memory, update, measured=recorder.measure_again)


def _update(actor: Actor, phases: Phases, recorder: CallRecorder) -> None:
    """Gather all weights as one weight update does."""
    if not phases.updates:
        return
    with recorder.during(UPDATE):
        actor._finish_param_sync()
        for index in range(len(actor.buckets)):
            _gather(actor, index, shares_gpus=phases.shares_gpus)


def _gather(actor: Actor, index: int, *, shares_gpus: bool) -> None:
    """What ``send_bucket`` or ``share_bucket`` does before the bytes leave the rank."""
    if shares_gpus:
        tensors = actor.buckets.gather(index, on_all_stages=True)
        pack(tensors.values())
    else:
        actor.broadcast._gather(index)
        actor.broadcast.gathered = None


def _as_zeros(batch: TrainBatch) -> Logprobs:
    def zeros(sample: TrainSample) -> FloatColumn:
        return FloatColumn([0.0] * sample.response_length)

    return [list(map(zeros, micro)) for micro in batch.micro_batches]


def _is_last_stage() -> bool:
    last: bool = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    return last


@contextmanager
def _followed(actor: Actor, schedule: Schedule) -> Iterator[None]:
    """Context in which the schedule gets the micro-batches of each pass before it begins."""
    run, transformer = step.run, actor.model[0].config
    tensor = actor.config.perf.tensor_model_parallel_size
    divisor = tensor if transformer.sequence_parallel else 1

    def followed(
        chunks: Sequence[torch.nn.Module], packed: Sequence[PackedMicroBatch], **options: Any
    ) -> object:
        shapes = [[one.input_ids.size(1) // divisor, 1, transformer.hidden_size] for one in packed]
        schedule.begin(
            shapes,
            num_chunks=len(chunks),
            group_size=transformer.microbatch_group_size_per_vp_stage or 1,
            is_first_stage=parallel_state.is_pipeline_first_stage(ignore_virtual=True),
            is_last_stage=_is_last_stage(),
        )
        return run(chunks, packed, **options)

    with patch.object(step, "run", followed):
        yield


def _optimizers(actor: Actor) -> list[MegatronOptimizer]:
    return [actor.optimizer] + ([] if actor.critic is None else [actor.critic.optimizer])


def _moments(optimizer: MegatronOptimizer) -> list[torch.Tensor]:
    """The moments of each weight, which exist from the first step on: Adam's two, Muon's one."""
    moments = []
    for one in optimizer_state.inner(optimizer):
        for group in one.optimizer.param_groups:
            count = 1 if group.get(optimizer_state.MATRICES) else 2
            for parameter in group["params"]:
                moments += [torch.empty_like(parameter) for _ in range(count)]
    return moments


@contextmanager
def _replaced_at_first_step(
    placeholders: Mapping[MegatronOptimizer, list[torch.Tensor]],
) -> Iterator[None]:
    """Free the placeholders of the moments when an optimizer makes its own."""

    def first_step(own: list[torch.Tensor], step: Callable[[], object]) -> object:
        own.clear()
        return step()

    with ExitStack() as stack:
        for optimizer, own in placeholders.items():
            replaced = partial(first_step, own, optimizer.step_with_ready_grads)
            stack.enter_context(patch.object(optimizer, "step_with_ready_grads", replaced))
        yield


def _held(actor: Actor) -> dict[str, int]:
    """Bytes that stay on the device between phases, by part; none is counted twice."""
    models = {"": (actor.model, actor.optimizer)}
    if actor.critic is not None:
        models["critic "] = (actor.critic.model, actor.critic.optimizer)
    parts = {}
    for whose, (model, optimizer) in models.items():
        parts[f"{whose}weights"] = memory._weights(model)
        parts[f"{whose}gradients"] = memory._grads(model)
        parts[f"{whose}optimizer"] = memory._optimizer_tensors(optimizer)
    seen: set[int] = set()
    held: dict[str, int] = {}
    for name, tensors in parts.items():
        storages = {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
        new = {key: tensor for key, tensor in storages.items() if key not in seen}
        seen |= new.keys()
        held[name] = sum(tensor.untyped_storage().nbytes() for tensor in new.values())
    return held


PARTS = (WEIGHTS, GRADS, OPTIMIZER)


class HostBytes:
    """The size of a copy in host memory, without the memory."""

    def __init__(self, values: torch.Tensor, *, piece_bytes: int = 0) -> None:
        self.num_bytes = values.nbytes

    def fill(self, values: torch.Tensor) -> None:
        """Check that ``values`` has the size of the copy."""
        if values.nbytes != self.num_bytes:
            raise RuntimeError(
                f"{self.num_bytes} offloaded bytes return to a storage of {values.nbytes} bytes"
            )


@contextmanager
def without_host_memory() -> Iterator[None]:
    """Context in which offload allocates no host memory."""
    with patch.object(memory, "HostCopy", HostBytes):
        yield


def run_cycle(
    held: DeviceMemory, send: Callable[[], None], *, measured: Callable[[], None]
) -> OffloadCycle:
    """Offload and onload the trainer once, and send weights in between as ``driver.offload`` does.

    ``send`` sends the weights, with gradients and optimizer offloaded. ``measured`` is called after
    each move, which changes the memory in use.
    """
    tensors = {part: list(held.tensors(part)) for part in PARTS}
    before = {part: _places(part_tensors) for part, part_tensors in tensors.items()}
    leaving = dict(held.offload(GRADS, OPTIMIZER))
    measured()
    send()
    leaving |= held.offload(WEIGHTS)
    measured()
    stayed = [
        f"{len(places)} tensors of {sum(places.values())} bytes of the {part} stay on the device "
        "while engines generate"
        for part, part_tensors in tensors.items()
        if (places := _places(part_tensors))
    ]
    returning = dict(held.restore(*PARTS))
    measured()
    after = {part: _places(held.tensors(part)) for part in PARTS}
    moved = [
        f"the {part} had {sum(before[part].values())} bytes in {len(before[part])} storages, and "
        f"after a cycle have {sum(after[part].values())} bytes in {len(after[part])}"
        for part in PARTS
        if after[part] != before[part]
    ]
    return OffloadCycle(leaving, returning, tuple(stayed + moved))


def _places(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes of each storage, by its identity."""
    storages = memory.storages(tensors)
    return {storage._cdata: storage.nbytes() for storage in storages}
