"""The nouns of the data flow, one a stage, all frozen.

    PromptSource -> Prompt -> Sample -> ScoredSample -> SampleGroup -> TrainSample -> TrainBatch -> StepResult

A stage makes the next noun and never fills blanks in the last. Nothing here imports torch: the nouns travel between
processes as plain Python values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question of the prompt set.

    ``prompt_id`` counts every prompt ever fetched in a run (epoch x size + position), so that it names the group of
    samples made from it as well.
    """

    prompt_id: int
    text: str
    token_ids: tuple[int, ...]
    label: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer of an engine.

    ``response_ids`` and ``rollout_logprobs`` have the same length; the log-probs are the engine's own, of the
    temperature-scaled distribution over the full vocabulary. A stop token is part of ``response_ids``.
    """

    prompt_id: int
    index: int  # within the group
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    text: str
    finish_reason: FinishReason
    policy_version: int
    label: str | None = None

    def __post_init__(self) -> None:
        assert len(self.response_ids) == len(self.rollout_logprobs), (
            len(self.response_ids),
            len(self.rollout_logprobs),
        )


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """A sample with its reward."""

    sample: Sample
    reward: float


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """All siblings of one prompt, in order of their index."""

    prompt_id: int
    samples: tuple[ScoredSample, ...]

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(scored.reward for scored in self.samples)


@dataclass(frozen=True, slots=True)
class TrainSample:
    """A sequence to train on: prompt and response with one advantage for the whole response.

    ``token_ids`` has ``prompt_length + response_length`` entries; ``loss_mask`` and ``rollout_logprobs`` have
    ``response_length`` entries.
    """

    token_ids: tuple[int, ...]
    prompt_length: int
    loss_mask: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    advantage: float

    @property
    def response_length(self) -> int:
        return len(self.token_ids) - self.prompt_length


MicroBatch = tuple[TrainSample, ...]


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """One optimizer step for one data-parallel rank.

    Every rank gets the same number of micro-batches. ``num_samples`` and ``num_tokens`` count the *global* batch
    (loss-masked tokens): they are the denominators of the loss and are fixed before any forward pass, which is why
    micro-batching, data parallelism and packing cannot change the loss.
    """

    micro_batches: tuple[MicroBatch, ...]
    num_samples: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step reports: global means, equal on every rank."""

    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some weights that travel to the engines in one message: Hugging Face names, shapes and dtypes in order.

    ``dtypes`` are torch names without the module (``"float32"``).
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where an engine answers, which GPUs it owns, and the group name the trainer reaches it under."""

    url: str
    num_gpus: int = 1
