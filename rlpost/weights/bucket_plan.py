"""How the weights of a model are dealt to the buckets of an update. Pure; standard library only.

Input: the bytes of each weight as it travels, and the bounds. Output: the size of a bucket, and which weights are in
which. The trainer plans with this (``rlpost.weights.trainer_side.Buckets``) and so does ``rlpost plan``.

For every bucket the driver makes one request of each engine, which has the handles of all its ranks. Large buckets
make few requests; what they cost is memory beside the weights of trainer and engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SMALLEST = 512 * 2**20
"""Bytes of a bucket above which a larger one saves requests and nothing else: moving it takes longer than asking."""
REQUESTS = 256
"""How many requests of all engines together an update should make."""
MEMORY_SHARE = 1 / 6
"""Part of a GPU that buckets may take."""
SHARED_BUFFERS = 3
"""Buckets in the memory of a GPU that trainer and engine share: one is gathered, two lie open to the engine."""
SENT_BUFFERS = 2
"""Buckets in the memory of a GPU that sends: the tensors and their bytes one after another."""


@dataclass(frozen=True, slots=True)
class Travelling:
    """One weight on its way: the pipeline stage that holds it, and its bytes."""

    stage: int
    num_bytes: int


def bucket_bytes(total: int, *, limit: int, num_engines: int, device_bytes: int | None) -> int:
    """The size of a bucket for weights of ``total`` bytes.

    Args: ``limit`` is what the user allows (``--update-weight-buffer-size``); ``device_bytes`` the memory of a GPU,
    None on a CPU, where memory is no bound.
    """
    for_few_requests = -(-total * max(1, num_engines) // REQUESTS)
    chosen = max(SMALLEST, for_few_requests)
    if device_bytes is not None:
        chosen = min(chosen, int(device_bytes * MEMORY_SHARE / SHARED_BUFFERS))
    return min(chosen, limit)


def deal(weights: Sequence[Travelling], max_bytes: int) -> list[list[int]]:
    """Indices of the weights of each bucket, stage by stage and in order. A bucket holds weights of one stage, of at
    most ``max_bytes``; a larger weight is alone in its own."""
    buckets: list[list[int]] = []
    remaining, stage = 0, -1
    for index in sorted(range(len(weights)), key=lambda index: weights[index].stage):
        weight = weights[index]
        if not buckets or weight.num_bytes > remaining or weight.stage != stage:
            buckets.append([])
            remaining, stage = max_bytes, weight.stage
        buckets[-1].append(index)
        remaining -= weight.num_bytes
    return buckets
