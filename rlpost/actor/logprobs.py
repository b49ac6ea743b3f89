"""Log-probs of given tokens, and entropies, from logits that are sharded over the vocabulary.

Input: logits [T, vocabulary / tensor-parallel size], positions and tokens. Output: log-probs and
entropies, differentiable.

Invariants: the full logits are never gathered; the ranks exchange one maximum and three sums per
token. At most ``chunk_size`` rows of the logits are copied to float32 at a time. The backward pass
recomputes the softmax instead of storing it. The chunk size does not change the results.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx

from rlpost.actor import parallel


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of the logits to evaluate, and parameters."""

    index_R: torch.Tensor  # rows of the logits, without repetition
    targets_R: torch.Tensor  # their tokens
    temperature: float
    num_valid: int  # columns of this rank that are tokens; the others are padding
    chunk_size: int  # rows computed at a time


def response_logprobs(
    logits_TV: torch.Tensor, rows: Rows, *, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute log softmax(logits / temperature)[target] and the entropy in nats, at ``rows``.

    The engines report the same log-probs: of temperature-scaled logits over the full vocabulary.

    Returns:
        Two tensors [R] float32; the second is zeros without ``with_entropy``.
    """
    return _VocabParallel.apply(logits_TV, rows, with_entropy)


class _VocabParallel(torch.autograd.Function):
    """Log-prob and entropy with an explicit backward pass.

    With z = logit / temperature, p = softmax(z), l = log sum exp z and H = l - sum p z:
    d log p_t / dz_v = [v = t] - p_v and dH / dz_v = -p_v (log p_v + H). Each rank computes the
    gradient of its columns. The upstream gradient is the same on all tensor-parallel ranks.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, logits_TV: torch.Tensor, rows: Rows, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = [_chunk_forward(logits_TV, rows, part, with_entropy) for part in _parts(rows)]
        log_sum, logprobs, entropy = torch.cat([torch.stack(one) for one in found], dim=1).unbind()
        ctx.rows = rows
        ctx.save_for_backward(logits_TV, log_sum, entropy)
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: FunctionCtx, grad_logprobs: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor, None, None]:
        logits_TV, log_sum, entropy = ctx.saved_tensors
        rows: Rows = ctx.rows
        grad_TV = torch.zeros_like(logits_TV)
        for part in _parts(rows):
            z = _scaled(logits_TV, rows, part)
            log_p = z.sub_(log_sum[part, None])
            p = log_p.exp()
            grad = torch.zeros_like(p)
            if grad_logprobs is not None:
                upstream = grad_logprobs[part, None]
                column, is_mine = _columns(rows, part, logits_TV.size(1))
                grad -= upstream * p
                if rows.num_valid:
                    grad.scatter_add_(1, column[:, None], upstream * is_mine[:, None])
            if grad_entropy is not None:
                grad -= grad_entropy[part, None] * p * log_p.add_(entropy[part, None])
            grad_TV[rows.index_R[part], : rows.num_valid] = (grad / rows.temperature).to(
                grad_TV.dtype
            )
        return grad_TV, None, None


def _parts(rows: Rows) -> list[slice]:
    """Return at least one slice, so that a rank without rows takes part in the collectives."""
    count = max(len(rows.index_R), 1)
    return [slice(start, start + rows.chunk_size) for start in range(0, count, rows.chunk_size)]


def _scaled(logits_TV: torch.Tensor, rows: Rows, part: slice) -> torch.Tensor:
    return logits_TV[rows.index_R[part], : rows.num_valid].float() / rows.temperature


def _columns(rows: Rows, part: slice, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the local column of each target (0 if another rank has it) and whether it is local.

    All ranks have ``width`` columns.
    """
    column = rows.targets_R[part] - parallel.tensor_parallel_group().rank() * width
    is_mine = (column >= 0) & (column < rows.num_valid)
    return column * is_mine, is_mine


def _chunk_forward(
    logits_TV: torch.Tensor, rows: Rows, part: slice, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log sum exp, log-prob and entropy for the rows of one chunk."""
    group = parallel.tensor_parallel_group()
    z = _scaled(logits_TV, rows, part)
    highest = z.amax(1) if rows.num_valid else z.new_full((z.size(0),), -torch.inf)
    if group.size() > 1:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    z.sub_(highest[:, None])
    column, is_mine = _columns(rows, part, logits_TV.size(1))
    target = (
        z.gather(1, column[:, None])[:, 0] * is_mine
        if rows.num_valid
        else torch.zeros_like(highest)
    )
    exp = z.exp()
    weighted = torch.linalg.vecdot(exp, z) if with_entropy else torch.zeros_like(highest)
    sums = torch.stack([exp.sum(1), target, weighted])
    if group.size() > 1:
        dist.all_reduce(sums, group=group)
    total, target, weighted = sums
    log_total = total.log()
    entropy = log_total - weighted / total if with_entropy else weighted
    return highest + log_total, target - log_total, entropy
