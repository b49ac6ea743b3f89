"""One pass over the micro-batches of a rank: log-probs alone, or the loss and its gradient.

In: packed micro-batches. Out: numbers per response token, or accumulated gradients and sums of metrics.

The loss is the sum over all ranks and micro-batches of loss x weight, a token's weight holding the denominators of the
global batch. Megatron would average; ``calculate_per_token_loss`` of its configuration makes it add up instead, and
``finalize_summed_grads`` leaves out the division by tokens that goes with it. The gradient is then that of the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func

from rlpost.actor import parallel
from rlpost.actor.logprobs import response_logprobs
from rlpost.actor.packing import PackedMicroBatch
from rlpost.actor.settings import ActorSettings
from rlpost.algorithm.kl import estimate_kl
from rlpost.algorithm.loss import cispo_loss, policy_loss, sequence_level, token_weights

Stats = dict[str, torch.Tensor]
LossFunction = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, Stats]]


def finalize_summed_grads(model: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, **kwargs: Any) -> None:
    """Megatron's ``finalize_model_grads`` without the division by ``num_tokens``."""
    finalize_model_grads(model, None, **kwargs)


class MicroBatchLoss:
    """From this rank's logits to log-probs, and from those to a weighted loss."""

    def __init__(self, settings: ActorSettings, *, num_valid: int, num_samples: int, num_tokens: int) -> None:
        """Args: ``num_valid`` columns of the logits are tokens; the others count the global batch."""
        self.settings = settings
        self.num_valid = num_valid
        self.num_samples = num_samples
        self.num_tokens = num_tokens

    def logprobs(self, logits: torch.Tensor, packed: PackedMicroBatch) -> torch.Tensor:
        """[1, T, V / tp] -> [R]."""
        return response_logprobs(
            logits[0],
            packed.response_index,
            packed.targets,
            temperature=self.settings.temperature,
            num_valid=self.num_valid,
        )

    def loss(
        self,
        packed: PackedMicroBatch,
        old_logprobs: torch.Tensor | None,
        ref_logprobs: torch.Tensor | None,
        logits: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, Stats]:
        """The weighted sum of the tokens' losses, a token count Megatron wants and no one uses, and sums of metrics."""
        logprobs_R = self.logprobs(logits, packed)
        old_R = logprobs_R.detach() if old_logprobs is None else old_logprobs
        loss_R, per_token = self._policy_loss(logprobs_R, old_R, packed)
        if ref_logprobs is not None:
            kl_R = estimate_kl(logprobs_R, ref_logprobs, self.settings.kl_loss_type)
            loss_R = loss_R + self.settings.kl_loss_coef * kl_R
            per_token = per_token | {"ref_kl": kl_R.detach()}
        weight_R = packed.loss_mask * token_weights(
            packed.sample_lengths,
            num_samples=self.num_samples,
            num_tokens=self.num_tokens,
            per_token=self.settings.calculate_per_token_loss,
        )
        loss = (loss_R * weight_R).sum()
        per_token = per_token | {"logprob_abs_diff": (logprobs_R.detach() - packed.rollout_logprobs).abs()}
        mean_weight_R = packed.loss_mask / self.num_tokens
        stats = {name: (value_R * mean_weight_R).sum() for name, value_R in per_token.items()}
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), {"loss": loss.detach()} | stats

    def _policy_loss(
        self, logprobs_R: torch.Tensor, old_R: torch.Tensor, packed: PackedMicroBatch
    ) -> tuple[torch.Tensor, Stats]:
        settings = self.settings
        clip = {"eps_clip": settings.eps_clip, "eps_clip_high": settings.eps_clip_high}
        if settings.advantage_estimator == "cispo":
            return cispo_loss(logprobs_R, old_R, packed.advantages, **clip)
        if settings.advantage_estimator == "gspo":
            logprobs_R = sequence_level(logprobs_R, _sample_means(logprobs_R.detach() - old_R, packed))
            old_R = torch.zeros_like(old_R)
        return policy_loss(logprobs_R, old_R, packed.advantages, **clip, eps_clip_c=settings.eps_clip_c)


def _sample_means(values_R: torch.Tensor, packed: PackedMicroBatch) -> torch.Tensor:
    """For each response token the mean over the loss-masked tokens of its sample, wherever these are."""
    sums = values_R.new_zeros(len(packed.response_lengths))
    sums.index_add_(0, packed.sample_index, values_R * packed.loss_mask)
    if parallel.context_parallel_group().size() > 1:
        dist.all_reduce(sums, group=parallel.context_parallel_group())
    return sums[packed.sample_index] / packed.sample_lengths.clamp(min=1)


def run(
    chunks: Sequence[torch.nn.Module],
    packed: Sequence[PackedMicroBatch],
    *,
    loss_of: Callable[[int, PackedMicroBatch, torch.Tensor], Any],
    forward_only: bool,
) -> list[Any]:
    """Megatron's schedule over the micro-batches. ``loss_of(index, micro_batch, logits)`` makes what is collected, on
    the last pipeline stage; the others return an empty list."""

    def forward(batches: Iterator[tuple[int, PackedMicroBatch]], chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        index, micro_batch = next(batches)
        logits = chunk(
            micro_batch.input_ids, micro_batch.positions, None, packed_seq_params=_packed_params(micro_batch)
        )
        return logits, partial(loss_of, index, micro_batch)

    batches = [iter(list(enumerate(packed))) for _ in chunks]
    return get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=batches if len(chunks) > 1 else batches[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(packed),
        seq_length=1,  # these two are for pipelines of fixed shape
        micro_batch_size=1,
        forward_only=forward_only,
    )


def _packed_params(packed: PackedMicroBatch) -> PackedSeqParams:
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=packed.cu_seqlens,
        cu_seqlens_kv=packed.cu_seqlens,
        max_seqlen_q=packed.max_length,
        max_seqlen_kv=packed.max_length,
    )
