"""Plan an update of the engines' weights: its bytes, buckets and requests. Pure.

Input: settings, the shape of the model and the memory of a GPU. Output: a ``PlannedUpdate``.

The trainer (``rlpost.trainer.weights.trainer_side.Buckets``) assigns the weights to buckets with the
same functions (``rlpost.config.plan.weight_update``). They are listed as in
``rlpost.trainer.weights.inventory``: one entry for each Megatron parameter; for experts, one for the
parameters at the same place of all expert-parallel ranks. For every bucket the driver sends one
request to each engine, with the handles of all its ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from rlpost.config.plan.shape import Layout, Shape
from rlpost.config.plan.weight_update import (
    RECEIVED_BUFFERS,
    SENT_BUFFERS,
    SHARED_BUFFERS,
    Travelling,
    bucket_bytes,
    deal,
    obstacle_to_slices,
)
from rlpost.config.tree import Config
from rlpost.extensions.planning.adapters import served_adapters
from rlpost.extensions.planning.planned_slices import PlannedSlices, SentWeights, receivers_of
from rlpost.extensions.planning.update_weights import weights_of

FP8_WIDTH = 1


@dataclass(frozen=True, slots=True)
class PlannedUpdate:
    """One update of all engines."""

    total_bytes: int
    """Bytes of all weights, or of all adapters if only these are sent; each counts once."""
    num_buckets: int
    largest_bytes: int
    """Bytes of the largest bucket."""
    num_requests: int
    """Requests of the driver that move the buckets, for all engines together."""
    gpu_bytes: int
    """Bytes of buckets on a GPU that trainer and engine share, else on a GPU that sends."""
    engine_bytes: int = 0
    """The same on a GPU of an engine that receives them over the network; 0 otherwise."""
    slices: PlannedSlices | None = None
    """With transport slices, unless weights are broadcast."""


def weight_update(
    config: Config,
    shape: Shape,
    layout: Layout,
    *,
    gpu_bytes: int,
    width: int,
    in_fp8: bool,
    encoder: int = 0,
) -> PlannedUpdate:
    """The plan of an update.

    Args: ``width``: bytes of a weight in the trainer; ``in_fp8``: whether engines hold matrices in
    FP8; ``encoder``: trained weights of an encoder of images, counted in equal pieces.
    """
    if config.sends_adapters:
        written = width * served_adapters(config.lora, shape)
        return PlannedUpdate(written, num_buckets=0, largest_bytes=0, num_requests=0, gpu_bytes=0)
    whole_layout = layout
    # the rest of the layout does not change what is sent
    layout = Layout(
        pipeline=layout.pipeline,
        expert=layout.expert,
        chunk=layout.chunk,
        first=layout.first,
        last=layout.last,
    )
    _, total = _travelling(shape, layout, width, in_fp8, encoder)
    num_engines = config.num_engines
    size = bucket_bytes(
        total,
        limit=config.sync.update_weight_buffer_size,
        num_engines=num_engines,
        device_bytes=gpu_bytes,
    )
    count, largest = _buckets(shape, layout, width, in_fp8, encoder, size)
    slices = None
    obstacle = obstacle_to_slices(
        config, num_engines=num_engines, num_trainer_ranks=whole_layout.world
    )
    if config.sync.update_weight_transport == "slices" and obstacle is None:
        sent = SentWeights(shape, encoder, width, in_fp8=in_fp8)
        slices = PlannedSlices(sent, whole_layout, receivers_of(config, shape), largest)
    requests = count * num_engines
    if config.cluster.colocate:
        shared = SHARED_BUFFERS * largest
        return PlannedUpdate(total, count, largest, requests, shared, slices=slices)
    received = 0 if config.sync.update_weight_transport == "disk" else RECEIVED_BUFFERS * largest
    return PlannedUpdate(
        total, count, largest, requests, SENT_BUFFERS * largest, received, slices=slices
    )


# A search for layouts repeats the same few calls many times.
@lru_cache(maxsize=128)
def _travelling(
    shape: Shape, layout: Layout, width: int, in_fp8: bool, encoder: int
) -> tuple[tuple[Travelling, ...], int]:
    """All weights with their bytes, and their sum."""
    weights = tuple(
        Travelling(weight.stage, weight.num_bytes(width=width, in_fp8=in_fp8))
        for weight in weights_of(shape, layout)
    )
    count = shape.vision.depth if encoder and shape.vision is not None else 0
    weights += tuple(Travelling(0, width * encoder // count) for _ in range(count))
    return weights, sum(weight.num_bytes for weight in weights)


@lru_cache(maxsize=1024)
def _buckets(
    shape: Shape, layout: Layout, width: int, in_fp8: bool, encoder: int, max_bytes: int
) -> tuple[int, int]:
    """The number of buckets, and the bytes of the largest."""
    weights, _ = _travelling(shape, layout, width, in_fp8, encoder)
    buckets = deal(weights, max_bytes)
    sizes = []
    for bucket in buckets:
        sizes.append(sum(weights[index].num_bytes for index in bucket))
    return len(buckets), max(sizes)
