"""A fake engine that records every token it samples, and a check of trajectories against it.

Each token has a unique log-prob, so a trained token identifies the request that sampled it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlpost.columns import FloatColumn, IntColumn, RouteColumn
from rlpost.engines.answer import Answer
from rlpost.engines.connection import Halted
from rlpost.engines.routes import RouteFormat
from rlpost.extensions.agents.chat_template import ChatTemplate
from rlpost.extensions.agents.trajectory import NO_VERSION, Trajectory

UNIT = 1 / 64  # between log-probs: exact in float32 up to 2**18 tokens
ROUTES = RouteFormat(layers=(0, 1), num_layers=2, num_experts=8, topk=2)


@dataclass(frozen=True)
class SampledToken:
    """A sampled token, the tokens before it, and the weight version."""

    token_id: int
    before: bytes  # the ids of all tokens before it
    version: int


@dataclass
class SampledTokens:
    """A fake ``Connection`` that answers requests itself.

    ``write`` returns the text of an answer without its end-of-turn token; ``stops`` are the tokens
    that may end a turn.
    """

    template: ChatTemplate
    write: Callable[[], str]
    stops: Sequence[str]
    draw: random.Random
    abort_share: float = 0.0  # fraction of answers that are aborted
    split_share: float = 0.1  # fraction of answers during which the weights change
    routes: RouteFormat | None = None
    images: None = None
    halted: bool = False
    version: int = 1
    num_sampled: int = 0
    tokens: dict[float, SampledToken] = field(default_factory=dict)
    inputs: list[bytes] = field(default_factory=list)
    _continued: dict[bytes, tuple[list[int], list[int]]] = field(default_factory=dict)
    """Input ids -> (tokens of an aborted turn so far, its remaining tokens)."""

    async def generate(
        self,
        what: str,
        input_ids: Sequence[int],
        params: Mapping[str, Any],
        *,
        fields: Mapping[str, object] | None = None,
        **where: object,
    ) -> Answer:
        """Same interface as ``Connection.generate``."""
        if self.halted:
            raise Halted
        read = IntColumn.of(input_ids).tobytes()
        earlier, planned = self._continued.pop(read, ([], []))
        if not planned:
            self.inputs.append(read)
            planned = self._spelled(self.write()) + self._stop_token()
        ids, reason = self._ended(planned, params)
        if len(ids) > 1 and self.draw.random() < self.abort_share:
            count = self.draw.randrange(len(ids))
            read_then = read + IntColumn(ids[:count]).tobytes()
            self._continued[read_then] = ([*earlier, *ids[:count]], planned[count:])
            ids, reason = ids[:count], {"type": "abort"}
        versions = self._versions(len(ids), is_aborted=reason["type"] == "abort")
        logprobs = self._remember(read, ids, versions)
        self._forget_after_spanning_stop([*earlier, *ids], len(earlier), logprobs, params["stop"])
        text = self._text(ids, reason)
        return Answer(
            IntColumn(ids),
            FloatColumn(logprobs),
            text,
            reason,
            tuple(versions),
            {},
            self._routes(read, ids, fields),
        )

    def _spelled(self, text: str) -> list[int]:
        """Tokenise in pieces, so that the ids differ from those of the whole text."""
        ids: list[int] = []
        while text:
            count = self.draw.choice([1, 2, 3, 5, 8, 40, 200])
            ids += self.template.encode(text[:count])
            text = text[count:]
        return ids

    def _stop_token(self) -> list[int]:
        return list(self.template.encode(self.draw.choice(self.stops)))

    def _ended(self, planned: list[int], params: Mapping[str, Any]) -> tuple[list[int], Any]:
        """Truncate at the first stop string or at the limit."""
        limit = params["max_new_tokens"]
        for count in range(1, min(limit, len(planned)) + 1) if params["stop"] else ():
            text = self.template.decode(planned[:count])
            matched = next((stop for stop in params["stop"] if stop in text), None)
            if matched is not None:
                return planned[:count], {"type": "stop", "matched": matched}
        if len(planned) > limit:
            return planned[:limit], {"type": "length"}
        return planned, {"type": "stop", "matched": planned[-1]}

    def _text(self, ids: list[int], reason: Mapping[str, Any]) -> str:
        matched = reason.get("matched")
        if isinstance(matched, int):
            return self.template.decode(ids[:-1])
        text = self.template.decode(ids)
        return text[: text.rfind(matched)] if matched else text

    def _versions(self, length: int, *, is_aborted: bool) -> list[tuple[int, int]]:
        """Return (version, length) spans; versions change at aborts, sometimes within an answer."""
        first = (self.version, length)
        spans = [first]
        if length > 1 and self.draw.random() < self.split_share:
            count = self.draw.randrange(1, length)
            self.version += 1
            spans = [(first[0], count), (self.version, length - count)]
        self.version += is_aborted
        return spans if length else []

    def _remember(
        self, read: bytes, ids: list[int], versions: list[tuple[int, int]]
    ) -> list[float]:
        of_token = [version for version, count in versions for _ in range(count)]
        logprobs: list[float] = []
        for place, (token_id, version) in enumerate(zip(ids, of_token, strict=True)):
            self.num_sampled += 1
            logprob = -UNIT * self.num_sampled
            before = read + IntColumn(ids[:place]).tobytes()
            self.tokens[logprob] = SampledToken(token_id, before, version)
            logprobs.append(logprob)
        return logprobs

    def _forget_after_spanning_stop(
        self, turn: list[int], num_earlier: int, logprobs: list[float], stops: Sequence[str] | None
    ) -> None:
        """Forget the tokens that the builder drops: those after a stop string split by an abort."""
        for count in range(1, len(turn)) if stops and num_earlier else ():
            if any(stop in self.template.decode(turn[:count]) for stop in stops):
                for logprob in logprobs[max(0, count - num_earlier) :]:
                    del self.tokens[logprob]
                return

    def _routes(
        self, read: bytes, ids: list[int], fields: Mapping[str, Any] | None
    ) -> RouteColumn | None:
        if self.routes is None or not fields or not ids:
            return None
        context = np.concatenate([np.frombuffer(read, np.int32), np.array(ids[:-1], np.int32)])
        return routes_of_ids(context)[fields["routed_experts_start_len"] :]


def routes_of_ids(ids: Any) -> RouteColumn:
    """Routes that depend only on the token."""
    first = (np.asarray(ids) % 7).astype(np.uint8)
    pairs = np.stack([first, first + 1], axis=-1)
    return RouteColumn(np.stack([pairs, pairs[:, ::-1]], axis=1))


def check(trajectories: Sequence[Trajectory], engine: SampledTokens) -> None:
    """Assert the invariants of ``rlpost.extensions.agents.trajectory`` for one episode."""
    trained: list[float] = []
    for trajectory in trajectories:
        ids = trajectory.token_ids.tobytes()
        sampled, masked = trajectory.sampled.array, trajectory.loss_mask.array
        assert (masked <= sampled).all()
        for place in np.flatnonzero(sampled):
            logprob = trajectory.logprobs[int(place)]
            token = engine.tokens[logprob]
            assert token.token_id == trajectory.token_ids[int(place)]
            assert token.version == trajectory.versions[int(place)]
            assert token.before == ids[: 4 * place], "the engine had read something else"
            if masked[place]:
                trained.append(logprob)
        others = np.flatnonzero(sampled == 0)
        assert not trajectory.logprobs.array[others].any()
        assert (trajectory.versions.array[others] == NO_VERSION).all()
        _check_turns(trajectory)
        _check_routes(trajectory, engine)
        _check_sample(trajectory)
    assert sorted(trained) == sorted(engine.tokens), "a sampled token is not trained exactly once"


def _check_turns(trajectory: Trajectory) -> None:
    """Assert that the turns cover exactly the sampled tokens."""
    covered = np.zeros(len(trajectory.token_ids), dtype=np.int8)
    trained = covered.copy()
    for turn in trajectory.turns:
        covered[turn.start : turn.end] += 1
        trained[turn.start : turn.end] += turn.is_trained
    assert (covered == trajectory.sampled.array).all()
    assert (trained == trajectory.loss_mask.array).all()


def _check_routes(trajectory: Trajectory, engine: SampledTokens) -> None:
    if engine.routes is None:
        assert trajectory.routes is None
        return
    assert trajectory.routes is not None
    # the last token has no routes, unless a stop string split by an abort has truncated the turn
    assert len(trajectory.token_ids) - len(trajectory.routes) in (0, 1)
    expected = routes_of_ids(trajectory.token_ids.array[: len(trajectory.routes)]).array
    known = trajectory.routes.known
    assert (trajectory.routes.array[known] == expected[known]).all()


def _check_sample(trajectory: Trajectory) -> None:
    """Assert that the sample has the same tokens, mask, versions and log-probs."""
    sample = trajectory.to_sample(3, 1)
    assert sample.prompt_ids + sample.response_ids == trajectory.token_ids
    assert sample.mask.total() == trajectory.loss_mask.total()
    assert sample.mask[0] == 1
    start = len(sample.prompt_ids)
    of_token = [
        version
        for version, count in sample.version_spans
        or ((sample.policy_version, len(sample.response_ids)),)
        for _ in range(count)
    ]
    for place in np.flatnonzero(sample.mask.array):
        assert of_token[place] == trajectory.versions[int(start + place)]
        assert sample.rollout_logprobs[int(place)] == trajectory.logprobs[int(start + place)]
