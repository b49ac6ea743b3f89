"""The way to the engines: requests through the router, bounded, tried again where that helps, and ended together.

Comes in: prompts as token ids with sampling parameters. Goes out: the JSON of SGLang's ``POST /generate``; or
``Halted``, which says that no more tokens are wanted now.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import aiohttp

from rlpost.errors import RolloutError
from rlpost.rollout.client import EngineClient, authorization
from rlpost.rollout.engine import LONGEST_GENERATION_S

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0  # between tries; doubles
NOT_REACHED = ("call_upstream_request_error", "no_available_workers")
"""What the router calls it when the engine it chose, or every engine, was not there."""
NOT_BEGUN = (499, 503)
"""Nothing is lost with it: SGLang 0.5.17 answers 499 for a request that an abort met before the scheduler had it, where
later ones answer as for any other; 503 is the router's."""
ABORT_AGAIN_S = 0.5  # a request that was on its way to an engine while the others were aborted
LEAVE_S = 20.0  # for what runs to be cut off when the run has to leave


class Halted(Exception):
    """Generation was cut off; what is written so far is in the builder."""


@dataclass(frozen=True, slots=True)
class RouterAddress:
    """Where to generate. ``concurrency`` bounds the requests under way over all engines."""

    url: str
    api_key: str = field(repr=False)
    engine_urls: tuple[str, ...]
    concurrency: int
    timeout_s: float = float(LONGEST_GENERATION_S)  # of one request
    patience_s: float = 600.0  # of waiting between tries that reach no engine: a dead one is restarted meanwhile

    async def abort_all(self) -> None:
        """End every request on every engine. One that does not answer is only logged: its requests end with it."""
        engines = [EngineClient(url, self.api_key, timeout_s=5.0) for url in self.engine_urls]
        answers = await asyncio.gather(*(engine.abort() for engine in engines), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, RolloutError):
                logger.warning("abort: %s", answer)
            elif isinstance(answer, BaseException):
                raise answer


class Connection:
    """An asynchronous context; requests may be made inside it."""

    def __init__(self, router: RouterAddress) -> None:
        self.router = router
        self.halted = False
        self._room = asyncio.Semaphore(router.concurrency)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Connection:
        # Requests outnumber the connections by far; the semaphore is the only bound.
        self._session = aiohttp.ClientSession(
            headers=authorization(self.router.api_key),
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self.router.timeout_s),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def generate(self, what: str, input_ids: Sequence[int], sampling_params: Mapping[str, Any]) -> Any:
        """One answer, cut off ("abort") or not. ``what`` is for messages.

        Raises:
            Halted: no request was made, since ``halt`` was called.
            RolloutError: it failed for good.
        """
        async with self._room:
            if self.halted:
                raise Halted
            return await self._post(
                what, {"input_ids": list(input_ids), "sampling_params": sampling_params, "return_logprob": True}
            )

    async def halt(self, running: Sequence[asyncio.Task[Any]], *, must_leave: Callable[[], bool]) -> None:
        """End all requests until every one of ``running`` is done; new ones raise Halted until ``go_on``.

        What is not done LEAVE_S seconds after ``must_leave()`` was true is cancelled.
        """
        self.halted, left_at = True, math.inf
        waiting = [task for task in running if not task.done()]
        while waiting:
            await self.router.abort_all()
            _, pending = await asyncio.wait(waiting, timeout=ABORT_AGAIN_S)
            waiting = list(pending)
            if left_at == math.inf and must_leave():
                left_at = time.monotonic()
            if waiting and time.monotonic() - left_at > LEAVE_S:
                logger.warning("%d groups did not end within %.0f s; they are given up", len(waiting), LEAVE_S)
                for task in waiting:
                    task.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)
                return

    def go_on(self) -> None:
        """Requests may be made again."""
        self.halted = False

    async def _post(self, what: str, body: Mapping[str, Any]) -> Any:
        """The answer to one request, tried again when it cannot have reached an engine that still works."""
        assert self._session is not None, "used outside its context"
        url, waited_s, pause_s = self.router.url, 0.0, FIRST_PAUSE_S  # what an engine took to write is not waiting
        while True:
            try:
                async with self._session.post(f"{url}/generate", json=body) as response:
                    if response.status == 200:
                        return await response.json()
                    text = await response.text()
                    failure = f"answered {response.status}: {text[:500]}"
                    is_lost = response.status not in NOT_BEGUN and not any(code in text for code in NOT_REACHED)
            except TimeoutError as error:
                raise RolloutError(f"router {url}: {what} was not answered in time") from error
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:  # not there, or cut off
                failure, is_lost = f"does not answer: {error or type(error).__name__}", False
            except (aiohttp.ClientError, ValueError) as error:
                failure, is_lost = f"answered 200 and no JSON: {error}", True
            if is_lost or waited_s + pause_s > self.router.patience_s:
                raise RolloutError(f"router {url}: {what} ({len(body['input_ids'])} tokens): {failure}")
            logger.debug("router %s %s; again in %.1f s", url, failure, pause_s)
            await asyncio.sleep(pause_s)
            waited_s += pause_s
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            if self.halted:
                raise Halted
