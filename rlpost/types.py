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

    ``loss_mask`` has an entry for each of ``response_ids``, 0 for what the model did not write (the output of a tool);
    None when it wrote all. ``version_spans`` are pairs (policy version, number of tokens) in order, which cover the
    response; none when all of it is of ``policy_version``, the version at its end. ``extra`` holds JSON values that a
    function that wrote the answer left for its reward and filter (``rlpost.compat``).
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
    loss_mask: tuple[int, ...] | None = None
    version_spans: tuple[tuple[int, int], ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        length = len(self.response_ids)
        assert length == len(self.rollout_logprobs), (length, len(self.rollout_logprobs))
        assert self.loss_mask is None or length == len(self.loss_mask), (length, self.loss_mask)
        assert not self.version_spans or length == sum(count for _, count in self.version_spans), self.version_spans

    @property
    def mask(self) -> tuple[int, ...]:
        """1 for each token of the response that is trained, else 0."""
        return (1,) * len(self.response_ids) if self.loss_mask is None else self.loss_mask

    @property
    def oldest_version(self) -> int:
        """The version of the weights that wrote its first token."""
        return min((version for version, _ in self.version_spans), default=self.policy_version)


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """A sample with its reward."""

    sample: Sample
    reward: float


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """The siblings of one prompt that have a reward, in order of their index.

    An index is missing where the grading of that answer was lost; without any sample the prompt was given up.
    """

    prompt_id: int
    samples: tuple[ScoredSample, ...]

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(scored.reward for scored in self.samples)

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(scored.sample.response_ids) for scored in self.samples)

    @property
    def oldest_version(self) -> int:
        """The oldest weights that wrote a token of the group."""
        return min(scored.sample.oldest_version for scored in self.samples)


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A prompt that was fetched and whose group is not complete, with the answers there are so far.

    An answer whose ``finish_reason`` is "abort" was cut off and is gone on with; one that is not there is begun.
    """

    prompt: Prompt
    samples: tuple[Sample, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of the answers so far."""
        return sum(len(sample.response_ids) for sample in self.samples)


@dataclass(frozen=True, slots=True)
class Backlog:
    """Every prompt that was fetched and neither trained nor filtered: its finished group, or how far it got.

    The counts are those of the whole run: fetched = trained + filtered + what is here, at any moment. ``newest_id`` is
    the id of the prompt that was fetched last: ids rise, so none is fetched twice. ``counts`` is what happened since
    the last batch was taken, by metric name; ``counts_in_training`` what belongs to a batch that is here because its
    training did not end (see ``RolloutBuffer``).
    """

    finished: tuple[SampleGroup, ...] = ()
    unfinished: tuple[Unfinished, ...] = ()
    num_fetched: int = 0
    num_trained: int = 0
    num_filtered: int = 0
    newest_id: int = -1
    counts: Mapping[str, float] = field(default_factory=dict)
    counts_in_training: Mapping[str, float] | None = None

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Of all prompts in it, each once."""
        waiting = (each.prompt.prompt_id for each in self.unfinished)
        return (*(group.prompt_id for group in self.finished), *waiting)


@dataclass(frozen=True, slots=True)
class TrainSample:
    """A sequence to train on: prompt and response with one advantage for the whole response, or one a token of it.

    ``token_ids`` has ``prompt_length + response_length`` entries; ``loss_mask`` and ``rollout_logprobs`` have
    ``response_length`` entries. ``weight`` multiplies the sample's mean over its tokens, and ``count`` is what it adds
    to the samples that the batch is averaged over: of several samples that are one answer together, the weights add up
    to 1 and the first alone counts.
    """

    token_ids: tuple[int, ...]
    prompt_length: int
    loss_mask: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    advantage: float | tuple[float, ...]
    weight: float = 1.0
    count: int = 1

    @property
    def response_length(self) -> int:
        return len(self.token_ids) - self.prompt_length

    @property
    def advantages(self) -> tuple[float, ...]:
        """One for each token of the response."""
        return self.advantage if isinstance(self.advantage, tuple) else (self.advantage,) * self.response_length


MicroBatch = tuple[TrainSample, ...]


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """One optimizer step for one data-parallel rank.

    Every rank gets the same number of micro-batches. ``num_samples`` and ``num_tokens`` count the *global* batch
    (loss-masked tokens): they are the denominators of the loss and are fixed before any forward pass, which is why
    micro-batching, data parallelism and packing cannot change the loss. ``log_prob_groups`` are the micro-batches of
    passes that only compute log-probs, as positions among the rank's samples in order of ``micro_batches``; when there
    are none these passes take ``micro_batches``.
    """

    micro_batches: tuple[MicroBatch, ...]
    num_samples: int
    num_tokens: int
    log_prob_groups: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step reports: global means, equal on every rank."""

    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some weights that travel to the engines in one message: Hugging Face names, shapes and dtypes in order.

    ``dtypes`` are torch names without the module (``"float32"``); ``stage`` is the pipeline stage that sends them.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    stage: int = 0


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where an engine answers and how many GPUs, and so ranks, it has."""

    url: str
    num_gpus: int = 1
