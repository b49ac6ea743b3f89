"""Multi-token prediction (MTP): train the layer that predicts the token after next.

Input: the output of the policy's last norm and the embedding of the next token, both without
gradient. Output: a cross-entropy loss on the token after next. Engines use the layer as the draft
model of speculative decoding.

Invariants: no gradient reaches a weight of the policy, including output layer and embedding. The
gradient norm, and thus clipping, excludes the layer, so the policy's weights are bitwise the same
with and without it. The denominators are those of the policy's loss: they count the global batch.

Position i of a sequence combines its hidden state with the embedding of token i + 1 and predicts
token i + 2 (DeepSeek-V3, arXiv 2412.19437, section 2.2; Megatron-core's
``multi_token_prediction.py``). The loss counts all response tokens with at least two preceding
tokens. The layer is part of the last pipeline stage.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from rlpost.columns import FloatColumn, IntColumn, RunColumn
from rlpost.trainer import parallel
from rlpost.trainer.layer_specs import LOCAL
from rlpost.trainer.norm import SeparateRMSNorm
from rlpost.trainer.packing import PackedMicroBatch
from rlpost.trainer.step import Losses, MicroBatchLoss
from rlpost.types import MicroBatch, TrainSample

MODULE = "mtp"
"""Name of the module in the last chunk of the last stage.

Its keys in a checkpoint are Megatron-LM's.
"""
CHECKPOINT_KEY = f"{MODULE}.layers.0.eh_proj.weight"
"""A key that only checkpoints with the layer have."""
PASSED_ON = (
    "attention_mask",
    "rotary_pos_emb",
    "rotary_pos_cos",
    "rotary_pos_sin",
    "packed_seq_params",
)
"""Arguments of the policy's decoder that are also passed to the layer."""

ATTENTION_STATE = "core_attention._extra_state"

LossOf = Callable[[int, PackedMicroBatch, torch.Tensor], Losses]


class _Block(MultiTokenPredictionBlock):
    """Megatron's block, with the same checkpoint keys with and without TransformerEngine."""

    def sharded_state_dict(self, *args: object, **kwargs: object) -> dict[str, object]:
        """Omit the empty extra state of TransformerEngine's attention, as the decoder does."""
        state = super().sharded_state_dict(*args, **kwargs)
        return {key: part for key, part in state.items() if not key.endswith(ATTENTION_STATE)}


def attach(
    chunk: GPTModel, block: TransformerBlockSubmodules, *, implementation: str, stage: int | None
) -> None:
    """Add the layer to the last chunk of the model, with uninitialised weights.

    It is not passed to GPTModel, which would train embedding and output layer with its loss. The
    layer's router is excluded from routing replay, which has only routes of the policy's layers.
    """
    config = copy.copy(chunk.config)
    config.moe_enable_routing_replay = False
    spec = get_mtp_layer_spec(block.layer_specs[-1], use_transformer_engine=implementation != LOCAL)
    if implementation == LOCAL:
        spec.submodules.enorm = spec.submodules.hnorm = spec.submodules.layer_norm = SeparateRMSNorm
    chunk.mtp = _Block(config, MultiTokenPredictionBlockSubmodules([spec]), vp_stage=stage)
    for parameter in chunk.mtp.parameters():
        parameter.shared = True  # excludes it from Megatron's gradient norm


def shifted(micro_batch: MicroBatch) -> MicroBatch:
    """Shift samples by one token.

    The inputs are the next tokens, the targets the tokens after next. The sequence lengths do not
    change, so packed rows have the layout of ``micro_batch``.
    """
    return tuple(map(_shifted, micro_batch))


def _shifted(sample: TrainSample) -> TrainSample:
    prompt_length = max(sample.prompt_length - 1, 1)
    # the first response token after a prompt of one token
    num_lost = prompt_length + 1 - sample.prompt_length
    # the last position has no token after next
    loss_mask = RunColumn.of([*sample.loss_mask[num_lost:], 0])
    return TrainSample(
        token_ids=IntColumn([*sample.token_ids[1:], 0]),
        prompt_length=prompt_length,
        loss_mask=loss_mask,
        rollout_logprobs=FloatColumn.zeros(len(loss_mask)),
        advantage=0.0,
        weight=sample.weight,
        count=sample.count,
        images=tuple(replace(span, start=span.start - 1) for span in sample.images),
    )


class MtpTraining:
    """Adds the loss of the layer to the policy's loss on the last pipeline stage."""

    def __init__(self, chunks: Sequence[GPTModel], *, scaling_factor: float) -> None:
        """Register hooks; ``scaling_factor`` is the weight of the layer's loss."""
        self._first, self._last = chunks[0], chunks[-1]
        self._factor = scaling_factor
        self._is_on = False
        self._seen: tuple[torch.Tensor, dict[str, object]] | None = None
        if self.is_here:
            self._last.decoder.register_forward_hook(self._keep, with_kwargs=True)

    @property
    def is_here(self) -> bool:
        """Whether this rank holds the layer, or a shard of it."""
        return hasattr(self._last, MODULE)

    def add_to(
        self, loss_of: LossOf, loss: MicroBatchLoss, packed: Iterable[PackedMicroBatch]
    ) -> LossOf:
        """Return ``loss_of`` with the layer's loss added.

        Collective: call on every rank, once before each training pass. ``packed`` are the
        ``shifted`` micro-batches.
        """
        later, self._is_on = list(packed), self.is_here
        embedding = self._embedding()

        def both(index: int, micro_batch: PackedMicroBatch, logits: torch.Tensor) -> Losses:
            policy_loss, num_tokens, stats = loss_of(index, micro_batch, logits)
            mtp_loss = self._loss(loss, later[index].on_device(), embedding)
            # The terms share no trained weight, so neither changes the gradients of the other.
            total = policy_loss + self._factor * mtp_loss
            return total, num_tokens, stats | {"mtp_loss": mtp_loss.detach()}

        return both

    def finish(self) -> None:
        """End a training pass, also after an error; forward-only passes keep no hidden states."""
        self._is_on, self._seen = False, None

    def _keep(
        self, module: torch.nn.Module, args: object, kwargs: dict[str, object], output: torch.Tensor
    ) -> None:
        """Forward hook of the decoder.

        Megatron computes the loss of a forward pass before the next one.
        """
        if self._is_on:
            self._seen = (
                output.detach(),
                {name: kwargs[name] for name in PASSED_ON if name in kwargs},
            )

    def _loss(
        self, loss: MicroBatchLoss, later: PackedMicroBatch, embedding: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of this micro-batch's cross-entropies; scalar."""
        logprobs_R, _ = loss.logprobs(self._logits(later.input_ids, embedding), later)
        return -(logprobs_R * loss.weighting.weights(later)).sum()

    def _logits(self, next_ids: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """Return the logits of the token after next: [1, T] -> [1, T, V / tp]."""
        assert self._seen is not None, "the decoder must run before the loss is computed"
        (hidden, passed_on), self._seen = self._seen, None
        layer = self._last.mtp.layers[0]
        run = partial(layer._proj_and_transformer_layer, **passed_on)
        inputs = (hidden, self._embedded(next_ids, embedding))
        if layer.config.recompute_granularity == "full":
            # If no input requires a gradient, checkpointing computes none for the weights either.
            output = tensor_parallel.checkpoint(run, False, hidden.requires_grad_(), inputs[1])
        else:
            output = run(*inputs)
        logits, _ = self._last.output_layer(output, weight=self._last.output_layer.weight.detach())
        return logits.transpose(0, 1).contiguous()

    def _embedding(self) -> torch.Tensor | None:
        """Return this rank's shard of the embedding, [V / tp, hidden], without gradient.

        The first stage sends it to the last one; other stages return None. A copy for one pass uses
        two bytes per parameter; Megatron's copy would also need gradients and Adam's state.
        """
        if parallel.pipeline_group().size() == 1:
            return self._first.embedding.word_embeddings.weight.detach()
        is_first = parallel_state.is_pipeline_first_stage()
        if not is_first and not self.is_here:
            return None
        if is_first:
            weight = self._first.embedding.word_embeddings.weight.detach()
        else:
            # the same rows of the vocabulary
            weight = torch.empty_like(self._last.output_layer.weight)
        dist.broadcast(weight, group=parallel_state.get_embedding_group(), group_src=0)
        return weight

    def _embedded(self, ids: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """Embed token ids: [1, T] -> [T, 1, hidden].

        With sequence parallelism the result is this rank's part of the sequence.
        """
        group = parallel.tensor_parallel_group()
        # rows of other ranks are looked up as row 0, and set to zero
        row = ids[0] - group.rank() * embedding.size(0)
        is_mine = (row >= 0) & (row < embedding.size(0))
        found = F.embedding(row * is_mine, embedding) * is_mine[:, None]
        if group.size() > 1:
            dist.all_reduce(found, group=group)  # one rank has the row; the others contribute zeros
            if self._last.config.sequence_parallel:
                found = found.chunk(group.size())[group.rank()]
        return found[:, None].contiguous()
