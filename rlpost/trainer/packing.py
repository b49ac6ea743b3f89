"""Pack a micro-batch of samples into one row of tokens.

Input: a tuple of TrainSample. Output: PackedMicroBatch on the host; ``rlpost.trainer.step`` copies
it to the device for its forward and backward pass alone. T is the number
of tokens in the row, R the number of response tokens in the micro-batch (masked ones included).

Invariants: the row contains whole samples, in order. With ``share_prefix`` a sample has no rows for
the tokens that it shares with the one before it, and attends to the rows of that sample instead. The
logit that predicts response token r is at row ``response_index[r]``. Padding is a separate sequence:
no sample attends to it, and it has no response tokens.

With context parallelism over c ranks, every sequence is padded at its end to a multiple of 2c and
split into 2c chunks. Rank r holds chunks r and 2c - 1 - r, which balances causal attention (zigzag,
as Megatron expects it). T and R then count what this rank holds.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np
import torch

from rlpost.algorithm.partition import partition
from rlpost.algorithm.shared_prefix import shared_lengths
from rlpost.columns import FloatColumn
from rlpost.errors import DataError
from rlpost.trainer import device
from rlpost.trainer.vision.rows import ImageRows, image_rows
from rlpost.types import MicroBatch, TrainBatch, TrainSample

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PackedMicroBatch:
    """Tensors of one micro-batch of N samples; T and R as in the module docstring."""

    input_ids: torch.Tensor  # [1, T] int64
    positions: torch.Tensor  # [1, T] int64, from 0 in each sequence
    # [N + 1 (+ 1 with padding)] int32, start of each sequence in the whole row, then the row's end
    cu_seqlens: torch.Tensor
    response_index: torch.Tensor  # [R] int64, rows of T
    held: torch.Tensor  # [R] int64, indices among all response tokens
    targets: torch.Tensor  # [R] int64, the response tokens
    sample_index: torch.Tensor  # [R] int64, in 0..N-1
    sample_lengths: torch.Tensor  # [R] int64, loss-masked tokens of the token's sample
    # [R] float32, weight of the token's sample among the samples of one answer
    sample_weights: torch.Tensor
    loss_mask: torch.Tensor  # [R] float32, 0 or 1
    advantages: torch.Tensor  # [R] float32
    rollout_logprobs: torch.Tensor  # [R] float32
    max_length: int  # of the longest sequence, shared tokens included
    response_lengths: tuple[int, ...]  # [N], of the whole samples, over all context-parallel ranks
    # With experts, for the rows that this rank's routers see: T / tensor-parallel size of them with
    # sequence parallelism, else T. See ``rlpost.trainer.routes``.
    routes: torch.Tensor | None = None  # [rows, this rank's MoE layers, k] int16, -1: unknown
    is_token: torch.Tensor | None = None  # [rows] bool, False at padding
    # Where sequences share rows: the rows of the keys of all sequences, and where each begins.
    key_rows: torch.Tensor | None = None  # [K] int64, rows of T
    cu_keys: torch.Tensor | None = None  # as cu_seqlens, in K
    # With sampling masks: the number of ids that each token was sampled from, 0 for the whole
    # vocabulary, and the ids one set after the other.
    mask_sizes: torch.Tensor | None = None  # [R] int64
    mask_ids: torch.Tensor | None = None  # [sum of mask_sizes] int64
    images: ImageRows | None = None

    def on_device(self) -> PackedMicroBatch:
        """Copy to the device of this rank."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return PackedMicroBatch(
            **{
                name: device.on_device(value) if isinstance(value, torch.Tensor) else value
                for name, value in values.items()
            }
            | {"images": None if self.images is None else self.images.on_device()}
        )


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Padding of packed rows, and the part of them that a rank holds."""

    row_multiple: int = 1
    sequence_multiple: int = 1
    context_rank: int = 0
    context_size: int = 1
    share_prefix: bool = False
    """Whether a beginning that several samples share has one set of rows."""
    takes_images: bool = False
    """Whether the first pipeline stage has an encoder of images."""

    def shared(self, micro_batch: MicroBatch) -> list[int]:
        """Return how many first tokens of each sample have rows of the sample before it."""
        return shared_lengths(micro_batch, shares=self.share_prefix)


def pack(micro_batch: MicroBatch, layout: RowLayout = RowLayout()) -> PackedMicroBatch:
    """Concatenate samples and pad them to the multiples of ``layout``.

    Sequence parallelism needs T to be a multiple of the tensor-parallel size.

    Raises:
        DataError: the micro-batch is empty, or a sample has no prompt, so that no logit predicts
            its first response token. Or a sample has images that the model does not take, or
            whose spans are wrong.
    """
    if not micro_batch:
        raise DataError("cannot pack an empty micro-batch; give every rank at least one sample")
    responses = [sample.response_length for sample in micro_batch]
    for number, sample in enumerate(micro_batch):
        if sample.prompt_length < 1 or sample.response_length < 1:
            raise DataError(
                f"sample {number} of a micro-batch has {sample.prompt_length} prompt tokens and "
                f"{sample.response_length} response tokens; both must be at least 1"
            )
    shared = layout.shared(micro_batch)
    suffixes = [
        sample.token_ids.array[count:] for sample, count in zip(micro_batch, shared, strict=True)
    ]
    sequences = _padded(list(map(len, suffixes)), layout)
    # of each sequence: how many rows are its own, and how many first tokens have rows before them
    spans = list(itertools.zip_longest(sequences, shared, fillvalue=0))
    starts = [0, *itertools.accumulate(sequences)]
    input_ids = np.zeros(starts[-1], dtype=np.int64)
    for start, ids in zip(starts, suffixes, strict=False):
        input_ids[start : start + len(ids)] = ids
    paths = _paths(spans)
    rows = torch.cat(
        [_zigzag(length, layout) + start for start, length in zip(starts, sequences, strict=False)]
    )
    # for each row of the whole its index on this rank, -1 if another rank holds it
    local = torch.full((starts[-1],), -1).index_put_((rows,), torch.arange(len(rows)))
    index = [
        local[path[sample.prompt_length - 1 : len(sample.token_ids) - 1]]
        for path, sample in zip(paths, micro_batch, strict=False)
    ]
    response_index = torch.cat(index)
    held = (response_index >= 0).nonzero()[:, 0]

    def of_response(arrays: Sequence[object], dtype: object) -> torch.Tensor:
        return _joined(arrays, dtype)[held]

    def of_sample(values: Iterable[float], dtype: torch.dtype) -> torch.Tensor:
        per_sample = torch.tensor(list(values), dtype=dtype)
        return per_sample.repeat_interleave(torch.tensor(responses))[held]

    mask_sizes, mask_ids = _masks(micro_batch, held)
    return PackedMicroBatch(
        input_ids=torch.from_numpy(input_ids)[rows].unsqueeze(0),
        positions=torch.cat([torch.arange(first, first + length) for length, first in spans])[
            rows
        ].unsqueeze(0),
        cu_seqlens=torch.tensor(starts, dtype=torch.int32),
        response_index=response_index[held],
        held=held,
        targets=of_response([s.token_ids.array[s.prompt_length :] for s in micro_batch], np.int64),
        sample_index=of_sample(range(len(micro_batch)), torch.int64),
        sample_lengths=of_sample((s.loss_mask.total() for s in micro_batch), torch.int64),
        sample_weights=of_sample((s.weight for s in micro_batch), torch.float32),
        loss_mask=of_response([s.loss_mask.array for s in micro_batch], np.float32),
        advantages=of_response([_advantages(s) for s in micro_batch], np.float32),
        rollout_logprobs=of_response([s.rollout_logprobs.array for s in micro_batch], np.float32),
        max_length=max(map(len, paths)),
        response_lengths=tuple(responses),
        key_rows=torch.cat(paths) if any(shared) else None,
        cu_keys=torch.tensor([0, *itertools.accumulate(map(len, paths))], dtype=torch.int32)
        if any(shared)
        else None,
        mask_sizes=mask_sizes,
        mask_ids=mask_ids,
        images=_image_rows(micro_batch, layout),
    )


def _image_rows(micro_batch: MicroBatch, layout: RowLayout) -> ImageRows | None:
    if not layout.takes_images and any(sample.images for sample in micro_batch):
        raise DataError(
            "a sample has images, and this model was built without its encoder of images; give "
            "--multimodal-keys, or samples without images"
        )
    whole = replace(layout, context_rank=0, context_size=1)
    return image_rows(
        micro_batch,
        held=held_tokens(micro_batch, layout),
        whole=held_tokens(micro_batch, whole),
    )


def _paths(spans: Iterable[tuple[int, int]]) -> list[torch.Tensor]:
    """Return the rows of all tokens of each sequence.

    ``spans`` are the numbers of rows of its own, and of first tokens that have the rows of the
    sequence before it.
    """
    paths: list[torch.Tensor] = []
    start = 0
    for length, first in spans:
        own = torch.arange(start, start + length)
        paths.append(torch.cat([paths[-1][:first], own]) if first else own)
        start += length
    return paths


def _masks(
    micro_batch: MicroBatch, held: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return sizes and ids of the sampling masks of the tokens at ``held``; None without masks.

    Raises:
        DataError: only some of the samples have one.
    """
    masks = [sample.sampling_mask for sample in micro_batch if sample.sampling_mask is not None]
    if not masks:
        return None, None
    if len(masks) < len(micro_batch):
        raise DataError(
            f"{len(masks)} of {len(micro_batch)} samples of a micro-batch have a sampling mask; "
            "generate all with --use-rollout-sampling-mask"
        )
    sizes = _joined([mask.sizes.array for mask in masks], np.int64)
    ids = _joined([mask.token_ids.array for mask in masks], np.int64)
    is_held = torch.zeros(len(sizes), dtype=torch.bool)
    is_held[held] = True
    return sizes[held], ids[is_held.repeat_interleave(sizes)]


def held_tokens(micro_batch: MicroBatch, layout: RowLayout) -> torch.Tensor:
    """Return which token each row of this rank's part holds.

    Returns:
        [T] int64: indices among the tokens of all samples, in order; -1 at padding. A row that
        several samples share is that of the first one.
    """
    shared = layout.shared(micro_batch)
    lengths = [len(sample.token_ids) for sample in micro_batch]
    remaining = list(map(operator.sub, lengths, shared))
    ends = itertools.accumulate(lengths)  # a sample's own tokens are its last ones
    held = []
    for end, length, padded in itertools.zip_longest(
        ends, remaining, _padded(remaining, layout), fillvalue=0
    ):
        whole = torch.full((padded,), -1)
        whole[:length] = torch.arange(end - length, end)
        held.append(whole[_zigzag(padded, layout)])
    return torch.cat(held)


def joined_columns(columns: Iterable[FloatColumn]) -> torch.Tensor:
    """Concatenate columns, such as the log-probs of a micro-batch's samples: [R] float32."""
    return _joined([column.array for column in columns])


def held_values(
    logprobs: Sequence[Sequence[FloatColumn]] | None, index: int, packed: PackedMicroBatch
) -> torch.Tensor | None:
    """Log-probs or values of this rank's tokens in micro-batch ``index``, which is ``packed``.

    Only the last stage has any.
    """
    return device.on_device(joined_columns(logprobs[index]))[packed.held] if logprobs else None


def _joined(arrays: Sequence[object], dtype: object = None) -> torch.Tensor:
    # ``concatenate`` always copies, so the tensor does not write into the memory of a column.
    return torch.from_numpy(np.concatenate(arrays, dtype=dtype))


def _advantages(sample: TrainSample) -> object:
    """[response_length]."""
    if isinstance(sample.advantage, FloatColumn):
        return sample.advantage.array
    return np.full(sample.response_length, sample.advantage)


def _padded(lengths: Sequence[int], layout: RowLayout) -> list[int]:
    """Return the lengths of all sequences of a row; its padding is a sequence at the end."""
    sequences = [length + -length % layout.sequence_multiple for length in lengths]
    if padding := -sum(sequences) % layout.row_multiple:
        sequences.append(padding)
    return sequences


def _zigzag(length: int, layout: RowLayout) -> torch.Tensor:
    """Positions of a sequence that this rank holds."""
    if layout.context_size == 1:
        return torch.arange(length)
    chunks = torch.arange(length).chunk(2 * layout.context_size)
    return torch.cat([chunks[layout.context_rank], chunks[-1 - layout.context_rank]])


def log_prob_micro_batches(batch: TrainBatch) -> tuple[MicroBatch, ...]:
    """Micro-batches for a pass that only computes log-probs.

    The batch's samples, grouped by ``log_prob_groups`` if set.
    """
    if not batch.log_prob_groups:
        return batch.micro_batches
    samples = batch.samples
    groups = []
    for indices in batch.log_prob_groups:
        groups.append(tuple(samples[i] for i in indices))
    return tuple(groups)


def as_trained(found: list[list[T]], batch: TrainBatch) -> list[list[T]]:
    """Regroup values from ``log_prob_micro_batches`` to the batch's ``micro_batches``.

    An empty list stays empty (all pipeline stages but the last).
    """
    if not batch.log_prob_groups or not found:
        return found
    positions = itertools.chain.from_iterable(batch.log_prob_groups)
    in_order = dict(zip(positions, itertools.chain.from_iterable(found), strict=True))
    values = [in_order[position] for position in range(len(in_order))]
    return partition(values, map(len, batch.micro_batches))


def unpack(values_R: torch.Tensor, packed: PackedMicroBatch) -> list[FloatColumn]:
    """Split values per response token into one float32 column per sample, in order."""
    array = values_R.detach().to(device="cpu", dtype=torch.float32, copy=True).numpy()
    return list(map(FloatColumn.view, partition(array, packed.response_lengths)))
