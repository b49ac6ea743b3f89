"""Packing: a micro-batch of samples becomes one row of tokens. Pure torch.

In: a tuple of TrainSample. Out: PackedMicroBatch on the CPU; ``to`` moves it. T counts tokens of the row, R response
tokens of the micro-batch (masked ones included). Invariants: samples stand in the row in their order, uncut; the logit
that predicts response token r stands at row ``response_index[r]``; padding is a sequence of its own, which no sample
attends to and no response token comes from.

With context parallelism over c ranks every sequence is padded at its end to a multiple of 2c and cut into 2c chunks;
rank r holds chunks r and 2c - 1 - r, so that causal attention is equal work for all (zigzag, as Megatron expects it).
T and R then count what this rank holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TypeVar

import torch

from rlpost.errors import DataError
from rlpost.types import MicroBatch, TrainBatch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PackedMicroBatch:
    """Tensors of one micro-batch; lengths as in the module's docstring, N samples."""

    input_ids: torch.Tensor  # [1, T] int64
    positions: torch.Tensor  # [1, T] int64, from 0 in each sequence
    cu_seqlens: torch.Tensor  # [N + 1 (+ 1 with padding)] int32, where each sequence begins in the whole row, its end
    response_index: torch.Tensor  # [R] int64, rows of T
    held: torch.Tensor  # [R] int64, which of all response tokens these are
    targets: torch.Tensor  # [R] int64, the response tokens
    sample_index: torch.Tensor  # [R] int64, in 0..N-1
    sample_lengths: torch.Tensor  # [R] int64, loss-masked tokens of the token's sample
    sample_weights: torch.Tensor  # [R] float32, of the token's sample among those that are one answer together
    loss_mask: torch.Tensor  # [R] float32, 0 or 1
    advantages: torch.Tensor  # [R] float32
    rollout_logprobs: torch.Tensor  # [R] float32
    max_length: int  # of a sequence
    response_lengths: tuple[int, ...]  # [N], of the whole samples

    def to(self, device: torch.device) -> PackedMicroBatch:
        """The same on ``device``."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return PackedMicroBatch(
            **{name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in values.items()}
        )


@dataclass(frozen=True, slots=True)
class Cut:
    """How packed rows are padded, and which part of them a rank holds."""

    row_multiple: int = 1
    sequence_multiple: int = 1
    context_rank: int = 0
    context_size: int = 1


def pack(micro_batch: MicroBatch, cut: Cut = Cut()) -> PackedMicroBatch:
    """Pack samples one after another and pad as ``cut`` says.

    Sequence parallelism needs T to be a multiple of the tensor-parallel size. Raises DataError for an empty
    micro-batch and for a sample without a prompt, whose first response token nothing predicts.
    """
    if not micro_batch:
        raise DataError("a micro-batch without samples cannot be packed; give every rank at least one sample")
    responses = [sample.response_length for sample in micro_batch]
    for number, sample in enumerate(micro_batch):
        if sample.prompt_length < 1 or sample.response_length < 1:
            raise DataError(
                f"sample {number} of a micro-batch has {sample.prompt_length} prompt and {sample.response_length} "
                "response tokens; both must be at least 1"
            )
    sequences = [_up(len(sample.token_ids), cut.sequence_multiple) for sample in micro_batch]
    ids = [
        sample.token_ids + (0,) * (length - len(sample.token_ids))
        for sample, length in zip(micro_batch, sequences, strict=True)
    ]
    if padding := -sum(sequences) % cut.row_multiple:
        sequences.append(padding)
        ids.append((0,) * padding)
    starts = [0, *itertools.accumulate(sequences)]
    rows = torch.cat([_zigzag(length, cut) + start for start, length in zip(starts, sequences, strict=False)])
    local = torch.full((starts[-1],), -1).index_put_((rows,), torch.arange(len(rows)))
    index = [
        local[start + sample.prompt_length - 1 : start + len(sample.token_ids) - 1]
        for start, sample in zip(starts, micro_batch, strict=False)
    ]
    response_index = torch.cat(index)
    held = (response_index >= 0).nonzero()[:, 0]

    def of_response(values: Iterable[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(list(values), dtype=dtype)[held]

    def of_sample(values: Iterable[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(list(values), dtype=dtype).repeat_interleave(torch.tensor(responses))[held]

    chain = itertools.chain.from_iterable
    return PackedMicroBatch(
        input_ids=torch.tensor(list(chain(ids)))[rows].unsqueeze(0),
        positions=torch.cat([torch.arange(length) for length in sequences])[rows].unsqueeze(0),
        cu_seqlens=torch.tensor(starts, dtype=torch.int32),
        response_index=response_index[held],
        held=held,
        targets=of_response(chain(s.token_ids[s.prompt_length :] for s in micro_batch), torch.int64),
        sample_index=of_sample(range(len(micro_batch)), torch.int64),
        sample_lengths=of_sample((sum(s.loss_mask) for s in micro_batch), torch.int64),
        sample_weights=of_sample((s.weight for s in micro_batch), torch.float32),
        loss_mask=of_response(chain(s.loss_mask for s in micro_batch), torch.float32),
        advantages=of_response(chain(s.advantages for s in micro_batch), torch.float32),
        rollout_logprobs=of_response(chain(s.rollout_logprobs for s in micro_batch), torch.float32),
        max_length=max(sequences),
        response_lengths=tuple(responses),
    )


def _up(length: int, multiple: int) -> int:
    return length + -length % multiple


def _zigzag(length: int, cut: Cut) -> torch.Tensor:
    """The positions of a sequence that a rank holds."""
    if cut.context_size == 1:
        return torch.arange(length)
    chunks = torch.arange(length).chunk(2 * cut.context_size)
    return torch.cat([chunks[cut.context_rank], chunks[-1 - cut.context_rank]])


def log_prob_micro_batches(batch: TrainBatch) -> tuple[MicroBatch, ...]:
    """What a pass that only computes log-probs takes: the batch's samples, in groups of its own if it has these."""
    samples = tuple(itertools.chain.from_iterable(batch.micro_batches))
    return tuple(tuple(samples[i] for i in group) for group in batch.log_prob_groups) or batch.micro_batches


def as_trained(found: list[list[T]], batch: TrainBatch) -> list[list[T]]:
    """From values per micro-batch of ``log_prob_micro_batches``, per sample, to the same per ``micro_batches``; nothing
    remains nothing (stages of a pipeline but the last)."""
    if not batch.log_prob_groups or not found:
        return found
    positions = itertools.chain.from_iterable(batch.log_prob_groups)
    in_order = dict(zip(positions, itertools.chain.from_iterable(found), strict=True))
    values = (in_order[position] for position in range(len(in_order)))
    return [list(itertools.islice(values, len(micro_batch))) for micro_batch in batch.micro_batches]


def unpack(values_R: torch.Tensor, packed: PackedMicroBatch) -> list[tuple[float, ...]]:
    """One number a response token -> a tuple a sample, in order."""
    flat = iter(values_R.tolist())
    return [tuple(itertools.islice(flat, length)) for length in packed.response_lengths]
