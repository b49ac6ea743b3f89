"""Generation: prompts in, scored groups of samples out.

Input: prompts, sampling parameters, a grader, a connection to the engines. Output: one
``SampleGroup`` per prompt, complete and ordered by index; or, after an abort, an ``Unfinished``
with the partial answers.

Each sample is a separate request: ``rlpost.engines.places`` chooses its engine, whose prefix cache
shares the prompt. Slow rewards that need no other answer (``Grader.grades_singly``) are computed
once their answer is complete, all others once the last answer of the group is; other groups are
still generating. An answer whose grading failed is left out of the baseline and of the loss. A
group with fewer than two answers left has no baseline and is generated again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar, runtime_checkable

from common.bounded import cancel_all, together
from common.repeats import Repeats
from rlpost.durable.journal import Journal
from rlpost.durable.journal_format import ANSWER, Part
from rlpost.engines.connection import Connection, Halted
from rlpost.errors import ConfigError, DataError, GradingLost, NotFinite, Preempted, RolloutError
from rlpost.rollout.answer_log import AnswerLog
from rlpost.rollout.response_builder import Codec, GenerateFunction, ResponseBuilder, write_answer
from rlpost.rollout.sampling import SamplingParams
from rlpost.tasks.reward.grader import Grader
from rlpost.tasks.vocabulary import unknown_id
from rlpost.types import Prompt, Sample, SampleGroup, ScoredSample, Unfinished

logger = logging.getLogger(__name__)

_FUNCTION = "--custom-generate-function-path, or an environment"
STOP_POLL_S = 0.2
LOST, REGENERATED, WASTED = COUNTED = (
    "rollout/answers_lost",
    "rollout/num_regenerated",
    "rollout/wasted_tokens",
)
MAX_LOST_IN_A_ROW = 64  # lost answers after which the grading service counts as down
MAX_GENERATIONS = 4  # attempts at one group whose gradings fail; then its prompt is given up
LEAST_ANSWERS = 2  # graded answers in a group, because the baseline compares them
T = TypeVar("T")

Place = tuple[int, int]
"""Index of an answer in its group, and position of a sample among those of the answer."""
Finish = Callable[[Sequence[ScoredSample]], Awaitable[tuple[ScoredSample, ...]]]
"""Completes graded samples, and leaves out those that it cannot; raises Halted on a stop request.
"""


@runtime_checkable
class Resumable(Protocol):
    """A generate function that resumes the answers to some prompts."""

    def resumes(self, prompt: Prompt) -> bool:
        """Whether the answer to this prompt continues from recorded turns."""

    async def keep_states(self, states: Sequence[bytes]) -> None:
        """Delete what the states of environments of earlier attempts need, except these."""


class GroupWriter:
    """Generates groups of ``n`` answers over one connection."""

    def __init__(
        self,
        connection: Connection,
        sampling: SamplingParams,
        *,
        n: int,
        grader: Grader,
        function: GenerateFunction = write_answer,
        codec: Codec | None = None,
        vocab_size: int | None = None,
        finish: Finish | None = None,
        journal: Journal | None = None,
        every_s: float | None = None,
    ) -> None:
        """
        Args:
            vocab_size: number of ids that the model knows; None if it is not known.
            finish: adds further values that training needs to the graded samples of a group.
            journal: keeps what groups have before they are finished; None for evaluations.
            every_s: seconds between records of responses in progress; None for none.
        """
        self.connection = connection
        self._journal, self._every_s = journal or Journal.off(), every_s
        self._finish = finish
        self._sampling, self._n, self._grader = sampling, n, grader
        self._function, self._codec = function, codec
        self._vocab_size = vocab_size
        self._counts: Counter[str] = Counter()
        self._lost_in_a_row = 0
        self._reasons = Repeats()
        self._beginning = asyncio.Semaphore(1)

    def counters(self) -> Mapping[str, float]:
        """Return, by metric name, counts of lost answers, regenerated groups and wasted tokens.

        They cover the time since the last call.
        """
        found = {name: float(self._counts[name]) for name in COUNTED}
        self._counts.clear()
        return found

    async def keep_states(self, states: Sequence[bytes]) -> None:
        """Let the function delete what no answer in progress continues from.

        ``states``: all that the journal has, before the first answer begins.
        """
        if isinstance(self._function, Resumable):
            await self._function.keep_states(states)

    async def write(self, entry: Unfinished) -> SampleGroup | Unfinished:
        """Resume the answers of ``entry``; return its group, or an ``Unfinished`` after a halt.

        A group without samples means that its prompt is given up: its gradings failed
        MAX_GENERATIONS times.

        Raises:
            RolloutError: a request failed permanently, or too many answers in a row were lost; the other requests of
                the group are cancelled.
            ConfigError: the function did not return an answer, or one with an ``extra`` that is not JSON.
            DataError: the function returned an id that the model does not know.
        """
        prompt = entry.prompt
        async with self._beginning:
            # Each iteration of the event loop starts one group: thousands of requests at once would
            # block it for seconds.
            await asyncio.sleep(0)
        for _ in range(MAX_GENERATIONS):
            written = await self._write_answers(entry)
            if isinstance(written, Unfinished):
                return written
            samples, graded = written
            if len({scored.sample.index for scored in graded}) >= min(LEAST_ANSWERS, self._n):
                return SampleGroup(prompt.prompt_id, graded)
            self._counts[REGENERATED] += 1
            self._counts[WASTED] += sum(len(sample.response_ids) for sample in samples)
            self._journal.drop_parts(prompt.prompt_id)
            entry = Unfinished(prompt)
        logger.warning(
            "prompt %d is given up: its gradings failed %d times", prompt.prompt_id, MAX_GENERATIONS
        )
        return SampleGroup(prompt.prompt_id, ())

    async def _write_answers(
        self, entry: Unfinished
    ) -> tuple[list[Sample], tuple[ScoredSample, ...]] | Unfinished:
        """Return all answers to a prompt, and those that have a reward."""
        prompt, so_far = entry.prompt, defaultdict[int, list[Sample]](list)
        for sample in entry.samples:
            so_far[sample.index].append(sample)
        recorded = await self._journal.parts_of(prompt.prompt_id)
        logs = [self._log(prompt, index, recorded.get(index, ())) for index in range(self._n)]
        singly = self._grader.grades_singly(prompt)
        rewards, grading = dict[Place, float](), list[asyncio.Future[None]]()

        async def answer(log: AnswerLog) -> Sequence[Sample] | None:
            samples = await self._answer(prompt, log, so_far[log.index])
            if singly and samples is not None and _is_finished(samples):
                for number, sample in enumerate(samples):
                    grade = self._grade(prompt, sample, number, rewards)
                    grading.append(asyncio.ensure_future(grade))
            return samples

        try:
            answers = await together(map(answer, logs))
            usable = [several for several in answers if several is not None]
            samples = [sample for several in usable for sample in several]
            with contextlib.suppress(Halted):  # a stop request during the grading
                if all(map(_is_finished, usable)):
                    if not singly:
                        rewards |= await self._grade_group(prompt, samples)
                    await asyncio.gather(*grading)
                    return samples, await self._complete(samples, rewards)
        finally:
            await cancel_all(grading)
        pairs = zip(samples, _places(samples), strict=True)
        return Unfinished(
            prompt, tuple(replace(sample, reward=rewards.get(place)) for sample, place in pairs)
        )

    async def _grade_group(self, prompt: Prompt, samples: Sequence[Sample]) -> dict[Place, float]:
        """Return the rewards of all answers together. Raises Halted."""
        graded = await self._grader.grade(prompt, samples) if samples else ()
        pairs = zip(_places(samples), graded, strict=True)
        return {place: float(reward) for place, reward in pairs if reward is not None}

    async def _grade(
        self, prompt: Prompt, sample: Sample, number: int, rewards: dict[Place, float]
    ) -> None:
        """Add the reward of the ``number``-th sample of an answer to ``rewards``. Raises Halted.

        Nothing is added if the grading was lost.
        """
        place = sample.index, number
        if sample.reward is not None:
            rewards[place] = sample.reward
            return
        (reward,) = await self._grader.grade(prompt, [sample])
        if reward is not None:
            rewards[place] = float(reward)
            self._journal.add_reward(sample, prompt, number, float(reward))

    async def _complete(
        self, samples: Sequence[Sample], rewards: Mapping[Place, float]
    ) -> tuple[ScoredSample, ...]:
        """Return the samples of graded and finished answers. Raises Halted.

        An answer of which one sample has no reward is left out, with its other samples.
        """
        scored = [
            ScoredSample(
                sample if sample.reward is None else replace(sample, reward=None), rewards[place]
            )
            for sample, place in zip(samples, _places(samples), strict=True)
            if place in rewards
        ]
        counts = Counter(sample.index for sample in samples)
        graded = _whole_answers(scored, counts)
        if self._finish is None:
            return graded
        finished = _whole_answers(await self._finish(graded), counts)
        before, after = ({each.sample.index for each in scored} for scored in (graded, finished))
        self._counts[LOST] += len(before - after)
        return finished

    def _lose(self, prompt: Prompt, why: GradingLost) -> None:
        """Count a lost answer. Raises RolloutError after MAX_LOST_IN_A_ROW consecutive ones."""
        self._counts[LOST] += 1
        self._lost_in_a_row += 1
        count = self._reasons.count(str(why))
        if count is not None:
            often = "" if count == 1 else f" ({count} times for this reason)"
            logger.warning("prompt %d: an answer is left out%s: %s", prompt.prompt_id, often, why)
        if self._lost_in_a_row >= MAX_LOST_IN_A_ROW:
            raise RolloutError(
                f"{_FUNCTION}: {self._lost_in_a_row} consecutive answers were lost; the last: {why}"
            ) from why

    async def _answer(
        self, prompt: Prompt, log: AnswerLog, so_far: list[Sample]
    ) -> Sequence[Sample] | None:
        """Return the samples of one answer: a partial one after an abort, None if grading failed.

        A custom generate function may return several samples. After an abort or a crash it is called
        again, and continues only if it resumes (``AnswerLog``): only the function knows the state
        of its tools.
        """
        if _is_finished(so_far):
            return so_far
        partial_sample = so_far[0] if so_far else None
        builder = ResponseBuilder(
            self.connection,
            prompt,
            self._sampling,
            index=log.index,
            codec=self._codec,
            vocab_size=self._vocab_size,
            so_far=partial_sample,
            log=log,
        )
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
        except NotFinite as error:
            raise ConfigError(
                f"{_FUNCTION}: {_name_of(self._function)} answers "
                f"prompt {prompt.prompt_id} with {error}"
            ) from error
        self._lost_in_a_row = 0
        samples = [written] if isinstance(written, Sample) else written
        if not (
            isinstance(samples, Sequence)
            and samples
            and all(isinstance(each, Sample) for each in samples)
        ):
            raise ConfigError(
                f"--custom-generate-function-path: the function returned {repr(written)[:200]} for prompt "
                f"{prompt.prompt_id}; it has to return a Sample, such as builder.sample(), or several"
            )
        if self._function is not write_answer and not all(each.response_ids for each in samples):
            raise ConfigError(
                f"--custom-generate-function-path: the function returned an answer without a token for prompt "
                f"{prompt.prompt_id}, which cannot be trained; let it call builder.write() at least once"
            )
        for each in samples:
            self._check_ids(each)
        finished = tuple(self._as_journaled(each) for each in samples)
        self._journal.add_part(Part(prompt.prompt_id, log.index, ANSWER, samples=finished), prompt)
        return finished

    def _log(self, prompt: Prompt, index: int, recorded: Sequence[Part]) -> AnswerLog:
        """Return the log of an answer; void what the answer does not continue from."""
        resumes = self._resumes(prompt)
        if recorded and not resumes:
            self._journal.drop_parts(prompt.prompt_id, index)
        return AnswerLog(
            self._journal,
            prompt,
            index,
            recorded if resumes else (),
            resumes=resumes,
            keeps_last=self._function is not write_answer,
            every_s=self._every_s,
        )

    def _resumes(self, prompt: Prompt) -> bool:
        """Whether the answer to a prompt continues from what the journal has of it.

        A function says so by ``resumes(prompt)``, or by an attribute ``deterministic``: called again,
        it asks the same requests.
        """
        if isinstance(self._function, Resumable):
            return self._function.resumes(prompt)
        return self._function is write_answer or getattr(self._function, "deterministic", False)

    def _check_ids(self, sample: Sample) -> None:
        """Raise DataError for an id that the model does not know."""
        for name, ids in (("prompt_ids", sample.prompt_ids), ("response_ids", sample.response_ids)):
            unknown = unknown_id(ids, self._vocab_size)
            if unknown is not None:
                raise DataError(
                    f"{_FUNCTION}: {_name_of(self._function)} returned the id "
                    f"{unknown} in {name} of its answer to prompt {sample.prompt_id}, and the model has vocab_size = "
                    f"{self._vocab_size}; use the tokenizer of this model"
                )

    def _as_journaled(self, sample: Sample) -> Sample:
        """Return the sample with ``extra`` as the journal and checkpoints give it back.

        A resumed run then trains on the same values: JSON has no tuples, and its keys are strings.
        Raises ConfigError for a value that JSON lacks.
        """
        if not sample.extra:
            return sample
        kept: dict[str, object] = {}
        for key, value in sample.extra.items():
            try:
                kept |= json.loads(json.dumps({key: value}))
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"{_FUNCTION}: {_name_of(self._function)} put extra[{key!r}] of type "
                    f"{type(value).__name__} into its answer to prompt {sample.prompt_id}, which is not a JSON value "
                    f"({error}); convert it, for example with float() or .tolist()"
                ) from error
        return replace(sample, extra=kept)


def _is_finished(samples: Sequence[Sample]) -> bool:
    """Whether these samples are a whole answer."""
    return bool(samples) and samples[-1].finish_reason != "abort"


def _whole_answers(
    scored: Sequence[ScoredSample], counts: Mapping[int, int]
) -> tuple[ScoredSample, ...]:
    """Return the samples of answers of which none is missing; ``counts``: of each, by index."""
    present = Counter(each.sample.index for each in scored)
    return tuple(each for each in scored if present[each.sample.index] == counts[each.sample.index])


def _places(samples: Iterable[Sample]) -> list[Place]:
    """Return the places of the samples of a group, in order."""
    counts: Counter[int] = Counter()
    places = []
    for sample in samples:
        places.append((sample.index, counts[sample.index]))
        counts[sample.index] += 1
    return places


def _name_of(function: object) -> str:
    """The name of a function, or of the class of a callable object."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"  # type: ignore[attr-defined]


async def write_all(
    writer: GroupWriter, prompts: Sequence[Prompt], stop_requested: Callable[[], bool]
) -> list[SampleGroup]:
    """Generate the groups of all prompts, ordered by prompt id.

    Raises:
        Preempted: ``stop_requested()`` was true; it is polled every STOP_POLL_S seconds.
        RolloutError: a request failed permanently.

    In both cases all requests have been aborted.
    """
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
            await writer.connection.engines.abort_all()
    groups = [group for group in done if isinstance(group, SampleGroup)]
    # This connection is never halted: only a stop request during grading leaves a group unfinished.
    if len(groups) < len(ordered):
        raise Preempted(f"a stop was requested after {len(groups)} of {len(ordered)} groups")
    return groups


async def _unless_stopped(
    work: Sequence[asyncio.Future[T]], stop_requested: Callable[[], bool]
) -> list[T]:
    """Return all results in order. Raises the first failure, or Preempted on a stop request."""
    waiting: Collection[asyncio.Future[T]] = work
    while waiting:
        if stop_requested():
            raise Preempted(
                f"a stop was requested after {len(work) - len(waiting)} of {len(work)} groups"
            )
        done, waiting = await asyncio.wait(
            waiting, timeout=STOP_POLL_S, return_when=asyncio.FIRST_EXCEPTION
        )
        for task in done:
            task.result()  # raises the failure
    return [task.result() for task in work]
