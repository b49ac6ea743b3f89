"""Triton kernels for log-probs and entropies of rows of logits, and their gradient.

Input: this rank's columns of the logits, [T, V] in any floating-point type. Output: sums of each row
in float32, or the gradient of all logits in their type. Imported on CUDA only.

Each kernel reads a logit once, and the second one writes a gradient once: 6 bytes for a logit in
bfloat16, where the operators of ``rlpost/trainer/logprobs.py`` move 128, and no float32 copy exists.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096
"""Columns that a program computes at a time."""
LOWEST = tl.constexpr(-1e30)
"""Below every scaled logit, and finite: 0 times it is 0."""


@triton.jit
def _sums_kernel(  # type: ignore[no-untyped-def]
    logits, index, highest, total, weighted, stride, num_valid, temperature, block: tl.constexpr
):
    """With z = logit / temperature and m = max z: m, sum exp(z - m), sum exp(z - m) (z - m)."""
    row = tl.program_id(0)
    start = logits + tl.load(index + row).to(tl.int64) * stride
    m = LOWEST
    s = 0.0
    w = 0.0
    for first in range(0, num_valid, block):
        columns = first + tl.arange(0, block)
        inside = columns < num_valid
        logit = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32)
        z = tl.where(inside, tl.div_rn(logit, temperature), LOWEST)
        new = tl.maximum(m, tl.max(z, 0))
        shift = m - new
        scale = tl.exp(shift)
        distance = z - new
        e = tl.exp(distance)
        w = scale * (w + s * shift) + tl.sum(e * distance, 0)
        s = scale * s + tl.sum(e, 0)
        m = new
    tl.store(highest + row, m)
    tl.store(total + row, s)
    tl.store(weighted + row, w)


@triton.jit
def _gradient_kernel(  # type: ignore[no-untyped-def]
    logits, gradient, row_of, target, log_sum, entropy, of_logprob, of_entropy,
    stride, width, num_valid, temperature, with_entropy: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """d log p_t / dz_v = [v = t] - p_v and dH / dz_v = -p_v (log p_v + H); 0 for other rows."""
    position = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    row = tl.load(row_of + position)
    out = gradient + position * width + columns
    if row < 0:
        tl.store(out, tl.zeros([block], gradient.dtype.element_ty), mask=columns < width)
    else:
        inside = columns < num_valid
        logit = tl.load(logits + position * stride + columns, mask=inside, other=0.0)
        log_p = tl.div_rn(logit.to(tl.float32), temperature) - tl.load(log_sum + row)
        p = tl.exp(log_p)
        upstream = tl.load(of_logprob + row)
        value = tl.where(columns == tl.load(target + row), upstream, 0.0) - upstream * p
        if with_entropy:
            value -= tl.load(of_entropy + row) * p * (log_p + tl.load(entropy + row))
        value = tl.where(inside, tl.div_rn(value, temperature), 0.0)
        tl.store(out, value.to(gradient.dtype.element_ty), mask=columns < width)


def sums(
    logits_TV: torch.Tensor, index_R: torch.Tensor, *, temperature: float, num_valid: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return m = max z, sum exp(z - m) and sum exp(z - m) (z - m) of rows, each [R] float32.

    z = logit / temperature over the first ``num_valid`` columns; -inf, 0 and 0 without any.
    """
    assert logits_TV.stride(1) == 1
    count = len(index_R)
    highest, total, weighted = torch.zeros(3, count, device=logits_TV.device)
    if not num_valid:
        return highest.fill_(-torch.inf), total, weighted
    if count:
        _sums_kernel[(count,)](
            logits_TV, index_R, highest, total, weighted, logits_TV.stride(0), num_valid,
            temperature, block=BLOCK, num_warps=8,
        )  # fmt: skip
    return highest, total, weighted


def gradient(
    logits_TV: torch.Tensor,
    index_R: torch.Tensor,
    target_R: torch.Tensor,
    log_sum_R: torch.Tensor,
    entropy_R: torch.Tensor,
    *,
    of_logprob_R: torch.Tensor | None,
    of_entropy_R: torch.Tensor | None,
    temperature: float,
    num_valid: int,
) -> torch.Tensor:
    """Return the gradient of all logits, [T, V], for the upstream gradients of the rows.

    ``index_R`` names no row twice. ``target_R``: columns here; a negative one is on another rank.
    """
    assert logits_TV.stride(1) == 1
    num_rows, width = logits_TV.shape
    grad_TV = torch.empty((num_rows, width), dtype=logits_TV.dtype, device=logits_TV.device)
    row_of = torch.full((num_rows,), -1, dtype=torch.int64, device=logits_TV.device)
    row_of[index_R] = torch.arange(len(index_R), device=logits_TV.device)
    upstream = torch.zeros_like(log_sum_R) if of_logprob_R is None else of_logprob_R.contiguous()
    _gradient_kernel[(num_rows, triton.cdiv(width, BLOCK))](
        logits_TV, grad_TV, row_of, target_R, log_sum_R, entropy_R, upstream,
        upstream if of_entropy_R is None else of_entropy_R.contiguous(), logits_TV.stride(0),
        width, num_valid, temperature, with_entropy=of_entropy_R is not None, block=BLOCK,
        num_warps=8,
    )  # fmt: skip
    return grad_TV
