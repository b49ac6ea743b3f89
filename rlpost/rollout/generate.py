"""Generation: prompts in, scored groups of samples out.

Comes in: prompts, how to sample, who grades, the router before the engines. Goes out: one ``SampleGroup`` a prompt,
complete and ordered by index; or, cut off, an ``Unfinished`` with the answers so far.

Each sample is a request of its own, so that the router can balance them and the engines' prefix cache shares the
prompt. A group is graded when its last sample is there, while other groups are still written. An answer whose grading
was lost is left out of its group: neither the baseline nor the loss sees it. A group of which fewer than two answers
are left has no baseline, and is generated again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TypeVar

from rlpost.errors import ConfigError, GradingLost, Preempted, RolloutError
from rlpost.reward.grader import Grader
from rlpost.rollout.connection import Connection, Halted, RouterAddress
from rlpost.rollout.response_builder import Codec, GenerateFunction, ResponseBuilder, write_answer
from rlpost.rollout.sampling import SamplingParams
from rlpost.types import Prompt, Sample, SampleGroup, ScoredSample, Unfinished

__all__ = ["GroupWriter", "RouterAddress", "generate_groups"]

logger = logging.getLogger(__name__)

STOP_POLL_S = 0.2
LOST, REGENERATED, WASTED = COUNTED = "rollout/answers_lost", "rollout/num_regenerated", "rollout/wasted_tokens"
MAX_LOST_IN_A_ROW = 64  # answers: then what the function needs is away for good
MAX_GENERATIONS = 4  # of one group whose gradings are lost; then the prompt is given up
LEAST_ANSWERS = 2  # with a reward, of a group: the baseline compares them
T = TypeVar("T")


class GroupWriter:
    """Makes groups of ``n`` answers over one connection."""

    def __init__(
        self,
        connection: Connection,
        sampling: SamplingParams,
        *,
        n: int,
        grader: Grader,
        function: GenerateFunction = write_answer,
        codec: Codec | None = None,
    ) -> None:
        self.connection = connection
        self._sampling, self._n, self._grader = sampling, n, grader
        self._function, self._codec = function, codec
        self._counts: Counter[str] = Counter()
        self._lost_in_a_row = 0

    def counters(self) -> Mapping[str, float]:
        """Answers that were lost, groups that were generated again and their wasted tokens since the last call, by
        metric name."""
        found = {name: float(self._counts[name]) for name in COUNTED}
        self._counts.clear()
        return found

    async def write(self, entry: Unfinished) -> SampleGroup | Unfinished:
        """The group of ``entry``, whose answers are resumed; as far as it got when generation was halted.

        A group without samples is one to give up: its gradings were lost time and again, those of others may not be.

        Raises:
            RolloutError: a request failed for good, or too many answers in a row were lost; the other requests of the
                group are cancelled.
            ConfigError: the function did not return an answer.
        """
        prompt = entry.prompt
        for _ in range(MAX_GENERATIONS):
            written = await self._written(entry)
            if isinstance(written, Unfinished):
                return written
            samples, graded = written
            if len({scored.sample.index for scored in graded}) >= min(LEAST_ANSWERS, self._n):
                return SampleGroup(prompt.prompt_id, graded)
            self._counts[REGENERATED] += 1
            self._counts[WASTED] += sum(len(sample.response_ids) for sample in samples)
            entry = Unfinished(prompt)
        logger.warning("prompt %d is given up: its gradings were lost %d times", prompt.prompt_id, MAX_GENERATIONS)
        return SampleGroup(prompt.prompt_id, ())

    async def _written(self, entry: Unfinished) -> tuple[list[Sample], tuple[ScoredSample, ...]] | Unfinished:
        """All answers to a prompt, and those of them that have a reward."""
        so_far = [[sample for sample in entry.samples if sample.index == index] for index in range(self._n)]
        answers = await together([self._answer(entry.prompt, index, so_far[index]) for index in range(self._n)])
        there = [several for several in answers if several is not None]
        samples = [sample for several in there for sample in several]
        if any(not several or several[-1].finish_reason == "abort" for several in there):
            return Unfinished(entry.prompt, tuple(samples))
        if not samples:
            return [], ()
        try:
            rewards = await self._grader.grade(entry.prompt, samples)
        except Halted:
            return Unfinished(entry.prompt, tuple(samples))
        pairs = zip(samples, rewards, strict=True)
        return samples, tuple(ScoredSample(sample, float(reward)) for sample, reward in pairs if reward is not None)

    def _lose(self, prompt: Prompt, why: GradingLost) -> None:
        """Count an answer that is left out; give up when nothing else happens any more."""
        self._counts[LOST] += 1
        self._lost_in_a_row += 1
        logger.warning("prompt %d: an answer is left out: %s", prompt.prompt_id, why)
        if self._lost_in_a_row >= MAX_LOST_IN_A_ROW:
            raise RolloutError(
                f"--custom-generate-function-path: the last {self._lost_in_a_row} answers were lost; the last: {why}"
            ) from why

    async def _answer(self, prompt: Prompt, index: int, so_far: list[Sample]) -> list[Sample] | None:
        """One answer, or the several that a function makes of one; what there is of it when it was cut off; None when
        it was lost.

        A function of the user's own is begun anew after a cut: only it knows where its tools stood.
        """
        if so_far and so_far[-1].finish_reason != "abort":
            return so_far
        cut = so_far[0] if so_far else None
        builder = ResponseBuilder(self.connection, prompt, self._sampling, index=index, codec=self._codec, so_far=cut)
        try:
            written = await self._function(builder, prompt, self._sampling)
        except Halted:
            if self._function is not write_answer or not builder.response_ids:
                return []
            builder.finish_reason = "abort"
            return [builder.sample()]
        except GradingLost as why:
            self._lose(prompt, why)
            return None
        self._lost_in_a_row = 0
        samples = [written] if isinstance(written, Sample) else written
        if not (isinstance(samples, Sequence) and samples and all(isinstance(each, Sample) for each in samples)):
            raise ConfigError(
                f"rollout.custom_generate_function_path: the function returned {repr(written)[:200]} for prompt "
                f"{prompt.prompt_id}; it has to return a Sample, such as builder.sample(), or several"
            )
        if self._function is not write_answer and not all(each.response_ids for each in samples):
            raise ConfigError(
                f"rollout.custom_generate_function_path: the function returned an answer without a token for prompt "
                f"{prompt.prompt_id}, which cannot be trained; let it call builder.write() at least once"
            )
        return list(samples)


async def together(work: Sequence[Awaitable[T]]) -> list[T]:
    """Results in order; the first failure ends the others."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def generate_groups(
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    n: int,
    router: RouterAddress,
    grader: Grader,
    stop_requested: Callable[[], bool],
) -> list[SampleGroup]:
    """``n`` scored samples of each prompt, ordered by prompt id and index.

    Raises:
        Preempted: ``stop_requested()`` was true; polled five times a second, all requests have been aborted.
        RolloutError: a request failed for good; the others have been aborted.
    """
    async with Connection(router) as connection:
        return await write_all(GroupWriter(connection, sampling, n=n, grader=grader), prompts, stop_requested)


async def write_all(
    writer: GroupWriter, prompts: Sequence[Prompt], stop_requested: Callable[[], bool]
) -> list[SampleGroup]:
    """The groups of all prompts, by prompt id. Raises what ``generate_groups`` raises."""
    ordered = sorted(prompts, key=lambda prompt: prompt.prompt_id)
    work = [asyncio.ensure_future(writer.write(Unfinished(prompt))) for prompt in ordered]
    try:
        done = await _unless_stopped(work, stop_requested)
    finally:
        unfinished = [task for task in work if not task.done()]
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        if unfinished:
            await writer.connection.router.abort_all()
    groups = [group for group in done if isinstance(group, SampleGroup)]
    if len(groups) < len(ordered):  # nobody halts this connection: a stop request ended the grading of the others
        raise Preempted(f"a stop was requested after {len(groups)} of {len(ordered)} groups")
    return groups


async def _unless_stopped(work: Sequence[asyncio.Future[T]], stop_requested: Callable[[], bool]) -> list[T]:
    """All results in order, the first failure, or Preempted; whichever comes first."""
    waiting: Collection[asyncio.Future[T]] = work
    while waiting:
        if stop_requested():
            raise Preempted(f"a stop was requested after {len(work) - len(waiting)} of {len(work)} groups")
        done, waiting = await asyncio.wait(waiting, timeout=STOP_POLL_S, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()  # raises what went wrong
    return [task.result() for task in work]
