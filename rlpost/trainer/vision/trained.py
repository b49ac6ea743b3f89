"""Gradients of an encoder of images that is trained, and its place in Megatron's model.

Input: an encoder, and the rows that take its features. Output: a part of it as a module of the first
chunk, so that gradient buffers, optimizer, checkpoints and weight updates have its weights; and
operations whose gradients are right wherever the layers are recomputed.

Each rank of the first stage has the whole encoder, and the gradients of its rows alone. They are
summed over context- and data-parallel ranks as those of all weights; over the tensor-parallel ranks
with sequence parallelism, which divides the rows. Without it, these ranks compute the same and take
the mean, so that no rounding drives their weights apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from megatron.core.models.gpt import GPTModel
from torch.autograd.function import FunctionCtx

from rlpost.trainer.weights.inventory import ENCODER

MERGERS = ("merger", "deepstack_merger_list", "downsample")
"""Modules of transformers' encoders that project patches to the language model."""


def trained_part(tower: torch.nn.Module, which: str) -> torch.nn.Module | None:
    """Return the part that --vision-tower trains, with a gradient; its weights keep their names."""
    if which == "frozen":
        return None
    part = tower
    if which == "merger":
        found = {name: getattr(tower, name) for name in MERGERS if hasattr(tower, name)}
        part = torch.nn.ModuleDict(found)
    return part.requires_grad_(True)


def attach(part: torch.nn.Module, chunk: GPTModel) -> None:
    """Make a part of the encoder a module of the chunk, before its gradient buffers are made."""
    summed = chunk.config.sequence_parallel
    for weight in part.parameters():
        # read by finalize_model_grads.py of megatron-core 0.16.1
        attribute = "sequence_parallel" if summed else "average_gradients_across_tp_domain"
        setattr(weight, attribute, True)
    setattr(chunk, ENCODER.removesuffix("."), part)


def with_gradients(compute: Callable[[], torch.Tensor], part: torch.nn.Module) -> torch.Tensor:
    """Compute features [F, hidden] such that all trained weights of ``part`` get their gradients at one time.

    An overlapped reduction begins when the gradients of a bucket are complete. Data-parallel ranks
    must reduce in one order, whatever images a rank has, and if it has none.
    """
    trained = (weight for weight in part.parameters() if weight.requires_grad)
    features: torch.Tensor = _AtOnce.apply(compute, *trained)
    return features


@dataclass
class DeepFeatures:
    """What is added to the rows of images after the first layers, in one micro-batch.

    Gradients are kept here and not by autograd: recomputation runs a backward pass for each layer,
    and would go through the encoder each time. ``put_features`` returns them as one.
    """

    rows: torch.Tensor
    """[I] int64."""
    features: torch.Tensor
    """[I, layers, hidden], without a graph."""
    keeps_gradients: bool
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    """By layer: [I, hidden]."""

    def add(self, hidden: torch.Tensor, number: int) -> torch.Tensor:
        """Add those of layer ``number`` to its hidden states [T, 1, hidden]."""
        result: torch.Tensor = _AddDeep.apply(hidden, self, number)
        return result


def put_features(
    embedded: torch.Tensor, rows: torch.Tensor, features: torch.Tensor
) -> tuple[torch.Tensor, DeepFeatures]:
    """Replace rows of embeddings [T, 1, hidden] by features [I, 1 + deep layers, hidden].

    Returns:
        The embeddings, and what the first layers add. The gradient of the features includes that of
        the deep ones, because the backward pass of the layers precedes that of their input.
    """
    keeps_gradients = features.requires_grad and rows.numel() > 0
    deep = DeepFeatures(rows, features[:, 1:].detach(), keeps_gradients)
    replaced: torch.Tensor = _Put.apply(embedded, features, deep)
    return replaced, deep


class _AtOnce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, compute: Callable[[], torch.Tensor], *weights: torch.Tensor
    ) -> torch.Tensor:
        with torch.enable_grad():
            ctx.features = compute()
        ctx.weights = weights
        return ctx.features.detach()

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        features, weights = ctx.features, ctx.weights
        del ctx.features, ctx.weights
        found = [None] * len(weights)
        if features.requires_grad:
            found = torch.autograd.grad(features, weights, gradient, allow_unused=True)
        grads = zip(weights, found, strict=True)
        return None, *(torch.zeros_like(it) if grad is None else grad for it, grad in grads)


class _AddDeep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: torch.Tensor, deep: DeepFeatures, number: int
    ) -> torch.Tensor:
        ctx.deep, ctx.number = deep, number
        return hidden.index_add(0, deep.rows, deep.features[:, number : number + 1])

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        deep: DeepFeatures = ctx.deep
        if deep.keeps_gradients:
            deep.gradients[ctx.number] = gradient[deep.rows, 0]
        return gradient, None, None


class _Put(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, embedded: torch.Tensor, features: torch.Tensor, deep: DeepFeatures
    ) -> torch.Tensor:
        ctx.deep = deep
        return embedded.index_put((deep.rows,), features[:, :1])

    @staticmethod
    def backward(
        ctx: FunctionCtx, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        deep: DeepFeatures = ctx.deep
        of_features = None
        if deep.keeps_gradients:
            layers = [deep.gradients.pop(number) for number in range(deep.features.size(1))]
            of_features = torch.stack([gradient[deep.rows, 0], *layers], dim=1)
        elif ctx.needs_input_grad[1]:
            # A row of text alone. Its layers added nothing, but the weights take part in the
            # reduction, so they need a gradient.
            of_features = gradient.new_zeros(0, 1 + deep.features.size(1), gradient.size(2))
        return gradient.index_fill(0, deep.rows, 0), of_features, None
