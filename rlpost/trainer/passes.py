"""The passes of one rank over the micro-batches of a batch: log-probs, or gradients of the loss.

Input: batches of samples, and the wrapped model. Output: log-probs by micro-batch and sample, or
accumulated gradients and the metrics of the loss.

Every method is collective: call it on every rank, in the same order. ``rlpost.trainer.step`` runs a
single pass; this module packs the samples and connects the pass with routing replay and multi-token
prediction.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from rlpost.algorithm.objective import Stats
from rlpost.columns import FloatColumn
from rlpost.config.tree import Config
from rlpost.trainer import device, optimizer, parallel, step
from rlpost.trainer.logprobs import TeacherScores, held_scores
from rlpost.trainer.mtp import LossOf, MtpTraining, shifted
from rlpost.trainer.packing import (
    PackedMicroBatch,
    RowLayout,
    as_trained,
    held_values,
    log_prob_micro_batches,
    pack,
    unpack,
)
from rlpost.trainer.routing_replay import RoutingReplay
from rlpost.trainer.stop_points import StopPoints
from rlpost.types import MicroBatch, TrainBatch

Logprobs = list[list[FloatColumn]]
"""Log-probs of the response tokens, per micro-batch and per sample."""


class Passes:
    """Runs the passes of one rank."""

    def __init__(
        self,
        model: Sequence[torch.nn.Module],
        config: Config,
        *,
        num_valid: int,
        row_layout: RowLayout,
        routing: RoutingReplay,
        mtp: MtpTraining | None,
        stop_points: StopPoints,
    ) -> None:
        """Connect the parts of a pass.

        ``model`` has the wrapped chunks of this rank, and ``routing`` replays the routers in them.
        ``num_valid`` is the number of columns of this rank's logits that are tokens.
        """
        self._model = model
        self._config = config
        self._num_valid = num_valid
        self._row_layout = row_layout
        self._routing = routing
        self._mtp = mtp
        self._stop_points = stop_points

    def logprobs(self, batch: TrainBatch, *, records_routes: bool) -> Logprobs:
        """Compute log-probs of all response tokens; forward only.

        With ``records_routes`` routing replay records the experts of this pass.

        Returns:
            Log-probs by micro-batch and sample; empty on all pipeline stages but the last.

        Raises:
            Interrupted: at one of the stop points.
        """
        loss = self._micro_batch_loss(batch)

        def collect(
            index: int, micro_batch: PackedMicroBatch, logits: torch.Tensor
        ) -> tuple[torch.Tensor, list[FloatColumn]]:
            logprobs_R, _ = loss.logprobs(logits, micro_batch)
            return logprobs_R.sum(), unpack(
                of_all_context_ranks(logprobs_R, micro_batch), micro_batch
            )

        micro_batches = log_prob_micro_batches(batch)
        self._gather_encoder()
        packed = self._pack(micro_batches)
        set_mode(self._model, training=False)
        recorded = micro_batches if records_routes else ()
        with torch.no_grad(), self._routing.passing(is_training=False, micro_batches=recorded):
            by_micro_batch = step.run(
                self._model,
                packed,
                loss_of=collect,
                forward_only=True,
                stop_points=self._stop_points,
                routing=self._routing,
            )
        return as_trained(by_micro_batch, batch)

    def gradients(
        self,
        batch: TrainBatch,
        old_logprobs: Logprobs | None,
        ref_logprobs: Logprobs | None,
        teacher: TeacherScores | None = None,
    ) -> dict[str, float]:
        """Accumulate the gradients of the loss; clear the gradients before the call.

        Args:
            batch: this rank's micro-batches.
            old_logprobs: None for those of this pass: the ratio is 1 and only its gradient counts.
            ref_logprobs: None without the KL divergence from the reference.
            teacher: None without the divergence from a teacher in the loss.

        Returns:
            The metrics of the loss and of routing, equal on every rank.

        Raises:
            Interrupted: at one of the stop points; some gradients may be accumulated.
        """
        self._gather_encoder()
        packed = self._pack(batch.micro_batches)
        loss = self._micro_batch_loss(batch)

        def policy_loss(
            index: int, micro_batch: PackedMicroBatch, logits: torch.Tensor
        ) -> step.Losses:
            old = held_values(old_logprobs, index, micro_batch)
            ref = held_values(ref_logprobs, index, micro_batch)
            scores = held_scores(teacher, index, micro_batch)
            return loss.loss(micro_batch, old, ref, logits, scores)

        loss_of = self._with_mtp(policy_loss, loss, batch)
        set_mode(self._model, training=True)
        try:
            with self._routing.passing(is_training=True):
                stats = step.run(
                    self._model,
                    packed,
                    loss_of=loss_of,
                    forward_only=False,
                    stop_points=self._stop_points,
                    routing=self._routing,
                )
        finally:
            if self._mtp is not None:
                self._mtp.finish()
        return global_metrics(stats) | self._routing.metrics()

    def _with_mtp(
        self, policy_loss: LossOf, loss: step.MicroBatchLoss, batch: TrainBatch
    ) -> LossOf:
        """Add the loss of multi-token prediction, if it is trained."""
        if self._mtp is None:
            return policy_loss
        # Without routes: the router of the layer is not replayed.
        later = [pack(shifted(micro), self._row_layout) for micro in batch.micro_batches]
        return self._mtp.add_to(policy_loss, loss, later)

    def _micro_batch_loss(self, batch: TrainBatch) -> step.MicroBatchLoss:
        return step.MicroBatchLoss(
            self._config,
            num_valid=self._num_valid,
            num_samples=batch.num_samples,
            num_tokens=batch.num_tokens,
        )

    def _gather_encoder(self) -> None:
        """Wait for the gathers of weights, if the encoder of images is trained.

        Data-parallel ranks would gather it in another order, depending on their images.
        """
        if self._config.trains_encoder:
            optimizer.finish_param_sync(self._model, self._config)

    def _pack(self, micro_batches: Sequence[MicroBatch]) -> list[PackedMicroBatch]:
        return [
            self._routing.attached(pack(micro, self._row_layout), micro) for micro in micro_batches
        ]


def set_mode(model: Sequence[torch.nn.Module], *, training: bool) -> None:
    """Set the chunks to training, or to evaluation."""
    for chunk in model:
        chunk.train(training)


def of_all_context_ranks(values_R: torch.Tensor, packed: PackedMicroBatch) -> torch.Tensor:
    """Values of all response tokens, [R, ...], combined from all context-parallel ranks."""
    length = sum(packed.response_lengths)
    whole = values_R.new_zeros((length, *values_R.shape[1:]))
    whole[packed.held] = values_R
    if parallel.context_parallel_group().size() > 1:
        dist.all_reduce(whole, group=parallel.context_parallel_group())
    return whole


def global_metrics(stats: Sequence[Stats]) -> dict[str, float]:
    """Reduce over micro-batches and ranks to ``train/NAME``, equal on every rank. Collective.

    Every rank of the last stage must have the same names. Sums already contain their global
    denominators; a name that ends in ``_max`` is a maximum.
    """
    metrics: list[dict[str, float]] = [{}]
    if stats:
        group = parallel.data_parallel_group(with_context_parallel=True)
        for is_max, operation in ((False, dist.ReduceOp.SUM), (True, dist.ReduceOp.MAX)):
            names = [name for name in stats[0] if name.endswith("_max") == is_max]
            if not names:
                continue
            rows = []
            for one in stats:
                rows.append(torch.stack([one[name].float() for name in names]))
            terms = torch.stack(rows)
            values = terms.amax(0) if is_max else terms.sum(0)
            dist.all_reduce(values, op=operation, group=group)
            metrics[0] |= {
                f"train/{name}": value for name, value in zip(names, values.tolist(), strict=True)
            }
    if parallel.pipeline_group().size() > 1:
        source = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast_object_list(
            metrics, src=source, group=parallel.pipeline_group(), device=device.current()
        )
    return metrics[0]
