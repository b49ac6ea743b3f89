"""The known routes of packed samples: the experts of each token in a row.

Input: samples with a ``RouteColumn``, or routes that this rank recorded in an earlier pass. Output:
one int16 tensor for the rows and MoE layers of this rank. Padding has no route.

Invariant: the routes of a token do not depend on its micro-batch, its position in the row, or its
context-parallel and tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from rlpost.columns import RouteColumn
from rlpost.errors import DataError
from rlpost.trainer.packing import RowLayout, held_tokens
from rlpost.types import MicroBatch, TrainSample, sequence_digest

UNKNOWN = -1
"""In place of an expert's number: the trainer routes this token itself."""


@dataclass(frozen=True, slots=True)
class RouteShape:
    """The routes of the model, and those that this rank needs."""

    num_layers: int  # MoE layers of the model
    num_experts: int
    topk: int
    layers: tuple[int, ...]  # this rank's, numbered among the MoE layers of the model
    tensor_rank: int = 0  # which part of the rows its routers see
    tensor_size: int = 1  # parts of the rows; 1 without sequence parallelism

    def part(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, ...] -> the rows that this rank's routers see."""
        return rows.chunk(self.tensor_size)[self.tensor_rank]


class RecordedRoutes:
    """Routes of this rank's tokens from its first pass over them, by sample.

    They belong to one rollout: the first recording after a training step drops older ones. Samples
    are identified by their tokens, so each pass may compose its batches differently.
    """

    def __init__(self) -> None:
        self._routes: dict[bytes, np.ndarray[object, object]] = {}
        self._is_used = False

    def add(self, micro_batch: MicroBatch, routes: torch.Tensor, layout: RowLayout) -> None:
        """Keep the routes [T, layers, k] of a micro-batch."""
        if self._is_used:
            self._routes.clear()
            self._is_used = False
        token = held_tokens(micro_batch, layout)
        of_tokens = routes[token >= 0].numpy()
        start, before = 0, of_tokens[:0]
        for sample, count, shared in zip(
            micro_batch, _held_counts(micro_batch, token), layout.shared(micro_batch), strict=True
        ):
            before = np.concatenate([before[:shared], of_tokens[start : start + count]])
            self._routes.setdefault(_key(sample), before)
            start += count

    def of(self, sample: TrainSample) -> np.ndarray[object, object] | None:
        """[this rank's tokens, layers, k] of a sample; None if there are none."""
        return self._routes.get(_key(sample))

    def mark_used(self) -> None:
        """Mark the start of a training step."""
        self._is_used = True


def packed_routes(
    micro_batch: MicroBatch,
    layout: RowLayout,
    shape: RouteShape,
    recorded: RecordedRoutes | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Routes of the rows that this rank's routers see.

    Recorded routes take precedence over those of the samples, which they include.

    Returns:
        [rows, layers of this rank, k] int16 and whether each row is a token, [rows] bool.

    Raises:
        DataError: the routes of a sample are those of another model.
    """
    token = held_tokens(micro_batch, layout)
    routes = torch.full((len(token), len(shape.layers), shape.topk), UNKNOWN, dtype=torch.int16)
    first_token, rows = 0, (token >= 0).nonzero()[:, 0]
    for sample, count in zip(micro_batch, _held_counts(micro_batch, token), strict=True):
        mine, rows = rows[:count], rows[count:]
        kept = recorded.of(sample) if recorded is not None else None
        if kept is not None:
            routes[mine] = torch.from_numpy(kept[len(kept) - count :])  # without shared tokens
        elif sample.routes is not None and len(sample.routes):
            sample_routes = torch.from_numpy(_of_rank(sample.routes, shape))
            place = token[mine] - first_token
            is_given = place < len(sample_routes)  # tokens at the end may be missing
            routes[mine[is_given]] = sample_routes[place[is_given]]
        first_token += len(sample.token_ids)
    return shape.part(routes).contiguous(), shape.part(token >= 0)


def token_rows(micro_batch: MicroBatch, layout: RowLayout, shape: RouteShape) -> torch.Tensor:
    """Whether each row that this rank's routers see is a token; [rows] bool."""
    return shape.part(held_tokens(micro_batch, layout) >= 0)


def _held_counts(micro_batch: MicroBatch, token: torch.Tensor) -> Iterable[int]:
    """Tokens of each sample that this rank holds."""
    ends = torch.tensor([len(sample.token_ids) for sample in micro_batch]).cumsum(0)
    # right: a token whose index equals an end is the first of the next sample
    sample_of = torch.bucketize(token[token >= 0], ends, right=True)
    return torch.bincount(sample_of, minlength=len(micro_batch)).tolist()


def _of_rank(column: RouteColumn, shape: RouteShape) -> np.ndarray[object, object]:
    """[tokens, layers of this rank, k] int16."""
    array = column.array
    if array.shape[1:] != (shape.num_layers, shape.topk):
        raise DataError(
            f"a sample's routes are of {array.shape[1]} layers with {array.shape[2]} experts per token, but the model "
            f"has {shape.num_layers} MoE layers with {shape.topk}; engines and trainer must load the same model"
        )
    mine = array[:, list(shape.layers)]
    unknown = mine == np.iinfo(array.dtype).max
    routes = mine.astype(np.int16)
    routes[unknown] = UNKNOWN
    if routes.size and routes.max() >= shape.num_experts:
        raise DataError(
            f"a sample's routes name expert {routes.max()}, but the model has experts 0 to {shape.num_experts - 1}; "
            "engines and trainer must load the same model"
        )
    return routes


def _key(sample: TrainSample) -> bytes:
    return sequence_digest(sample.token_ids, sample.images, size=16).digest()
