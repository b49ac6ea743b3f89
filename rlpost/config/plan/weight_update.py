"""What an update of the engines' weights sends: buckets, slices or not, the list of a folder.

Input: the bytes of the weights, settings. Output: the size of a bucket, and the weights in each.
Large buckets need fewer requests, but more memory on trainer and engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from common.files import write_atomic
from rlpost.config.plan.shard_plan import Unit

if TYPE_CHECKING:
    from rlpost.config.tree import Config

UNITS = "sent_tensors.json"
"""The file of a folder for engines that lists the tensors which they must load."""
_LIST = TypeAdapter(list[Unit])
SMALLEST = 512 * 2**20
"""Bytes of a bucket from which the transfer takes longer than the request."""
REQUESTS = 256
"""Target number of requests of an update, over all engines."""
MEMORY_SHARE = 1 / 6
"""Fraction of a GPU's memory that buckets may use."""
SHARED_BUFFERS = 3
"""Buckets on a GPU that trainer and engine share: one being gathered, two shared with the engine.
"""
SENT_BUFFERS = 2
"""Buckets on a GPU that sends: the tensors, and their concatenated bytes."""
RECEIVED_BUFFERS = 2
"""Buckets on an engine's GPU that receives: SGLang's ``_receive_bucketed_weights_from_distributed``
allocates a tensor for each name, and concatenates them into the tensor that it receives."""


@dataclass(frozen=True, slots=True)
class Travelling:
    """A weight to send: the pipeline stage that holds it, and its bytes."""

    stage: int
    num_bytes: int
    joins: bool = False
    """Whether it must be in the bucket of the weight before it, which is of the same stage."""


def bucket_bytes(total: int, *, limit: int, num_engines: int, device_bytes: int | None) -> int:
    """The size of a bucket for weights of ``total`` bytes.

    Args:
        total: bytes of all weights.
        limit: the user's bound in bytes (``--update-weight-buffer-size``).
        num_engines: number of engines.
        device_bytes: memory of a GPU; None on a CPU, where memory is not a bound.
    """
    for_few_requests = -(-total * max(1, num_engines) // REQUESTS)
    chosen = max(SMALLEST, for_few_requests)
    if device_bytes is not None:
        chosen = min(chosen, int(device_bytes * MEMORY_SHARE / SHARED_BUFFERS))
    return min(chosen, limit)


def deal(weights: Sequence[Travelling], max_bytes: int) -> list[list[int]]:
    """Indices of the weights of each bucket, by stage and in order.

    A bucket holds at most ``max_bytes`` of weights of one stage; a larger weight is alone in its
    bucket, with those that join it.
    """
    units: list[list[int]] = []
    for index in sorted(range(len(weights)), key=lambda index: weights[index].stage):
        if weights[index].joins:
            units[-1].append(index)
        else:
            units.append([index])
    buckets: list[list[int]] = []
    remaining, stage = 0, -1
    for unit in units:
        num_bytes = sum(weights[index].num_bytes for index in unit)
        if not buckets or num_bytes > remaining or weights[unit[0]].stage != stage:
            buckets.append([])
            remaining, stage = max_bytes, weights[unit[0]].stage
        buckets[-1] += unit
        remaining -= num_bytes
    return buckets


def obstacle_to_slices(config: Config, *, num_engines: int, num_trainer_ranks: int) -> str | None:
    """Why the settings rule out slices, so that all engines receive all weights; None if they don't."""
    sglang = config.sglang
    if sglang.rollout_external_engine_addrs:
        return "engines outside the run cannot join the trainer's authenticated group"
    if sglang.server_args.get("enable_eplb"):
        return "--sglang-enable-eplb moves experts between the ranks of an engine"
    if num_engines > num_trainer_ranks:
        # The trainer would send each weight once to each engine, which a broadcast does not.
        return (
            f"a broadcast to {num_engines} engines is faster than slices of {num_trainer_ranks} "
            "trainer ranks"
        )
    return None


def write_units(folder: Path, units: Sequence[Unit]) -> None:
    """List the tensors that engines must load from a folder, if any; they may skip others in it."""
    if units:
        write_atomic(folder / UNITS, _LIST.dump_json([*units]).decode())


def read_units(folder: Path) -> list[Unit]:
    """What ``write_units`` wrote. Raises OSError, ValueError."""
    return _LIST.validate_json((folder / UNITS).read_bytes())
