"""The sampler's mask: the ids that top-p and top-k left to sample from. Pure functions of tensors.

An engine samples from softmax(logits / temperature) restricted to a set S of ids and renormalised,
p_S(a) = p(a) / p(S). The trainer computes log-probs and entropy of p_S with the set that the engine
returned, so that policy, old policy, reference and teacher are distributions over the same actions.
Source: DeepSeek-V3.2 (2025), arXiv 2512.02556, section 3.1, "Keep Sampling Mask".
"""

from __future__ import annotations

import torch
from torch import Tensor


def removed_columns(sizes_R: Tensor, token_ids: Tensor, *, first: int, width: int) -> Tensor:
    """Return which ids of a part of the vocabulary were not sampled from: [R, width] bool.

    Args:
        sizes_R: [R] int64, the number of ids in each row's set; 0 stands for the whole vocabulary.
        token_ids: [sum of sizes_R] int64, the sets one after the other.
        first: id of the part's first column.
        width: number of its columns.
    """
    removed = (sizes_R > 0)[:, None].expand(-1, width).clone()
    row = torch.arange(len(sizes_R), device=sizes_R.device).repeat_interleave(
        sizes_R, output_size=len(token_ids)
    )
    column = token_ids - first
    is_here = (column >= 0) & (column < width)
    removed[row[is_here], column[is_here]] = False
    return removed
