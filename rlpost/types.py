"""The data types of the pipeline, one per stage, all frozen.

    PromptSource -> Prompt -> Sample -> ScoredSample -> SampleGroup -> TrainSample -> TrainBatch ->
    StepResult

Each stage creates the next type and never modifies the previous one. This module does not import
torch. Per-token values are columns (``rlpost.columns``); the types accept any sequence for them and
convert it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rlpost.columns import FloatColumn, IntColumn, RouteColumn, RunColumn, TokenSetColumn
from rlpost.errors import ConfigError, NotFinite

FinishReason = Literal["stop", "length", "abort"]
MAX_FLOAT32 = 3.4028234663852886e38


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """An image in a sequence: the tokens that stand for it, and the file that holds it.

    Attributes:
        hash: SHA-256 of the file's bytes, in hexadecimal; ``rlpost.images.store`` has the file.
        start: position of its first image token in the sequence, prompt and response together.
        num_tokens: number of its image tokens, which are consecutive.
        grid: its patches: frames (1), rows, columns, as ``image_grid_thw`` of the model's processor.
    """

    hash: str
    start: int
    num_tokens: int
    grid: tuple[int, int, int]

    @property
    def end(self) -> int:
        """Position after its last image token."""
        return self.start + self.num_tokens

    def to_json(self) -> list[object]:
        """Return the span as a JSON value."""
        return [self.hash, self.start, self.num_tokens, list(self.grid)]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> ImageSpan:
        """The inverse of ``to_json``. Raises TypeError or ValueError for malformed input."""
        digest, start, num_tokens, (frames, rows, columns) = value
        return cls(str(digest), int(start), int(num_tokens), (int(frames), int(rows), int(columns)))


def sequence_digest(ids: IntColumn, images: Sequence[ImageSpan], *, size: int) -> hashlib.blake2b:
    """Return the digest of a sequence: its tokens, and the images that some of them stand for.

    Two images of one size have the same tokens, so whatever is kept by tokens is kept by this. The
    caller adds to it what else it is kept by; ``size``: bytes of the digest.
    """
    digest = hashlib.blake2b(ids.tobytes(), digest_size=size)
    if images:
        digest.update(json.dumps([span.to_json() for span in images]).encode())
    return digest


def refuse_images(images: Sequence[ImageSpan], reader: str) -> None:
    """Refuse a sequence with images where ``reader`` gets its text or tokens alone.

    Raises:
        ConfigError: it has images.
    """
    if images:
        raise ConfigError(
            f"a prompt with {len(images)} images, and {reader} reads text alone; leave --multimodal-keys or it out"
        )


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the prompt set.

    ``prompt_id`` numbers all prompts fetched in a run (epoch x size + position), so it identifies
    the group of samples as well.
    """

    prompt_id: int
    text: str
    token_ids: IntColumn
    label: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    images: tuple[ImageSpan, ...] = ()

    def __post_init__(self) -> None:
        _convert(self, token_ids=IntColumn)


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer of an engine.

    Attributes:
        response_ids: the generated tokens, including a stop token.
        rollout_logprobs: the engine's log-prob of each response token, under the temperature-scaled distribution over
            the full vocabulary, or over ``sampling_mask``.
        policy_version: the version of the weights at the end of the response.
        loss_mask: one entry per response token, 0 for tokens that the model did not generate (the output of a tool);
            None if it generated all.
        version_spans: pairs (policy version, number of tokens) in order, which cover the response; empty if
            ``policy_version`` generated all tokens.
        routes: the experts that the engine chose for the tokens of prompt and response, in order; None if not recorded.
            Tokens at the end may be missing: the last token of an answer is never an engine's input. The version that
            routed a token is that of the next token in the response.
        teacher_logprobs: log-prob of each response token under a teacher on a server (--opd-type sglang),
            or None.
        teacher_top_ids: the --opd-top-k most likely tokens at each response token under that teacher, one position
            after the other; None if there is none.
        teacher_top_logprobs: their log-probs.
        sampling_mask: for each response token the ids that top-p and top-k left to sample from
            (--use-rollout-sampling-mask); None if there is none.
        images: the images of prompt and response, in order.
        extra: JSON values that a custom generate function passes to its reward and filter.
        reward: set while other answers of the group are generated or graded; then ``ScoredSample`` has it.

    Raises:
        NotFinite: a log-prob or the reward is NaN or infinite.
    """

    prompt_id: int
    index: int  # within the group
    prompt_ids: IntColumn
    response_ids: IntColumn
    rollout_logprobs: FloatColumn
    text: str
    finish_reason: FinishReason
    policy_version: int
    label: str | None = None
    loss_mask: RunColumn | None = None
    version_spans: tuple[tuple[int, int], ...] = ()
    routes: RouteColumn | None = None
    teacher_logprobs: FloatColumn | None = None
    teacher_top_ids: IntColumn | None = None
    teacher_top_logprobs: FloatColumn | None = None
    sampling_mask: TokenSetColumn | None = None
    images: tuple[ImageSpan, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    reward: float | None = None

    def __post_init__(self) -> None:
        _convert(
            self,
            prompt_ids=IntColumn,
            response_ids=IntColumn,
            rollout_logprobs=FloatColumn,
            loss_mask=RunColumn,
            teacher_logprobs=FloatColumn,
            teacher_top_ids=IntColumn,
            teacher_top_logprobs=FloatColumn,
            sampling_mask=TokenSetColumn,
        )
        length = len(self.response_ids)
        assert length == len(self.rollout_logprobs), (length, len(self.rollout_logprobs))
        assert self.loss_mask is None or length == len(self.loss_mask), (length, self.loss_mask)
        for column in (self.teacher_logprobs, self.sampling_mask):
            assert column is None or length == len(column), (length, len(column))
        assert not self.version_spans or length == sum(count for _, count in self.version_spans), (
            self.version_spans
        )
        assert self.routes is None or len(self.routes) <= len(self.prompt_ids) + length, (
            len(self.routes),
            length,
        )
        _refuse_not_finite(
            self, "rollout_logprobs", "teacher_logprobs", "teacher_top_logprobs", "reward"
        )

    @property
    def mask(self) -> RunColumn:
        """1 for each token of the response that is trained, else 0."""
        return (
            RunColumn([(1, len(self.response_ids))]) if self.loss_mask is None else self.loss_mask
        )

    @property
    def versions(self) -> RunColumn:
        """The policy version of each token of the response."""
        return RunColumn(self.version_spans or [(self.policy_version, len(self.response_ids))])

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that generated a token of it."""
        return min((version for version, _ in self.version_spans), default=self.policy_version)


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """A sample with its reward. Raises NotFinite for a reward that is NaN or infinite.

    ``is_masked``: reward shaping left its answer out of the loss.
    """

    sample: Sample
    reward: float
    is_masked: bool = False

    @property
    def mask(self) -> RunColumn:
        """1 for each token of the response that enters the loss, else 0."""
        if self.is_masked:
            return RunColumn([(0, len(self.sample.response_ids))])
        return self.sample.mask

    def __post_init__(self) -> None:
        _refuse_not_finite(self, "reward")


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """The graded samples of one prompt, ordered by index; those of one answer have one index
    (``rlpost.algorithm.answers``).

    An index is missing if the grading of that answer was lost. A group without samples stands for a
    dropped prompt.
    """

    prompt_id: int
    samples: tuple[ScoredSample, ...]

    @property
    def rewards(self) -> tuple[float, ...]:
        """The reward of each sample."""
        return tuple(scored.reward for scored in self.samples)

    @property
    def masks(self) -> tuple[RunColumn, ...]:
        """The loss mask of each response."""
        return tuple(scored.mask for scored in self.samples)

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(scored.sample.response_ids) for scored in self.samples)

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that generated a token of the group."""
        return min(scored.sample.oldest_version for scored in self.samples)


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A fetched prompt whose group is incomplete, with its answers so far.

    An aborted answer (``finish_reason`` "abort") is resumed; missing samples are started.
    """

    prompt: Prompt
    samples: tuple[Sample, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of the answers so far."""
        return sum(len(sample.response_ids) for sample in self.samples)


@dataclass(frozen=True, slots=True)
class Backlog:
    """All prompts that were fetched but neither trained nor filtered, with finished groups or
    partial answers.

    The counts cover the whole run: fetched = trained + filtered + backlog, at any moment.
    ``newest_id`` is the id of the prompt fetched last; ids rise, so no prompt is fetched twice.
    ``counts`` are those since the last batch was taken, by metric name; ``counts_in_training``
    those of a batch whose training did not complete (see ``RolloutBuffer``).
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
        """Ids of all prompts in the backlog, each once."""
        waiting = (each.prompt.prompt_id for each in self.unfinished)
        return (*(group.prompt_id for group in self.finished), *waiting)

    @property
    def images(self) -> frozenset[str]:
        """Digests of all images in the backlog."""
        finished = (scored.sample.images for group in self.finished for scored in group.samples)
        waiting = (each.prompt.images for each in self.unfinished)
        begun = (sample.images for each in self.unfinished for sample in each.samples)
        spans = itertools.chain.from_iterable((*finished, *waiting, *begun))
        return frozenset(span.hash for span in spans)


@dataclass(frozen=True, slots=True)
class TrainSample:
    """A training sequence: prompt and response, with one advantage for the response or one per
    response token.

    ``token_ids`` has ``prompt_length + response_length`` entries; ``loss_mask`` and
    ``rollout_logprobs`` have ``response_length`` entries. ``routes`` are those of the first tokens,
    see ``Sample``. ``weight`` multiplies the sample's mean over its tokens, and ``count`` is its
    contribution to the number of samples over which the batch is averaged. ``teacher_logprobs`` and
    ``teacher_top_*`` are those of a server, ``sampling_mask`` and ``images`` as in ``Sample``. If
    several samples form one answer, their weights add up to 1 and only the first has a count of 1.

    Raises:
        NotFinite: a log-prob, an advantage or the weight is not finite in float32.
    """

    token_ids: IntColumn
    prompt_length: int
    loss_mask: RunColumn
    rollout_logprobs: FloatColumn
    advantage: float | FloatColumn
    weight: float = 1.0
    count: int = 1
    routes: RouteColumn | None = None
    teacher_logprobs: FloatColumn | None = None
    teacher_top_ids: IntColumn | None = None
    teacher_top_logprobs: FloatColumn | None = None
    sampling_mask: TokenSetColumn | None = None
    images: tuple[ImageSpan, ...] = ()

    def __post_init__(self) -> None:
        _convert(
            self,
            token_ids=IntColumn,
            loss_mask=RunColumn,
            rollout_logprobs=FloatColumn,
            teacher_logprobs=FloatColumn,
            teacher_top_ids=IntColumn,
            teacher_top_logprobs=FloatColumn,
            sampling_mask=TokenSetColumn,
        )
        if not isinstance(self.advantage, int | float):
            _convert(self, advantage=FloatColumn)
        _refuse_not_finite(
            self,
            "rollout_logprobs",
            "advantage",
            "weight",
            "teacher_logprobs",
            "teacher_top_logprobs",
        )

    @property
    def response_length(self) -> int:
        return len(self.token_ids) - self.prompt_length

    @property
    def advantages(self) -> FloatColumn:
        """One advantage per response token."""
        if isinstance(self.advantage, FloatColumn):
            return self.advantage
        return FloatColumn([self.advantage] * self.response_length)


MicroBatch = tuple[TrainSample, ...]


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """One optimizer step for one data-parallel rank.

    Every rank gets the same number of micro-batches. ``num_samples`` and ``num_tokens`` count the
    *global* batch (loss-masked tokens): they are the denominators of the loss and are fixed before
    any forward pass, which is why micro-batching, data parallelism and packing cannot change the
    loss. ``log_prob_groups`` are the micro-batches of passes that only compute log-probs, as
    positions among the rank's samples in order of ``micro_batches``; if empty, these passes use
    ``micro_batches``.
    """

    micro_batches: tuple[MicroBatch, ...]
    num_samples: int
    num_tokens: int
    log_prob_groups: tuple[tuple[int, ...], ...] = ()

    @property
    def samples(self) -> tuple[TrainSample, ...]:
        """The rank's samples in order of ``micro_batches``."""
        return tuple(itertools.chain.from_iterable(self.micro_batches))

    def with_advantages(self, advantages: Sequence[float | FloatColumn]) -> TrainBatch:
        """The same batch with other advantages, one for each of ``samples``."""
        pairs = zip(self.samples, advantages, strict=True)
        changed = iter([replace(sample, advantage=advantage) for sample, advantage in pairs])
        micro_batches = tuple(
            tuple(itertools.islice(changed, len(micro))) for micro in self.micro_batches
        )
        return replace(self, micro_batches=micro_batches)


@dataclass(frozen=True, slots=True)
class StepPlace:
    """Where an optimizer step is in a run; the driver decides it and tells every rank.

    Attributes:
        rollout: number of the rollout, from 1; after its last step the weights are the policy of
            this version.
        step: number of the optimizer step in the rollout, from 1.
        of: optimizer steps of this rollout.
        old_version: version of the old policy once the rollout is trained; see
            ``policy_versions.PolicyVersions.old``.
        updates_reference: whether the policy becomes the reference after the rollout.
    """

    rollout: int
    step: int
    of: int
    old_version: int
    updates_reference: bool = False

    @property
    def is_last(self) -> bool:
        """Whether the rollout is trained after the step."""
        return self.step == self.of


@dataclass(frozen=True, slots=True)
class StepResult:
    """Metrics of one optimizer step: global means, equal on every rank.

    ``own_s`` differs by rank: the seconds of its passes without the reduction of gradients.
    """

    metrics: Mapping[str, float]
    own_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Bucket:
    """Weights that are sent to the engines in one message: Hugging Face names, shapes and dtypes in
    order.

    ``dtypes`` are torch names without the module (``"float32"``); ``stage`` is the pipeline stage
    that sends them.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    stage: int = 0


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """The URL of an engine and its number of GPUs, which is its number of ranks."""

    url: str
    num_gpus: int = 1


def _convert(
    value: object, **columns: type[IntColumn | FloatColumn | RunColumn | TokenSetColumn]
) -> None:
    """Replace sequences in the named fields of a frozen value by columns; None is kept."""
    for name, column in columns.items():
        given = getattr(value, name)
        if given is not None and not isinstance(given, column):
            object.__setattr__(value, name, column.of(given))


def _refuse_not_finite(value: object, *names: str) -> None:
    """Raise NotFinite for the first NaN or infinity in the named fields; None is accepted.

    The trainer computes in float32, where a larger number than MAX_FLOAT32 is infinite.
    """
    for name in names:
        numbers = getattr(value, name)
        if isinstance(numbers, FloatColumn):
            position = numbers.find_not_finite()
            if position is not None:
                word = f"{name}[{position}] = {numbers[position]}"
                raise NotFinite(f"{type(value).__name__}.{word}; it must be finite in float32")
        elif numbers is not None and not is_finite_float32(numbers):
            raise NotFinite(
                f"{type(value).__name__}.{name} = {numbers}; it must be finite in float32"
            )


def is_finite_float32(number: float) -> bool:
    """Whether a number is finite, also in float32."""
    return math.isfinite(number) and abs(number) <= MAX_FLOAT32
