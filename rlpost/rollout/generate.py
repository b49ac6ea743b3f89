"""Generation: prompts in, scored groups of samples out.

Comes in: prompts, how to sample, how to score, the router before the engines. Goes out: one ``SampleGroup`` a prompt,
ordered by prompt id, each complete and ordered by index; or ``Preempted``, with nothing left running on the engines.

Each sample is one request, so that the router can balance them and the engines' prefix cache shares the prompt. A
sample is scored the moment it arrives.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from rlpost.errors import Preempted, RolloutError
from rlpost.reward.registry import RewardFunction
from rlpost.rollout.client import EngineClient, authorization
from rlpost.rollout.sampling import SamplingParams
from rlpost.types import Prompt, Sample, SampleGroup, ScoredSample

logger = logging.getLogger(__name__)

STOP_POLL_S = 0.2
NUM_TRIES = 5  # of one request when nobody answers or the router has no engine for it
FIRST_PAUSE_S = 0.5  # between tries; doubles


@dataclass(frozen=True, slots=True)
class RouterAddress:
    """Where to generate. ``concurrency`` bounds the requests under way over all engines."""

    url: str
    api_key: str = field(repr=False)
    engine_urls: tuple[str, ...]
    concurrency: int
    timeout_s: float = 4 * 3600.0  # of one request

    async def abort_all(self) -> None:
        """End every request on every engine. One that does not answer is only logged: the run is leaving anyway."""
        engines = [EngineClient(url, self.api_key, timeout_s=5.0) for url in self.engine_urls]
        answers = await asyncio.gather(*(engine.abort() for engine in engines), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, RolloutError):
                logger.warning("abort: %s", answer)
            elif isinstance(answer, BaseException):
                raise answer


async def generate_groups(
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    n: int,
    router: RouterAddress,
    score: RewardFunction,
    stop_requested: Callable[[], bool],
) -> list[SampleGroup]:
    """``n`` scored samples of each prompt, ordered by prompt id and index.

    Raises:
        Preempted: ``stop_requested()`` was true; polled five times a second, all requests have been aborted.
        RolloutError: a request failed for good; the others have been aborted.
    """
    room = asyncio.Semaphore(router.concurrency)
    # The tasks below outnumber the connections by far; the semaphore is the only bound.
    async with aiohttp.ClientSession(
        headers=authorization(router.api_key),
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=router.timeout_s),
    ) as session:

        async def one(prompt: Prompt, index: int) -> ScoredSample:
            async with room:
                answer = await _generate(session, router.url, prompt, sampling)
            sample = sample_from_answer(answer, prompt, index)
            return ScoredSample(sample, float(score(sample.text, prompt.label, prompt.metadata)))

        ordered = sorted(prompts, key=lambda prompt: prompt.prompt_id)
        work = [asyncio.ensure_future(one(prompt, index)) for prompt in ordered for index in range(n)]
        try:
            scored = await _unless_stopped(work, stop_requested)
        finally:
            unfinished = [task for task in work if not task.done()]
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            if unfinished:
                await router.abort_all()
    return [SampleGroup(prompt.prompt_id, tuple(scored[at * n : (at + 1) * n])) for at, prompt in enumerate(ordered)]


async def _unless_stopped(
    work: Sequence[asyncio.Future[ScoredSample]], stop_requested: Callable[[], bool]
) -> list[ScoredSample]:
    """All results in order, the first failure, or Preempted; whichever comes first."""
    waiting: Collection[asyncio.Future[ScoredSample]] = work
    while waiting:
        if stop_requested():
            raise Preempted(f"a stop was requested after {len(work) - len(waiting)} of {len(work)} samples")
        done, waiting = await asyncio.wait(waiting, timeout=STOP_POLL_S, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()  # raises what went wrong
    return [task.result() for task in work]


async def _generate(session: aiohttp.ClientSession, url: str, prompt: Prompt, sampling: SamplingParams) -> Any:
    """The answer to one request, tried again when it cannot have reached an engine that still works."""
    body = {"input_ids": list(prompt.token_ids), "sampling_params": sampling.to_sglang(), "return_logprob": True}
    for attempt in range(NUM_TRIES):
        try:
            async with session.post(f"{url}/generate", json=body) as response:
                if response.status == 200:
                    return await response.json()
                failure = f"answered {response.status}: {(await response.text())[:500]}"
                if response.status != 503:
                    break
        except TimeoutError as error:
            raise RolloutError(f"router {url}: prompt {prompt.prompt_id} was not answered in time") from error
        except aiohttp.ClientConnectionError as error:
            failure = f"does not answer: {error or type(error).__name__}"
        logger.debug("router %s %s; try %d of %d", url, failure, attempt + 1, NUM_TRIES)
        if attempt + 1 < NUM_TRIES:
            await asyncio.sleep(FIRST_PAUSE_S * 2**attempt)
    raise RolloutError(f"router {url}: prompt {prompt.prompt_id} ({len(prompt.token_ids)} tokens): {failure}")


def sample_from_answer(answer: Any, prompt: Prompt, index: int) -> Sample:
    """A sample from the JSON of ``POST /generate``.

    Raises:
        RolloutError: somebody else aborted the request, or the version of the weights is not a number of ours.
    """
    meta = answer["meta_info"]
    reason = meta["finish_reason"]["type"]
    if reason not in ("stop", "length"):
        raise RolloutError(
            f"an engine ended prompt {prompt.prompt_id}, sample {index} by {reason!r} "
            f"({meta['finish_reason'].get('message')}); nobody here asked for that"
        )
    version = str(meta["weight_version"])
    if not version.isdecimal():
        raise RolloutError(f"an engine generates with weights of version {version!r}; a whole number is needed")
    return Sample(
        prompt_id=prompt.prompt_id,
        index=index,
        prompt_ids=prompt.token_ids,
        response_ids=tuple(answer["output_ids"]),
        rollout_logprobs=tuple(logprob for logprob, _, _ in meta["output_token_logprobs"]),
        text=answer["text"],
        finish_reason=reason,
        policy_version=int(version),
        label=prompt.label,
    )
