"""Run the turns of one rank: log-probs, one train step, one weight update, on the meta device.

Input: settings, description, the batch of the rank. Output: its ``Recording``. The rank is an
``Actor``, so the code is that of a run; ``given`` has the values that meta tensors lack.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from rlpost.actor import actor as actor_module
from rlpost.actor import device, memory, parallel, step
from rlpost.actor.actor import Actor
from rlpost.actor.model_description import ModelDescription
from rlpost.actor.packing import PackedMicroBatch
from rlpost.actor.passes import Logprobs
from rlpost.actor.settings import ActorSettings
from rlpost.actor.torch_dist import optimizer_state
from rlpost.columns import FloatColumn
from rlpost.errors import WeightError
from rlpost.rehearsal.calls import Recording
from rlpost.rehearsal.given import Schedule, given_values
from rlpost.rehearsal.meta import as_rank
from rlpost.rehearsal.rank import as_on_gpu
from rlpost.rehearsal.recorder import Recorder
from rlpost.types import TrainBatch
from rlpost.weights.importer import HuggingFaceFolder
from rlpost.weights.inventory import Entry, Inventory

LOG_PROBS, TRAIN, UPDATE = "log-probs", "train", "weight update"


@dataclass(frozen=True, slots=True)
class Turns:
    """What every rank does in a rehearsal.

    Attributes:
        batch: micro-batches of a train step.
        log_prob_batch: those of the passes before it; None when there are none.
        shares_gpus: the engines are on the trainer's GPUs, so each rank gathers every bucket.
        updates: whether engines receive weights over the network or from the same GPU.
        gpu_bytes: memory of a GPU, which the size of the buckets depends on.
    """

    batch: TrainBatch
    log_prob_batch: TrainBatch | None
    shares_gpus: bool
    updates: bool = True
    gpu_bytes: int = 80 * 10**9

    @property
    def names(self) -> tuple[str, ...]:
        """The turns in order."""
        first = () if self.log_prob_batch is None else (LOG_PROBS,)
        return (*first, TRAIN, *((UPDATE,) if self.updates else ()))


def rehearse_turns(
    settings: ActorSettings,
    description: ModelDescription,
    turns: Turns,
    *,
    rank: int,
    world: int,
    entries: Mapping[int, Sequence[Entry]],
) -> Recording:
    """Run all turns of one rank of ``world``.

    Args:
        settings: of an actor.
        description: of the model.
        turns: what the rank does.
        rank: the rank.
        world: number of ranks.
        entries: the weights of the stage of each rank, from ``rehearse_rank``; the stages exchange
            them when a run starts.

    Raises:
        ConfigError, PlacementError: the model or the number of ranks does not fit the layout.
        RuntimeError: the code reads a value that a rehearsal does not have; with the line.
    """
    settings = as_on_gpu(settings)
    recorder = Recorder(transfers=False)
    with (
        as_rank(rank, world, settings, num_virtual_stages=description.num_virtual_stages(settings)),
        recorder.recording(),
        recorder.during("build"),
    ):
        actor = Actor(settings, description)
        with _without_files(actor, entries, gpu_bytes=turns.gpu_bytes):
            actor.build()
        placeholders = _moments(actor)
        topk = int(actor.description.fields.get("moe_router_topk") or 0)
        # As in a run, tensors without a device are in host memory from here on.
        host = torch.device("cpu")
        with (
            host,
            given_values(recorder, topk=topk) as schedule,
            _followed(actor, schedule),
            _replaced_at_first_step(actor, placeholders),
        ):
            run_turns(actor, turns, recorder)
        return recorder.recorded(rank, _held(actor))


@contextmanager
def _without_files(
    actor: Actor, entries: Mapping[int, Sequence[Entry]], *, gpu_bytes: int
) -> Iterator[None]:
    """Context in which an actor is built without its weights, for a GPU of this size."""

    def inventory(chunks: Sequence[GPTModel], description: ModelDescription) -> Inventory:
        return Inventory(
            chunks,
            family=description.family,
            dims=description.dims,
            groups=parallel.weight_groups(),
            tied=description.tied,
            gather=partial(_exchanged, entries),
        )

    with (
        patch.object(actor, "_read_initial_weights"),
        patch.object(actor_module, "HuggingFaceFolder", _folder),
        patch.object(actor_module, "inventory_of", inventory),
        patch.object(device, "total_memory", partial(int, gpu_bytes)),
    ):
        yield


def _exchanged(
    entries: Mapping[int, Sequence[Entry]], mine: list[Entry], group: dist.ProcessGroup
) -> list[list[Entry]]:
    """What the pipeline stages tell each other of their weights."""
    found: list[object] = [None] * group.size()
    dist.all_gather_object(found, mine, group=group)
    return [list(entries[rank]) for rank in dist.get_process_group_ranks(group)]


def _folder(path: str) -> HuggingFaceFolder | SimpleNamespace:
    """The folder of the checkpoint; one without quantised weights where it is not here."""
    try:
        return HuggingFaceFolder(path)
    except WeightError:
        return SimpleNamespace(quantisation=None)


def run_turns(actor: Actor, turns: Turns, recorder: Recorder) -> None:
    """Run the turns on a built actor, real or rehearsed."""
    old: Logprobs | None = None
    if turns.log_prob_batch is not None:
        with recorder.during(LOG_PROBS):
            actor.compute_logprobs(turns.log_prob_batch)
        old = _as_zeros(turns.batch) if _is_last_stage() else []
    with recorder.during(TRAIN):
        actor.train_step(turns.batch, old)
    if not turns.updates:
        return
    with recorder.during(UPDATE):
        actor._finish_param_sync()
        for index in range(len(actor.buckets)):
            _gather(actor, index, shares_gpus=turns.shares_gpus)


def _gather(actor: Actor, index: int, *, shares_gpus: bool) -> None:
    """What ``send_bucket`` or ``share_bucket`` does before the bytes leave the rank."""
    if shares_gpus:
        tensors = actor.buckets.gather(index, on_all_stages=True)
        torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors.values()])
    else:
        actor.broadcast._gather(index)
        actor.broadcast.gathered = None


def _as_zeros(batch: TrainBatch) -> Logprobs:
    return [
        [FloatColumn([0.0] * sample.response_length) for sample in micro]
        for micro in batch.micro_batches
    ]


def _is_last_stage() -> bool:
    last: bool = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    return last


@contextmanager
def _followed(actor: Actor, schedule: Schedule) -> Iterator[None]:
    """Tell the schedule of the micro-batches of each pass before it begins."""
    run, config = step.run, actor.model[0].config
    divisor = actor.settings.tensor_model_parallel_size if config.sequence_parallel else 1

    def followed(
        chunks: Sequence[torch.nn.Module], packed: Sequence[PackedMicroBatch], **options: Any
    ) -> object:
        shapes = [[one.input_ids.size(1) // divisor, 1, config.hidden_size] for one in packed]
        schedule.begin(
            shapes,
            num_chunks=len(chunks),
            group_size=config.microbatch_group_size_per_vp_stage or 1,
            is_first_stage=parallel_state.is_pipeline_first_stage(ignore_virtual=True),
            is_last_stage=_is_last_stage(),
        )
        return run(chunks, packed, **options)

    with patch.object(step, "run", followed):
        yield


def _moments(actor: Actor) -> list[torch.Tensor]:
    """Adam's two moments of each weight, which exist from the first step on."""
    mains = [
        parameter
        for one in optimizer_state.inner(actor.optimizer)
        for group in one.optimizer.param_groups
        for parameter in group["params"]
    ]
    return [torch.empty_like(parameter) for parameter in mains for _ in range(2)]


@contextmanager
def _replaced_at_first_step(actor: Actor, placeholders: list[torch.Tensor]) -> Iterator[None]:
    """Free the placeholders of the moments when the optimizer makes its own."""
    optimizer_step = actor.optimizer.step

    def first_step() -> object:
        placeholders.clear()
        return optimizer_step()

    with patch.object(actor.optimizer, "step", first_step):
        yield


def _held(actor: Actor) -> dict[str, int]:
    """Bytes that stay on the device between turns, by part; none is counted twice."""
    parts = {
        "weights": memory._weights(actor.model),
        "gradients": memory._grads(actor.model),
        "optimizer": memory._optimizer_tensors(actor.optimizer),
    }
    seen: set[int] = set()
    held: dict[str, int] = {}
    for name, tensors in parts.items():
        storages = {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
        own = {key: tensor for key, tensor in storages.items() if key not in seen}
        seen |= own.keys()
        held[name] = sum(tensor.untyped_storage().nbytes() for tensor in own.values())
    return held
