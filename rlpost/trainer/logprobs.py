"""Log-probs of given tokens, and entropies, from logits that are sharded over the vocabulary.

Input: logits [T, vocabulary / tensor-parallel size], positions and tokens. Output: log-probs and
entropies, differentiable; or the most likely tokens.

Invariants: the full logits are never gathered; the ranks exchange one maximum, two sums and one
log-prob for each given token, or the most likely tokens of each rank. At most ``chunk_size`` rows
of the logits are copied to float32 at a time; none on CUDA, where Triton kernels compute one target
a row without masks (``logprob_kernels``). The backward pass recomputes the softmax instead of
storing it. The chunk size does not change the results.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx

from rlpost.algorithm.sampling_mask import removed_columns
from rlpost.columns import FloatColumn, IntColumn
from rlpost.errors import DataError
from rlpost.trainer import device, parallel
from rlpost.trainer.packing import PackedMicroBatch, held_values, joined_columns
from rlpost.types import TrainBatch, TrainSample


@dataclass(frozen=True)
class SamplingMasks:
    """The ids that the token of each row was sampled from."""

    sizes_R: torch.Tensor  # int64, 0 for the whole vocabulary
    token_ids: torch.Tensor  # int64, one set after the other

    @cached_property
    def ends(self) -> list[int]:
        """The end of each row's set in ``token_ids``, after a leading 0."""
        return [0, *itertools.accumulate(self.sizes_R.tolist())]

    def removed(self, part: slice, *, first: int, width: int) -> torch.Tensor:
        """Return ``removed_columns`` for some of the rows."""
        sizes = self.sizes_R[part]
        start, end = self.ends[part.start], self.ends[part.start + len(sizes)]
        return removed_columns(sizes, self.token_ids[start:end], first=first, width=width)


@dataclass(frozen=True, slots=True)
class LogitRows:
    """Rows of the logits to evaluate, and parameters."""

    index_R: torch.Tensor  # rows of the logits
    targets_R: torch.Tensor  # their tokens: [R], or [R, n] for several each
    temperature: float
    num_valid: int  # columns of this rank that are tokens; the others are padding
    chunk_size: int  # rows computed at a time
    masks: SamplingMasks | None = None  # None: tokens of the whole vocabulary
    may_repeat: bool = False  # whether ``index_R`` may name a row more than once
    fused: bool = False  # whether to use Triton's kernels where they apply

    @property
    def has_kernel(self) -> bool:
        """Whether Triton's kernels apply; the same on all tensor-parallel ranks."""
        has_one_target = self.targets_R.dim() == 1
        return self.fused and has_one_target and self.masks is None and not self.may_repeat


def response_logprobs(
    logits_TV: torch.Tensor, rows: LogitRows, *, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute log softmax(logits / temperature)[target] and the entropy in nats, at ``rows``.

    With ``rows.masks`` both are of the distribution over the ids of the mask, to which the first
    target always belongs. The engines report the same log-probs.

    Returns:
        The log-probs, of the shape of ``rows.targets_R``, and the entropies [R], which are zeros
        without ``with_entropy``; float32.
    """
    logprobs_RN, entropy_R = _VocabParallel.apply(logits_TV, rows, with_entropy)
    return logprobs_RN.reshape(rows.targets_R.shape), entropy_R


class _VocabParallel(torch.autograd.Function):
    """Log-prob and entropy with an explicit backward pass.

    With z = logit / temperature, p = softmax(z), l = log sum exp z and H = l - sum p z:
    d log p_t / dz_v = [v = t] - p_v and dH / dz_v = -p_v (log p_v + H). Each rank computes the
    gradient of its columns; it is 0 at those that a sampling mask removes. The upstream gradient is
    the same on all tensor-parallel ranks.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, logits_TV: torch.Tensor, rows: LogitRows, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if rows.has_kernel:
            log_sum, logprobs, entropy = _fused_forward(logits_TV, rows, with_entropy)
        else:
            chunks = [_chunk_forward(logits_TV, rows, part, with_entropy) for part in _parts(rows)]
            log_sum, logprobs, entropy = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        ctx.rows = rows
        ctx.save_for_backward(logits_TV, log_sum, entropy)
        ctx.set_materialize_grads(False)  # backward gets None for an output without gradient
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: FunctionCtx, grad_logprobs: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor, None, None]:
        logits_TV, log_sum, entropy = ctx.saved_tensors
        rows: LogitRows = ctx.rows
        if rows.has_kernel:
            from rlpost.trainer import logprob_kernels

            column, is_mine = _columns(rows, slice(None), logits_TV.size(1))
            grad_TV = logprob_kernels.gradient(
                logits_TV,
                rows.index_R,
                torch.where(is_mine, column, -1)[:, 0],
                log_sum,
                entropy,
                of_logprob_R=None if grad_logprobs is None else grad_logprobs[:, 0],
                of_entropy_R=grad_entropy,
                temperature=rows.temperature,
                num_valid=rows.num_valid,
            )
            return grad_TV, None, None
        grad_TV = torch.zeros_like(logits_TV)
        for part in _parts(rows):
            z = _scaled(logits_TV, rows, part)
            log_p = z.sub_(log_sum[part, None])
            p = log_p.exp()
            removed = _removed(rows, part, logits_TV.size(1))
            if removed is not None:
                p.masked_fill_(removed, 0.0)
            grad = torch.zeros_like(p)
            if grad_logprobs is not None:
                upstream = grad_logprobs[part]
                column, is_mine = _columns(rows, part, logits_TV.size(1))
                grad -= upstream.sum(1, keepdim=True) * p
                if rows.num_valid:
                    # Adds, as a row may have a target twice; targets of other ranks add 0 at column
                    # 0.
                    grad.scatter_add_(1, column, upstream * is_mine)
            if grad_entropy is not None:
                grad -= grad_entropy[part, None] * p * log_p.add_(entropy[part, None])
            _write_rows(grad_TV, rows, part, (grad / rows.temperature).to(grad_TV.dtype))
        return grad_TV, None, None


def _write_rows(grad_TV: torch.Tensor, rows: LogitRows, part: slice, grad: torch.Tensor) -> None:
    """Write the gradient [r, num_valid] of the rows of one chunk, which are 0 before."""
    index = rows.index_R[part]
    if not rows.may_repeat:
        grad_TV[:, : rows.num_valid].index_put_((index,), grad)
        return
    # Adds, in a fixed order: samples that share a beginning may have a row in common. On CUDA the
    # whole of a target that is not contiguous would be copied, so the gradient is padded instead.
    padding = grad_TV.size(1) - rows.num_valid
    whole = torch.nn.functional.pad(grad, (0, padding)) if padding else grad
    grad_TV.index_put_((index,), whole, accumulate=True)


def _parts(rows: LogitRows) -> list[slice]:
    """Return at least one slice, so that a rank without rows takes part in the collectives."""
    count = max(len(rows.index_R), 1)
    return [slice(start, start + rows.chunk_size) for start in range(0, count, rows.chunk_size)]


def _scaled(logits_TV: torch.Tensor, rows: LogitRows, part: slice) -> torch.Tensor:
    return logits_TV[rows.index_R[part], : rows.num_valid].float() / rows.temperature


def _columns(rows: LogitRows, part: slice, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the local column of each target (0 if another rank has it) and whether it is local.

    All ranks have ``width`` columns. Both are [r, n] for n targets a row.
    """
    targets = rows.targets_R[part]
    targets = targets[:, None] if targets.dim() == 1 else targets
    column = targets - parallel.tensor_parallel_group().rank() * width
    is_mine = (column >= 0) & (column < rows.num_valid)
    return column * is_mine, is_mine


def _removed(rows: LogitRows, part: slice, width: int) -> torch.Tensor | None:
    """Return which columns of this rank the masks remove; None without masks.

    The first target is never removed.
    """
    if rows.masks is None or not rows.num_valid:
        return None
    first = parallel.tensor_parallel_group().rank() * width
    removed = rows.masks.removed(part, first=first, width=rows.num_valid)
    column, is_mine = (values[:, :1] for values in _columns(rows, part, width))
    return removed.scatter_(1, column, removed.gather(1, column) & ~is_mine)


def _chunk_forward(
    logits_TV: torch.Tensor, rows: LogitRows, part: slice, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log sum exp [r], log-probs [r, n] and entropy [r] for the rows of one chunk."""
    group = parallel.tensor_parallel_group()
    z = _scaled(logits_TV, rows, part)
    removed = _removed(rows, part, logits_TV.size(1))
    if removed is not None:
        z.masked_fill_(removed, -torch.inf)
    highest = z.amax(1) if rows.num_valid else z.new_full((z.size(0),), -torch.inf)
    if group.size() > 1:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    z.sub_(highest[:, None])
    column, is_mine = _columns(rows, part, logits_TV.size(1))
    target = z.new_zeros(column.shape)
    if rows.num_valid:
        target = torch.where(is_mine, z.gather(1, column), target)
    exp = z.exp()
    if removed is not None:
        z.masked_fill_(removed, 0.0)  # exp is 0 there, and 0 times -inf is not
    weighted = torch.linalg.vecdot(exp, z) if with_entropy else torch.zeros_like(highest)
    sums = torch.stack([exp.sum(1), weighted, *target.unbind(1)])
    return _reduced(highest, sums, with_entropy)


def _fused_forward(
    logits_TV: torch.Tensor, rows: LogitRows, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what ``_chunk_forward`` does, of all rows."""
    from rlpost.trainer import logprob_kernels  # imports Triton

    own_highest, total, weighted = logprob_kernels.sums(
        logits_TV, rows.index_R, temperature=rows.temperature, num_valid=rows.num_valid
    )
    group, highest = parallel.tensor_parallel_group(), own_highest.clone()
    if group.size() > 1:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    # A rank whose columns are all padding has -inf, and 0 times -inf is not 0.
    shift = (own_highest - highest).clamp_(min=-1e4)
    scale = shift.exp()
    column, is_mine = _columns(rows, slice(None), logits_TV.size(1))
    z = logits_TV[rows.index_R[:, None], column].float() / rows.temperature
    target = torch.where(is_mine, z - highest[:, None], 0.0)
    sums = torch.stack([scale * total, scale * (weighted + total * shift), *target.unbind(1)])
    return _reduced(highest, sums, with_entropy)


def _reduced(
    highest: torch.Tensor, sums: torch.Tensor, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add the sums of all tensor-parallel ranks: of exp(z - highest), of that times its exponent,
    and the exponent of each target. Return log sum exp, log-probs and entropy.
    """
    group = parallel.tensor_parallel_group()
    if group.size() > 1:
        dist.all_reduce(sums, group=group)
    total, weighted, target = sums[0], sums[1], sums[2:].T
    log_total = total.log()
    entropy = log_total - weighted / total if with_entropy else torch.zeros_like(total)
    return highest + log_total, target - log_total[:, None], entropy


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The k most likely tokens at each response token of a sample, position by position."""

    token_ids: IntColumn
    logprobs: FloatColumn


@dataclass(frozen=True, slots=True)
class TeacherScores:
    """Scores of a teacher for the loss: by micro-batch and sample, log-probs or its top tokens."""

    logprobs: Sequence[Sequence[FloatColumn]] = ()
    top: Sequence[Sequence[TopTokens]] = ()


@dataclass(frozen=True, slots=True)
class HeldScores:
    """Tensors of one micro-batch on this rank; None where the loss does not use them."""

    logprobs: torch.Tensor | None = None  # [R] float32
    top_ids: torch.Tensor | None = None  # [R, k] int64
    top_logprobs: torch.Tensor | None = None  # [R, k] float32


WITHOUT_TEACHER = HeldScores()


def scores_of_server(batch: TrainBatch, *, top_k: int | None, vocab_size: int) -> TeacherScores:
    """Return the columns that a server gave.

    These are the most likely tokens with ``top_k``, their number at each token, or else log-probs.
    ``vocab_size`` is that of the policy.

    Raises:
        DataError: a sample has none, or a token that the policy does not have.
    """
    if top_k is None:
        return TeacherScores(
            logprobs=[list(map(_logprobs, micro)) for micro in batch.micro_batches]
        )
    top_of = partial(_top, top_k=top_k, vocab_size=vocab_size)
    return TeacherScores(top=[list(map(top_of, micro)) for micro in batch.micro_batches])


def held_scores(scores: TeacherScores | None, index: int, packed: PackedMicroBatch) -> HeldScores:
    """Return the scores of this rank's tokens in micro-batch ``index``, which is ``packed``."""
    if scores is not None and scores.top:
        return _held_top(scores.top[index], packed)
    return HeldScores(held_values(None if scores is None else scores.logprobs, index, packed))


def _held_top(samples: Sequence[TopTokens], packed: PackedMicroBatch) -> HeldScores:
    num_tokens = sum(packed.response_lengths)
    ids = torch.cat([torch.from_numpy(each.token_ids.array.astype("int64")) for each in samples])
    logprobs = joined_columns(each.logprobs for each in samples)
    return HeldScores(
        top_ids=device.on_device(ids).view(num_tokens, -1)[packed.held],
        top_logprobs=device.on_device(logprobs).view(num_tokens, -1)[packed.held],
    )


def _logprobs(sample: TrainSample) -> FloatColumn:
    if sample.teacher_logprobs is None:
        raise DataError("a sample has no log-probs of the teacher; generate it with --use-opd")
    return sample.teacher_logprobs


def _top(sample: TrainSample, top_k: int, vocab_size: int) -> TopTokens:
    ids, logprobs = sample.teacher_top_ids, sample.teacher_top_logprobs
    if ids is None or logprobs is None or len(ids) != top_k * sample.response_length:
        raise DataError(
            f"a sample has no {top_k} most likely tokens of the teacher at each token; generate it "
            f"with --opd-top-k {top_k}"
        )
    if int(ids.array.max()) >= vocab_size:
        raise DataError(
            f"the teacher gave token {int(ids.array.max())}, and --hf-checkpoint has {vocab_size} "
            "tokens; distillation needs a teacher with the same vocabulary"
        )
    return TopTokens(ids, logprobs)
