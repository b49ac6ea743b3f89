"""Packing: a micro-batch of samples becomes one row of tokens. Pure torch.

In: a tuple of TrainSample. Out: PackedMicroBatch on the CPU; ``to`` moves it. T counts tokens of the row, R response
tokens of the micro-batch (masked ones included). Invariants: samples stand in the row in their order, uncut; the logit
that predicts response token r stands at row ``response_index[r]``; padding is a sequence of its own, which no sample
attends to and no response token comes from.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields

import torch

from rlpost.errors import DataError
from rlpost.types import MicroBatch


@dataclass(frozen=True, slots=True)
class PackedMicroBatch:
    """Tensors of one micro-batch; lengths as in the module's docstring, N samples."""

    input_ids: torch.Tensor  # [1, T] int64
    positions: torch.Tensor  # [1, T] int64, from 0 in each sequence
    cu_seqlens: torch.Tensor  # [N + 1 (+ 1 with padding)] int32, where each sequence begins, and T
    response_index: torch.Tensor  # [R] int64
    targets: torch.Tensor  # [R] int64, the response tokens
    sample_index: torch.Tensor  # [R] int64, in 0..N-1
    sample_lengths: torch.Tensor  # [R] int64, loss-masked tokens of the token's sample
    loss_mask: torch.Tensor  # [R] float32, 0 or 1
    advantages: torch.Tensor  # [R] float32
    rollout_logprobs: torch.Tensor  # [R] float32
    max_length: int  # of a sequence
    response_lengths: tuple[int, ...]  # [N], sums to R

    def to(self, device: torch.device) -> PackedMicroBatch:
        """The same on ``device``."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return PackedMicroBatch(
            **{name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in values.items()}
        )


def pack(micro_batch: MicroBatch, *, multiple_of: int = 1) -> PackedMicroBatch:
    """Pack samples one after another and pad the row to a multiple of ``multiple_of`` tokens.

    Sequence parallelism needs T to be a multiple of the tensor-parallel size. Raises DataError for an empty
    micro-batch and for a sample without a prompt, whose first response token nothing predicts.
    """
    if not micro_batch:
        raise DataError("a micro-batch without samples cannot be packed; give every rank at least one sample")
    lengths = [len(sample.token_ids) for sample in micro_batch]
    responses = [sample.response_length for sample in micro_batch]
    for number, sample in enumerate(micro_batch):
        if sample.prompt_length < 1 or sample.response_length < 1:
            raise DataError(
                f"sample {number} of a micro-batch has {sample.prompt_length} prompt and {sample.response_length} "
                "response tokens; both must be at least 1"
            )
    padding = -sum(lengths) % multiple_of
    sequences = [*lengths, padding] if padding else lengths
    starts = [0, *itertools.accumulate(sequences)]
    per_response = torch.tensor(responses)
    ids = [token for sample in micro_batch for token in sample.token_ids] + [0] * padding
    index = [
        torch.arange(start + sample.prompt_length - 1, start + len(sample.token_ids) - 1)
        for start, sample in zip(starts, micro_batch, strict=False)
    ]
    num_masked = torch.tensor([sum(sample.loss_mask) for sample in micro_batch])
    advantages = torch.tensor([sample.advantage for sample in micro_batch], dtype=torch.float32)
    return PackedMicroBatch(
        input_ids=torch.tensor([ids]),
        positions=torch.cat([torch.arange(length) for length in sequences]).unsqueeze(0),
        cu_seqlens=torch.tensor(starts, dtype=torch.int32),
        response_index=torch.cat(index),
        targets=torch.tensor([token for s in micro_batch for token in s.token_ids[s.prompt_length :]]),
        sample_index=torch.arange(len(micro_batch)).repeat_interleave(per_response),
        sample_lengths=num_masked.repeat_interleave(per_response),
        loss_mask=torch.tensor([bit for s in micro_batch for bit in s.loss_mask], dtype=torch.float32),
        advantages=advantages.repeat_interleave(per_response),
        rollout_logprobs=torch.tensor([x for s in micro_batch for x in s.rollout_logprobs], dtype=torch.float32),
        max_length=max(sequences),
        response_lengths=tuple(responses),
    )


def unpack(values_R: torch.Tensor, packed: PackedMicroBatch) -> list[tuple[float, ...]]:
    """One number a response token -> a tuple a sample, in order."""
    flat = iter(values_R.tolist())
    return [tuple(itertools.islice(flat, length)) for length in packed.response_lengths]
