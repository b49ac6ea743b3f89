"""Runs harnesses, which are opaque programs that send requests to the gateway.

Input: a response builder (its connection and sampling parameters), a prompt. Output: one sample for
each trajectory that the gateway recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlpost.agents.environments.calls import call, call_if_there, closed
from rlpost.agents.environments.plain import finite
from rlpost.agents.environments.protocol import Episode, Harness, Outcome
from rlpost.agents.environments.results import EpisodeResult, TurnResult
from rlpost.agents.gateway import EpisodeLimits, Gateway
from rlpost.agents.trajectory import Trajectory, to_samples
from rlpost.errors import GradingLost
from rlpost.rollout.connection import Halted
from rlpost.rollout.response_builder import ResponseBuilder
from rlpost.types import Prompt


@dataclass(frozen=True)
class HarnessRunner:
    """Runs the episodes of one harness, whose object is shared by all episodes.

    The gateway refuses requests after ``max_requests``; the harness is given ``max_turns``.
    """

    word: str
    harness: Harness
    gateway: Gateway
    max_turns: int
    max_requests: int | None = None

    async def start(self) -> None:
        """Call the harness's ``start``."""
        await call_if_there(self.harness, "start")

    async def close(self) -> None:
        """Call the harness's ``close``."""
        await closed(self.harness, self.word)

    async def run(self, builder: ResponseBuilder, prompt: Prompt) -> EpisodeResult:
        """Run one episode; the caller cancels it once generation is halted.

        Raises:
            Halted: generation is suspended.
            RolloutError: a request to an engine failed permanently.
            GradingLost: the harness sent no request to the model.
            ConfigError: the harness returned no reward.
            Exception: whatever the harness raises.
        """
        limits = EpisodeLimits(max_requests=self.max_requests)
        opened = await self.gateway.open(
            prompt,
            builder.sampling,
            connection=builder.connection,
            index=builder.index,
            limits=limits,
        )
        async with opened as episode:
            asked = Episode(
                base_url=episode.base_url,
                api_key=episode.api_key,
                model=episode.model,
                prompt=prompt,
                index=builder.index,
                sampling={
                    "temperature": builder.sampling.temperature,
                    "top_p": builder.sampling.top_p,
                    "max_tokens": builder.sampling.max_new_tokens,
                },
                max_turns=self.max_turns,
            )
            try:
                given = await call(self.harness.run, asked)
            except Exception as error:
                if episode.halted:
                    raise Halted from error
                if episode.error is not None:
                    raise episode.error from error
                raise
            if episode.halted:
                raise Halted
            if episode.error is not None:
                raise episode.error
            found = episode.trajectories()
        if not found:
            raise GradingLost(f"--env {self.word}: run ended without a request to the model")
        outcome = given if isinstance(given, Outcome) else Outcome(finite(self.word, given, "run"))
        samples = to_samples(found, prompt.prompt_id, builder.index, label=prompt.label)
        return EpisodeResult(
            tuple(samples),
            turns_of_trajectories(found, outcome.turn_rewards, builder),
            finite(self.word, outcome.reward, "the reward of run"),
            info=outcome.info,
        )


def turns_of_trajectories(
    trajectories: Sequence[Trajectory], rewards: Sequence[float], builder: ResponseBuilder
) -> tuple[TurnResult, ...]:
    """Return the trained turns of an episode in the order of their requests.

    ``rewards`` belong to requests in that order. The ``n`` answers to one request share its reward.
    """
    found: list[tuple[int, int, TurnResult]] = []
    numbers = sorted(
        {turn.request for each in trajectories for turn in each.turns if turn.is_trained}
    )
    for position, each in enumerate(trajectories):
        first = next(turn for turn in each.turns if turn.is_trained)
        ends = [turn.start for turn in each.turns[1:]] + [len(each.token_ids)]
        for turn, until in zip(each.turns, ends, strict=True):
            if not turn.is_trained:
                continue
            place = numbers.index(turn.request)
            span = each.response_range(turn)
            result = TurnResult(
                sample=position,
                start=span.start,
                end=span.stop,
                text=turn.text,
                reward=rewards[place] if place < len(rewards) else 0.0,
                said=builder.decode(each.token_ids[turn.end : until]),
                before=builder.decode(each.token_ids[: turn.start]) if turn is first else "",
                seconds=turn.ended_at - turn.began_at,
            )
            found.append((turn.request, position, result))
    return tuple(result for _, _, result in sorted(found, key=lambda entry: entry[:2]))
