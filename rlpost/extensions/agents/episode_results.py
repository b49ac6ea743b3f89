"""The result of an episode: its samples with their rewards, and its record.

Input: samples, turns, a reward. Output: the same samples with the values that reward, loss and
metrics read (``Sample.extra``), and one JSON object for the trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rlpost.algorithm.turns import TurnReward, turn_record
from rlpost.rollout.episode_metrics import ENV, NUM_TURNS, SIDE_TOKENS
from rlpost.tasks.reward.given import REWARD
from rlpost.types import Sample


@dataclass(frozen=True, slots=True)
class TurnResult:
    """A turn of the model, and the text that followed it.

    ``before`` is the text between the prompt and the first turn of a sample. ``images`` are the
    digests of the images in ``before`` and ``said``, where each is ``<image>``.
    ``cause`` says of the first turn of a sample why it did not continue an earlier sample.
    ``sample`` is the position of its sample in the episode, ``start`` and ``end`` its tokens in
    that sample's response. ``seconds`` are those of the model, ``env_seconds`` those of the
    environment.
    """

    sample: int
    start: int
    end: int
    text: str
    reward: float = 0.0
    said: str = ""
    tool: str | None = None
    seconds: float = 0.0
    env_seconds: float = 0.0
    before: str = ""
    cause: str = ""
    images: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Return the turn as an entry of a record; empty values are left out."""
        record: dict[str, object] = {
            "text": self.text,
            "tokens": self.end - self.start,
            "reward": self.reward,
            "seconds": round(self.seconds, 3),
            "env_seconds": round(self.env_seconds, 3),
        }
        optional = {
            "before": self.before,
            "said": self.said,
            "tool": self.tool,
            "branch": self.sample,
            "cause": self.cause,
            "images": list(self.images),
        }
        return record | {key: value for key, value in optional.items() if value}


@dataclass(frozen=True, slots=True)
class SideRequest:
    """An answer beside the task that is not trained; ``tokens`` were sampled."""

    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """An episode that ran to its end.

    Attributes:
        samples: its trajectories, without rewards.
        turns: in the order of their requests.
        score: the reward of the whole episode, beside those of its turns.
        info: further JSON values for the record.
        limit: the limit that ended the episode before its environment scored it.
        side_requests: answers beside the task, which are in no sample.
    """

    samples: tuple[Sample, ...]
    turns: tuple[TurnResult, ...]
    score: float = 0.0
    info: Mapping[str, object] = field(default_factory=dict)
    limit: str | None = None
    side_requests: tuple[SideRequest, ...] = ()

    @property
    def reward(self) -> float:
        """The reward of the episode with those of its turns."""
        return self.score + sum(turn.reward for turn in self.turns)


def rewarded(result: EpisodeResult, label: str, *, by_turn: bool) -> tuple[Sample, ...]:
    """Return the samples with their rewards; the last one has the turn that ended the episode.

    All samples of an episode have the reward of the episode. ``by_turn``: they also have the
    rewards of their turns; that of the whole episode counts for the last turn.
    """
    extra: dict[str, object] = {
        ENV: label,
        REWARD: result.reward,
        NUM_TURNS: len(result.turns),
    }
    if result.side_requests:
        extra[SIDE_TOKENS] = sum(each.tokens for each in result.side_requests)
    samples = []
    for position, sample in enumerate(result.samples):
        record: dict[str, object] = dict(extra)
        if by_turn:
            last = len(result.turns) - 1
            record |= turn_record(
                [
                    TurnReward(
                        turn.start,
                        turn.end,
                        turn.reward + (result.score if number == last else 0.0),
                        number,
                    )
                    for number, turn in enumerate(result.turns)
                    if turn.sample == position
                ]
            )
        samples.append(replace(sample, extra={**sample.extra, **record}))
    last_turns = {turn.sample: number for number, turn in enumerate(result.turns)}
    in_order = sorted(range(len(samples)), key=lambda position: last_turns.get(position, -1))
    return tuple(samples[position] for position in in_order)


def record_of(result: EpisodeResult) -> dict[str, object]:
    """Return the record of an episode that ran to its end."""
    versions: dict[int, int] = {}
    for sample in result.samples:
        for version, count in sample.versions.runs:
            versions[version] = versions.get(version, 0) + count
    record: dict[str, object] = {
        "outcome": "scored",
        "reward": result.reward,
        "finish": [sample.finish_reason for sample in result.samples],
        "tokens": sum(len(sample.response_ids) for sample in result.samples),
        "trained_tokens": sum(sample.mask.total() for sample in result.samples),
        "versions": sorted(versions.items()),
        "turns": [turn.to_json() for turn in result.turns],
    }
    if result.limit is not None:
        record["limit"] = result.limit
    if result.side_requests:
        record["side_requests"] = [
            {"text": each.text, "tokens": each.tokens} for each in result.side_requests
        ]
    return record | ({"info": dict(result.info)} if result.info else {})
