"""Runs harnesses, which are opaque programs that send requests to the gateway.

Input: a response builder (its connection and sampling parameters), a prompt. Output: one sample for
each trajectory that the gateway recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlpost.durable.daemon_threads import in_daemon
from rlpost.engines.connection import Halted
from rlpost.errors import ConfigError, DataError, GradingLost
from rlpost.extensions.agents.environments.calls import call, call_if_there, close
from rlpost.extensions.agents.environments.plain import finite
from rlpost.extensions.agents.environments.protocol import Episode, Harness, Outcome
from rlpost.extensions.agents.environments.resumption import Resumption
from rlpost.extensions.agents.episode_results import EpisodeResult, SideRequest, TurnResult
from rlpost.extensions.agents.gateway import EpisodeLimits, Gateway, Limit
from rlpost.extensions.agents.trajectory import Trajectory, split_side_requests, to_samples
from rlpost.rollout.response_builder import ResponseBuilder
from rlpost.types import Prompt, Sample


@dataclass(frozen=True)
class HarnessRunner:
    """Runs the episodes of one harness, whose object is shared by all episodes.

    The gateway refuses requests after ``max_requests``; the harness is given ``max_turns``. An
    episode that raises after a limit refused a request has the reward ``limit_reward``.

    Requests beside the task are left out of training unless ``trains_side_requests``, or the
    harness rewards completions by turn and so says itself what each is worth. ``reads_prompts``: it
    gets the images of prompts.
    """

    word: str
    harness: Harness
    gateway: Gateway
    max_turns: int
    max_requests: int | None = None
    limit_reward: float = 0.0
    trains_side_requests: bool = True
    resumption: Resumption = "begun again"
    reads_prompts: bool = True

    async def start(self) -> None:
        """Call the harness's ``start``."""
        await call_if_there(self.harness, "start")

    async def close(self) -> None:
        """Call the harness's ``close``."""
        await close(self.harness, self.word)

    async def run(self, builder: ResponseBuilder, prompt: Prompt) -> EpisodeResult:
        """Run one episode; the caller cancels it once generation is halted.

        Raises:
            Halted: generation is suspended.
            RolloutError: a request to an engine failed permanently.
            GradingLost: the harness sent no request to the model.
            ConfigError: the harness returned no reward, or rewards of turns that no answer has.
            Exception: whatever the harness raises.
        """
        limits = EpisodeLimits(max_requests=self.max_requests)
        opened = await self.gateway.open(
            prompt,
            builder.sampling,
            connection=builder.connection,
            index=builder.index,
            limits=limits,
            log=builder.log,
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
                images=await self._images(builder, prompt),
            )
            limit: Limit | None = None
            try:
                return_value = await call(self.harness.run, asked)
            except Exception as error:
                if episode.halted:
                    raise Halted from error
                if episode.error is not None:
                    raise episode.error from error
                limit = episode.limit_reached
                if limit is None or not episode.trajectories():
                    raise
                # Clients raise when a request is refused. The policy caused it, by a loop or long
                # answers, so the episode is scored.
                return_value = Outcome(self.limit_reward, info={"error": f"{error}"[:2000]})
            if episode.halted:
                raise Halted
            if episode.error is not None:
                raise episode.error
            trajectories = episode.trajectories()
        if not trajectories:
            raise GradingLost(f"--env {self.word}: run ended without a request to the model")
        outcome = (
            return_value
            if isinstance(return_value, Outcome)
            else Outcome(finite(self.word, return_value, "run"))
        )
        rewards = self._turn_rewards(outcome, trajectories)
        side: tuple[Trajectory, ...] = ()
        if not self.trains_side_requests and not rewards:
            trajectories, side = split_side_requests(trajectories)
        samples = to_samples(trajectories, prompt.prompt_id, builder.index, label=prompt.label)
        if limit is not None:
            samples = _truncated(samples, trajectories)
        return EpisodeResult(
            tuple(samples),
            turns_of_trajectories(trajectories, rewards, builder),
            finite(self.word, outcome.reward, "the reward of run"),
            info=outcome.info,
            limit=limit,
            side_requests=tuple(
                SideRequest(each.turns[0].text, each.loss_mask.total()) for each in side
            ),
        )

    async def _images(self, builder: ResponseBuilder, prompt: Prompt) -> tuple[bytes, ...]:
        """Return the files of a prompt's images. Raises DataError if the harness would ignore them."""
        if not prompt.images:
            return ()
        if not self.reads_prompts:
            raise DataError(
                f"prompt {prompt.prompt_id} has images, and --env {self.word} takes its tasks from its own "
                "data; leave images out of the prompts"
            )
        images = builder.connection.images
        assert images is not None, "a prompt with images for a model that reads text"
        store = images.store
        return await in_daemon(lambda: tuple(store.read(span.hash) for span in prompt.images))

    def _turn_rewards(self, outcome: Outcome, trajectories: Sequence[Trajectory]) -> list[float]:
        """Return the rewards of turns as finite numbers, at most one for each answered request.

        Raises ConfigError.
        """
        rewards = [
            finite(self.word, reward, f"turn_rewards[{number}] of run")
            for number, reward in enumerate(outcome.turn_rewards)
        ]
        num_requests = len(_request_numbers(trajectories))
        if len(rewards) > num_requests:
            raise ConfigError(
                f"--env {self.word}: run returned {len(rewards)} turn_rewards for {num_requests} "
                "answered requests to the model; return one for each answer at most"
            )
        return rewards


def _truncated(samples: Sequence[Sample], trajectories: Sequence[Trajectory]) -> list[Sample]:
    """Mark the sample with the last answer of an episode as ended by a limit."""
    last = max(_request_numbers(trajectories))
    ends = [trajectory.turns[-1].request for trajectory in trajectories]
    return [
        replace(sample, finish_reason="length") if end == last else sample
        for sample, end in zip(samples, ends, strict=True)
    ]


def _request_numbers(trajectories: Sequence[Trajectory]) -> list[int]:
    """Return the numbers of the requests that were answered, in order."""
    turns = [turn for each in trajectories for turn in each.turns if turn.is_trained]
    return sorted({turn.request for turn in turns})


def turns_of_trajectories(
    trajectories: Sequence[Trajectory], rewards: Sequence[float], builder: ResponseBuilder
) -> tuple[TurnResult, ...]:
    """Return the trained turns of an episode in the order of their requests.

    ``rewards`` belong to requests in that order. The ``n`` answers to one request share its reward.
    """
    turn_results: list[tuple[int, int, TurnResult]] = []
    numbers = _request_numbers(trajectories)
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
                cause=each.cause if turn is first and position else "",
                seconds=turn.ended_at - turn.began_at,
            )
            turn_results.append((turn.request, position, result))
    return tuple(result for _, _, result in sorted(turn_results, key=lambda entry: entry[:2]))
