"""Force the experts that routers of transformers choose: a reference for routing replay.

Input: a model of transformers, and the routes of a sequence. Output: log-probs, gradients, and the
experts that the model itself would have chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rlpost.columns import RouteColumn
from rlpost.types import TrainSample

UNKNOWN = 255


def moe_blocks(model: Any) -> list[Any]:
    """Return the MoE blocks of a Qwen3-MoE or GLM-4.5 model, first layer to last."""
    return [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "gate")]


@dataclass
class Routing:
    """The routers of a model, which use given experts and record their own choice.

    ``given`` [tokens, MoE layers, k] holds the experts of the sequence that is computed; where it
    is ``UNKNOWN`` a token uses the router's own choice. ``own`` holds that choice for each MoE
    layer, [tokens, k].
    """

    model: Any
    given: np.ndarray[Any, Any] | None = None

    def __post_init__(self) -> None:
        self.own: dict[int, torch.Tensor] = {}
        for number, block in enumerate(moe_blocks(self.model)):
            if hasattr(block, "route_tokens_to_experts"):
                self._force_glm(number, block)
            else:
                self._force_qwen(number, block.gate)

    def _force_glm(self, number: int, block: Any) -> None:
        original = block.route_tokens_to_experts

        def route(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            experts = self._experts(number, original(logits)[0])
            scores = logits.sigmoid().gather(1, experts)
            return experts, scores / scores.sum(-1, keepdim=True) * block.routed_scaling_factor

        block.route_tokens_to_experts = route

    def _force_qwen(self, number: int, gate: Any) -> None:
        def route(
            module: Any, inputs: Any, output: tuple[torch.Tensor, ...]
        ) -> tuple[torch.Tensor, ...]:
            logits, _, own = output
            experts = self._experts(number, own)
            scores = logits.softmax(-1).gather(1, experts)
            return logits, scores / scores.sum(-1, keepdim=True), experts

        gate.register_forward_hook(route)

    def _experts(self, number: int, own: torch.Tensor) -> torch.Tensor:
        self.own[number] = own
        if self.given is None:
            return own
        given = torch.from_numpy(self.given[:, number].astype(np.int64))
        return torch.where((given != UNKNOWN).all(1, keepdim=True), given, own)

    def chosen(self) -> np.ndarray[Any, Any]:
        """Return the routers' own choice in the last forward pass, [tokens, MoE layers, k]."""
        return (
            torch.stack([self.own[number] for number in sorted(self.own)], dim=1)
            .numpy()
            .astype(np.uint8)
        )


def logprobs(model: Any, sample: TrainSample, temperature: float) -> torch.Tensor:
    """Return the log-probs of the response tokens."""
    logits = model(torch.tensor([list(sample.token_ids)])).logits[0, sample.prompt_length - 1 : -1]
    targets = torch.tensor(list(sample.token_ids[sample.prompt_length :]))
    return (logits / temperature).log_softmax(-1).gather(1, targets[:, None])[:, 0]


def routes_of(model: Any, samples: Sequence[TrainSample]) -> list[np.ndarray[Any, Any]]:
    """Return the experts that the model's routers choose for all tokens of each sample."""
    routing = Routing(model)
    found = []
    with torch.no_grad():
        for sample in samples:
            model(torch.tensor([list(sample.token_ids)]))
            found.append(routing.chosen())
    return found


def whole(sample: TrainSample) -> np.ndarray[Any, Any]:
    """Return the sample's routes for all of its tokens, ``UNKNOWN`` where there are none."""
    assert sample.routes is not None
    known = sample.routes.array
    missing = (len(sample.token_ids) - len(known), *known.shape[1:])
    return np.concatenate([known, np.full(missing, UNKNOWN, known.dtype)])


@dataclass(frozen=True)
class Expected:
    """Results that the trainer must compute for a batch."""

    logprobs: list[list[float]]  # by sample
    gradients: dict[str, np.ndarray[Any, Any]]
    known: int  # tokens x layers with given routes
    tokens: int  # tokens x layers
    differing: int  # known ones for which the routers would have chosen other experts


def expected(model: Any, samples: Sequence[TrainSample], *, temperature: float) -> Expected:
    """Compute log-probs with forced routes, and the gradient of GRPO's loss at ratio 1."""
    routing = Routing(model)
    model.zero_grad()
    found, known, differing, tokens = [], 0, 0, 0
    for sample in samples:
        routing.given = whole(sample)
        values = logprobs(model, sample, temperature)
        mask = torch.tensor(list(sample.loss_mask))
        loss = (
            -(values * torch.tensor(list(sample.advantages)) * mask).sum()
            / mask.sum()
            / len(samples)
        )
        loss.backward()
        found.append(values.tolist())
        is_known = (routing.given != UNKNOWN).all(2)
        differs = (np.sort(routing.chosen(), 2) != np.sort(routing.given, 2)).any(2)
        known, tokens = known + int(is_known.sum()), tokens + is_known.size
        differing += int((differs & is_known).sum())
    gradients = {
        name: parameter.grad.numpy().copy()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return Expected(found, gradients, known, tokens, differing)


def with_gaps(
    samples: Sequence[TrainSample], routes: Sequence[np.ndarray[Any, Any]]
) -> list[TrainSample]:
    """Return samples with routes as engines return them, with gaps.

    All lack the last token. The first has no routes, the second half of them, and the third none
    for the output of a tool.
    """
    made = []
    for number, (sample, array) in enumerate(zip(samples, routes, strict=True)):
        given = array[:-1].copy()
        if number == 1:
            given = given[: len(given) // 2]
        if number == 2:
            given[3:6] = UNKNOWN  # the output of a tool
        made.append(replace(sample, routes=RouteColumn(given[:0] if number == 0 else given)))
    return made


def without_gaps(
    samples: Sequence[TrainSample], routes: Sequence[np.ndarray[Any, Any]]
) -> list[TrainSample]:
    """Return samples with the routes of all tokens."""
    return [
        replace(sample, routes=RouteColumn(array))
        for sample, array in zip(samples, routes, strict=True)
    ]


def completed(model: Any, samples: Sequence[TrainSample]) -> list[TrainSample]:
    """Return samples whose unknown routes are the model's own choice, given the known ones."""
    routing, made = Routing(model), []
    with torch.no_grad():
        for sample in samples:
            routing.given = whole(sample)
            model(torch.tensor([list(sample.token_ids)]))
            is_known = (routing.given != UNKNOWN).all(2, keepdims=True)
            made.append(
                replace(
                    sample, routes=RouteColumn(np.where(is_known, routing.given, routing.chosen()))
                )
            )
    return made
