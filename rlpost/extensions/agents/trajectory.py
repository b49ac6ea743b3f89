"""A trajectory: the token sequence of one line of a conversation, and its conversion to samples.

Input: what the gateway recorded in an episode. Output: ``Sample``s for grading and training.

An episode has one trajectory if its harness only appends messages. Each edit of history, branch,
parallel request or further choice (``n`` > 1) adds one. Trajectories of an episode may begin with
the same tokens. Invariants:

- the token at every position is the one that an engine read or sampled there, after exactly the
  tokens before it;
- ``sampled`` is 1 for exactly those tokens that engines sampled;
- ``loss_mask`` is at most ``sampled``, and every token that was sampled in an episode has the loss
  mask 1 in exactly one trajectory. A shared beginning is trained once: all trajectories of an
  episode have its reward, so further copies would only weight the tokens before a branch by the
  number of branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlpost.columns import FloatColumn, IntColumn, RouteColumn, RunColumn, TokenSetColumn
from rlpost.types import FinishReason, ImageSpan, Sample

NO_VERSION = -1
"""Entry of ``Trajectory.versions`` for a token that no engine sampled."""


@dataclass(frozen=True, slots=True)
class AnsweredTurn:
    """One answer of the policy inside a trajectory.

    Attributes:
        start, end: its tokens, as positions in ``Trajectory.token_ids``.
        request: number of the request within the episode, from 0. The ``n`` answers to one request
            have the same number and are in different trajectories.
        text: the answer as the model wrote it, with reasoning and tool calls, without stop token.
        is_trained: False if another trajectory of the episode trains these tokens.
        began_at, ended_at: Unix time in seconds.
    """

    start: int
    end: int
    request: int
    text: str
    finish_reason: FinishReason
    is_trained: bool
    began_at: float
    ended_at: float


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One line of a conversation as tokens; it ends with the last sampled token.

    All columns have one entry per token, from the first token of the prompt on.

    Attributes:
        sampled: 1 for each token that an engine sampled.
        loss_mask: 1 for each token that is trained here.
        logprobs: the engine's log-prob of each sampled token, 0 for others.
        versions: policy version that sampled the token, ``NO_VERSION`` for others.
        routes: experts of the first tokens, see ``rlpost.types.Sample``; None if not recorded.
        sampling_mask: the ids that each token was sampled from; None if not recorded.
        images: the images in it, in order.
        turns: the answers in it, in order; at least one is trained here.
        cause: why it did not extend another trajectory, for the record of the episode.
        has_tools: its first request offered tools.
        has_answers: its first request held answers of the assistant.
    """

    token_ids: IntColumn
    sampled: RunColumn
    loss_mask: RunColumn
    logprobs: FloatColumn
    versions: RunColumn
    turns: tuple[AnsweredTurn, ...]
    cause: str = ""
    has_tools: bool = False
    has_answers: bool = False
    routes: RouteColumn | None = None
    sampling_mask: TokenSetColumn | None = None
    images: tuple[ImageSpan, ...] = ()

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        columns = (self.sampled, self.loss_mask, self.logprobs, self.versions)
        assert all(len(column) == length for column in columns), [len(each) for each in columns]
        assert any(turn.is_trained for turn in self.turns)

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first trained one; they become the prompt of the sample."""
        return next(turn.start for turn in self.turns if turn.is_trained)

    @property
    def finish_reason(self) -> FinishReason:
        """How the last turn ended."""
        return self.turns[-1].finish_reason

    def response_range(self, turn: AnsweredTurn) -> range:
        """Return the positions of a trained turn in ``response_ids`` of the sample."""
        assert turn.is_trained, turn
        return range(turn.start - self.prompt_length, turn.end - self.prompt_length)

    def to_sample(self, prompt_id: int, index: int, *, label: str | None = None) -> Sample:
        """Return the trajectory as a sample of a prompt's group.

        Everything before the first trained token is its prompt. Tokens of the harness inside the
        response count to the version that sampled the last token before them, as outputs of tools
        do in single answers.
        """
        start = self.prompt_length
        spans = _version_spans(self.versions[start:])
        trained = self.loss_mask[start:]
        is_masked = any(value == 0 for value, _ in trained.runs)
        return Sample(
            prompt_id=prompt_id,
            index=index,
            prompt_ids=self.token_ids[:start],
            response_ids=self.token_ids[start:],
            rollout_logprobs=self.logprobs[start:],
            text="\n".join(turn.text for turn in self.turns if turn.is_trained),
            finish_reason=self.finish_reason,
            policy_version=spans[-1][0],
            label=label,
            loss_mask=trained if is_masked else None,
            version_spans=spans if len(spans) > 1 else (),
            routes=self.routes,
            sampling_mask=None if self.sampling_mask is None else self.sampling_mask[start:],
            images=self.images,
        )


def is_side_request(trajectory: Trajectory) -> bool:
    """Whether a trajectory looks like a request beside the task: a title, a probe, a classifier.

    It is one answer to a request without tools that holds no answer of the assistant. (A summary of
    the conversation holds some, and the task depends on it.)
    """
    is_single = len(trajectory.turns) == 1
    return is_single and not trajectory.has_tools and not trajectory.has_answers


def split_side_requests(
    trajectories: Sequence[Trajectory],
) -> tuple[tuple[Trajectory, ...], tuple[Trajectory, ...]]:
    """Return the trajectories of the task, and those of requests beside it.

    Requests are beside the task only in an episode with another trajectory that has tools.
    """
    if not any(each.has_tools for each in trajectories):
        return tuple(trajectories), ()
    side = tuple(each for each in trajectories if is_side_request(each))
    return tuple(each for each in trajectories if not is_side_request(each)), side


def to_samples(
    trajectories: Sequence[Trajectory], prompt_id: int, index: int, *, label: str | None = None
) -> list[Sample]:
    """Return the trajectories of one episode as the samples of one answer.

    All have the same ``index``, as several samples of a custom generate function: the trainer
    weights them as parts of one answer (``rlpost.types.TrainSample.weight``).
    """
    return [each.to_sample(prompt_id, index, label=label) for each in trajectories]


def _version_spans(versions: RunColumn) -> tuple[tuple[int, int], ...]:
    """Return (version, count) with the tokens of the harness added to the span before them."""
    spans: list[tuple[int, int]] = []
    for version, count in versions.runs:
        if spans and version in (NO_VERSION, spans[-1][0]):
            spans[-1] = (spans[-1][0], spans[-1][1] + count)
        else:
            spans.append((version, count))
    return tuple(spans)
