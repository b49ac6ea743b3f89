"""Log-probabilities of given tokens from logits that are sharded over the vocabulary.

In: logits [T, vocabulary / tensor-parallel size], positions and tokens. Out: log-probs, differentiable. The full
logits are never gathered: Megatron's vocab-parallel cross entropy exchanges one maximum, one sum and one logit a token.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy


def response_logprobs(
    logits_TV: torch.Tensor, index_R: torch.Tensor, targets_R: torch.Tensor, *, temperature: float, num_valid: int
) -> torch.Tensor:
    """log softmax(logits / temperature)[target] at the rows ``index_R``; [R] float32.

    Args: ``logits_TV`` is this rank's slice of the vocabulary, of which the first ``num_valid`` columns are tokens and
    the others padding. Only the R rows are cast and normalised. The engines report the same: the log-softmax of
    temperature-scaled logits over the full vocabulary.
    """
    logits_RV = logits_TV[index_R].float() / temperature
    if num_valid < logits_RV.size(-1):
        padding = torch.arange(logits_RV.size(-1), device=logits_RV.device) >= num_valid
        logits_RV = logits_RV.masked_fill(padding, -torch.inf)
    return -vocab_parallel_cross_entropy(logits_RV, targets_R)
