"""One pass over the micro-batches of a rank: log-probs alone, or the loss and its gradient.

Input: packed micro-batches. Output: values per response token, or accumulated gradients and sums of
metrics.

The loss is the sum over all ranks and micro-batches of loss x weight. A token's weight contains the
denominators of the global batch. By default Megatron averages; with ``calculate_per_token_loss`` in
its configuration it sums, and ``finalize_summed_grads`` omits the division by tokens that Megatron
would then do. The result is the gradient of the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from rlpost.algorithm.loss import token_weights
from rlpost.algorithm.objective import Stats, Tokens, loss_function
from rlpost.config.tree import Config
from rlpost.observe.progress.position import RECORDER
from rlpost.observe.spans import span
from rlpost.trainer import parallel
from rlpost.trainer.logprobs import (
    WITHOUT_TEACHER,
    HeldScores,
    LogitRows,
    SamplingMasks,
    response_logprobs,
)
from rlpost.trainer.own_time import OWN_TIME
from rlpost.trainer.packing import PackedMicroBatch
from rlpost.trainer.routing_replay import RoutingReplay
from rlpost.trainer.shared_rows import row_params
from rlpost.trainer.stop_points import StopPoints

Losses = tuple[torch.Tensor, torch.Tensor, Stats]
"""Sums of a micro-batch: its weighted loss, a token count, and its terms of the metrics.

Megatron requires the token count, but it is unused. The terms are sums, or maxima under names that
end in ``_max``.
"""


def finalize_summed_grads(
    model: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, **kwargs: object
) -> None:
    """Megatron's ``finalize_model_grads`` without the division by ``num_tokens`` (a scalar)."""
    OWN_TIME.end()
    finalize_model_grads(model, None, **kwargs)


@dataclass(frozen=True, slots=True)
class Weighting:
    """The weights of tokens in sums over the global batch."""

    num_samples: int  # of the global batch
    num_tokens: int  # of the global batch
    per_token: bool  # average over tokens instead of samples

    def weights(self, packed: PackedMicroBatch) -> torch.Tensor:
        """[R]: the factor of each response token's loss; it contains the global denominators."""
        weight_R = packed.loss_mask * token_weights(
            packed.sample_lengths,
            num_samples=self.num_samples,
            num_tokens=self.num_tokens,
            per_token=self.per_token,
        )
        if not self.per_token:  # per-token loss weights all tokens equally
            weight_R = weight_R * packed.sample_weights
        return weight_R

    def term(self, name: str, value_R: torch.Tensor, mask_R: torch.Tensor) -> torch.Tensor:
        """This micro-batch's term of a metric; a maximum is at least 0."""
        trained_R = _zero_outside(value_R, mask_R)
        if name.endswith("_max"):
            return torch.cat([trained_R, value_R.new_zeros(1)]).max()
        return trained_R.sum() / self.num_tokens

    def reduced(self, loss_R: torch.Tensor, stats: Stats, packed: PackedMicroBatch) -> Losses:
        """Reduce the loss and the statistics of each response token."""
        loss = (_zero_outside(loss_R, packed.loss_mask) * self.weights(packed)).sum()
        terms = {
            name: self.term(name, value_R, packed.loss_mask) for name, value_R in stats.items()
        }
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), terms


class MicroBatchLoss:
    """Computes log-probs from this rank's logits, and a weighted loss from those."""

    def __init__(
        self, config: Config, *, num_valid: int, num_samples: int, num_tokens: int
    ) -> None:
        """Import the loss function.

        ``num_valid`` columns of the logits are tokens. ``num_samples`` and ``num_tokens`` count the
        global batch.

        Raises:
            ConfigError: a custom loss cannot be imported.
        """
        self.config = config
        self.num_valid = num_valid
        self.weighting = Weighting(num_samples, num_tokens, config.grpo.calculate_per_token_loss)
        self._loss_settings = config.loss_settings
        self.objective = loss_function(self._loss_settings)

    def logprobs(
        self, logits: torch.Tensor, packed: PackedMicroBatch, *, with_entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[1, T, V / tp] -> log-probs and entropies [R]; entropies are 0 unless requested."""
        return response_logprobs(logits[0], self._rows(packed), with_entropy=with_entropy)

    def _logprobs_with_top(
        self, logits: torch.Tensor, packed: PackedMicroBatch, top_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return log-probs [R], entropies [R], and the log-probs of ``top_ids`` [R, k] if given."""
        if top_ids is None:
            return *self.logprobs(logits, packed, with_entropy=True), None
        targets = torch.cat([packed.targets[:, None], top_ids], dim=1)
        rows = replace(self._rows(packed), targets_R=targets)
        logprobs, entropy = response_logprobs(logits[0], rows, with_entropy=True)
        return logprobs[:, 0], entropy, logprobs[:, 1:]

    def _rows(self, packed: PackedMicroBatch) -> LogitRows:
        """The rows of the response tokens, with their sampling masks if the settings use them."""
        masks = None
        if self.config.grpo.use_rollout_sampling_mask and packed.mask_sizes is not None:
            assert packed.mask_ids is not None
            masks = SamplingMasks(packed.mask_sizes, packed.mask_ids)
        return LogitRows(
            packed.response_index,
            packed.targets,
            temperature=self.config.rollout.rollout_temperature,
            num_valid=self.num_valid,
            chunk_size=self.config.grpo.log_probs_chunk_size,
            masks=masks,
            may_repeat=packed.key_rows is not None,
            fused=self.config.perf.fused_log_probs and packed.targets.is_cuda,
        )

    def loss(
        self,
        packed: PackedMicroBatch,
        old_logprobs: torch.Tensor | None,
        ref_logprobs: torch.Tensor | None,
        logits: torch.Tensor,
        teacher: HeldScores = WITHOUT_TEACHER,
    ) -> Losses:
        """Compute the loss of a micro-batch; its terms of the metrics include the loss.

        ``logits`` are [1, T, V / tp], all others [R], or [R, K] of a teacher's top tokens.
        """
        logprobs_R, entropy_R, top_RK = self._logprobs_with_top(logits, packed, teacher.top_ids)

        def trained(value: torch.Tensor | None) -> torch.Tensor | None:
            return None if value is None else _zero_outside(value, packed.loss_mask)

        logprobs_R = _zero_outside(logprobs_R, packed.loss_mask)
        old_R = trained(old_logprobs)
        tokens = Tokens(
            logprobs=logprobs_R,
            entropy=_zero_outside(entropy_R, packed.loss_mask),
            old_logprobs=logprobs_R.detach() if old_R is None else old_R,
            rollout_logprobs=_zero_outside(packed.rollout_logprobs, packed.loss_mask),
            ref_logprobs=trained(ref_logprobs),
            teacher_logprobs=trained(teacher.logprobs),
            top_logprobs=trained(top_RK),
            teacher_top_logprobs=trained(teacher.top_logprobs),
            advantages=_zero_outside(packed.advantages, packed.loss_mask),
            loss_mask=packed.loss_mask,
            sample_lengths=packed.sample_lengths,
            sample_sums=partial(_sample_sums, packed=packed),
        )
        loss_R, per_token = self.objective(tokens, self._loss_settings)
        loss, no_count, terms = self.weighting.reduced(loss_R, per_token, packed)
        return loss, no_count, {"loss": loss.detach()} | terms


def _zero_outside(value_R: torch.Tensor, mask_R: torch.Tensor) -> torch.Tensor:
    """Return the values, [R] or [R, K], with 0 where the mask is 0.

    Not a product: NaN x 0 is NaN, in the value and in the gradient. As an input of the loss this
    also bounds the gradient: where the mask is 0 it is 0, whatever the loss computes there.
    """
    is_masked = mask_R == 0
    return value_R.masked_fill(is_masked if value_R.dim() == 1 else is_masked[:, None], 0.0)


def _sample_sums(values_R: torch.Tensor, packed: PackedMicroBatch) -> torch.Tensor:
    """For each response token: the sum over its sample's loss-masked tokens on all ranks."""
    sums = values_R.new_zeros(len(packed.response_lengths))
    sums.index_add_(0, packed.sample_index, _zero_outside(values_R, packed.loss_mask))
    if parallel.context_parallel_group().size() > 1:
        dist.all_reduce(sums, group=parallel.context_parallel_group())
    return sums[packed.sample_index]


def run(
    chunks: Sequence[torch.nn.Module],
    packed: Sequence[PackedMicroBatch],
    *,
    loss_of: Callable[[int, PackedMicroBatch, torch.Tensor], object],
    forward_only: bool,
    stop_points: StopPoints,
    routing: RoutingReplay | None = None,
) -> list[Any]:
    """Run Megatron's schedule over the micro-batches.

    With ``routing``, call it within one of its passes. The device holds the columns of the
    micro-batches in flight alone: those of a batch grow with the length and number of its answers.

    Returns:
        The results of ``loss_of(index, micro_batch, logits)`` on the last pipeline stage; an empty
        list on the others. Its logits are [1, T, V / tp].

    Raises:
        Interrupted: at one of the ``stop_points``; gradients of some micro-batches may be
            accumulated.
    """
    # Micro-batches of several pipeline stages overlap: no boundary between two is common to all.
    is_one_unit = parallel.pipeline_group().size() > 1

    def forward(
        batches: Iterator[tuple[int, PackedMicroBatch]], chunk: torch.nn.Module
    ) -> tuple[torch.Tensor, object]:
        index, on_host = next(batches)
        micro_batch = on_host.on_device()  # its columns leave the device with it
        if not is_one_unit:
            stop_points.cross(index)
        RECORDER.micro_batch(index)
        with nullcontext() if routing is None else routing.forward(index, micro_batch):
            logits = chunk(
                micro_batch.input_ids,
                micro_batch.positions,
                None,
                packed_seq_params=row_params(micro_batch),
            )
        return logits, partial(loss_of, index, micro_batch)

    # one iterator for each chunk: an interleaved schedule takes a micro-batch once per chunk
    batches = [iter(list(enumerate(packed))) for _ in chunks]
    name = "forward" if forward_only else "forward, backward"
    num_stop_points = 1 if is_one_unit else len(packed)
    OWN_TIME.begin()
    with span(name), RECORDER.passing(len(packed)), stop_points.passing(num_stop_points):
        if is_one_unit:
            stop_points.cross(0)
        return get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=batches if len(chunks) > 1 else batches[0],
            model=list(chunks) if len(chunks) > 1 else chunks[0],
            num_microbatches=len(packed),
            seq_length=1,  # these two are for pipelines of fixed shape
            micro_batch_size=1,
            forward_only=forward_only,
        )
