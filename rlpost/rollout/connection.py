"""Generation requests to the engines through the router: bounded, retried where safe, and aborted
together.

Input: prompts as token ids with sampling parameters. Output: the answer of SGLang's ``POST
/generate``; or ``Halted`` while generation is suspended.

The event loop only moves bytes: each body is parsed into columns in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import aiohttp
import orjson

from rlpost.bounded import for_each
from rlpost.columns import IntColumn
from rlpost.errors import RolloutError
from rlpost.rollout.answer import Answer, parse
from rlpost.rollout.client import EngineClient, authorization
from rlpost.rollout.engine import LONGEST_GENERATION_S
from rlpost.rollout.routes import RouteFormat

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0  # between retries; doubles
NOT_REACHED = ("call_upstream_request_error", "no_available_workers")
"""Error codes of the router when the chosen engine, or every engine, is unreachable."""
NOT_BEGUN = (499, 503)
"""Statuses that are safe to retry: SGLang 0.5.17 answers 499 when a request is aborted before it
reaches the scheduler (later versions answer as for any abort); 503 is the router's.
"""
JSON = {"Content-Type": "application/json"}
ABORT_AGAIN_S = 0.5  # catches requests that reached an engine after the last abort
PARSE_THREADS = 1
"""Parsing holds the interpreter's lock: more threads parse no faster, and the loop would wait for
several in a row.
"""
LEAVE_S = 20.0  # deadline for running groups to abort after a stop request


class Halted(Exception):
    """Generation is suspended; the builder has the partial answer."""


@dataclass(frozen=True, slots=True)
class RouterAddress:
    """Router and engines. ``concurrency`` bounds the requests in flight over all engines."""

    url: str
    api_key: str = field(repr=False)
    engine_urls: tuple[str, ...]
    concurrency: int
    timeout_s: float = float(LONGEST_GENERATION_S)  # of one request
    patience_s: float = (
        600.0  # total wait between retries that reach no engine: one may be restarting
    )

    async def abort_all(self) -> None:
        """Abort all requests on all engines. An engine that does not answer is logged only."""

        async def abort(url: str) -> None:
            try:
                await EngineClient(url, self.api_key, timeout_s=5.0).abort()
            except RolloutError as error:
                logger.warning("abort: %s", error)

        await for_each(abort, self.engine_urls)


class Connection:
    """A session of requests; an asynchronous context manager."""

    def __init__(self, router: RouterAddress, *, routes: RouteFormat | None = None) -> None:
        """``routes``: answers come with the experts that the engine chose, in this format; None for
        without.
        """
        self.router, self.routes = router, routes
        self.halted = False
        self._capacity = asyncio.Semaphore(router.concurrency)
        self._session: aiohttp.ClientSession | None = None
        self._parsing = ThreadPoolExecutor(PARSE_THREADS, thread_name_prefix="rlpost-parse")

    async def __aenter__(self) -> Connection:
        # The default limit of connections is far too low; the semaphore is the only bound.
        self._session = aiohttp.ClientSession(
            headers=authorization(self.router.api_key),
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self.router.timeout_s),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._session is not None
        await self._session.close()
        self._parsing.shutdown(wait=False)

    async def generate(
        self,
        what: str,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        *,
        labels: Mapping[str, str] | None = None,
    ) -> Answer:
        """Return one answer, complete or aborted.

        ``what`` names the request in messages; ``labels`` reach the engine beside it.

        Raises:
            Halted: ``halt`` was called, and no request was made.
            RolloutError: the request failed permanently.
        """
        async with self._capacity:
            if self.halted:
                raise Halted
            token_ids = IntColumn.of(input_ids).array
            body = {
                "input_ids": token_ids,
                "sampling_params": sampling_params,
                "return_logprob": True,
            }
            body |= {"custom_labels": labels} if labels else {}
            options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
            return await self._post(
                what, orjson.dumps(body, option=options), num_tokens=len(token_ids)
            )

    async def halt(
        self, running: Sequence[asyncio.Task[Any]], *, must_leave: Callable[[], bool]
    ) -> None:
        """Abort all requests until all ``running`` tasks are done; new ones raise Halted until
        ``go_on``.

        Tasks that are not done LEAVE_S seconds after ``must_leave()`` became true are cancelled.
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
                logger.warning(
                    "%d groups did not end within %.0f s; cancelling them", len(waiting), LEAVE_S
                )
                for task in waiting:
                    task.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)
                return

    def go_on(self) -> None:
        """Allow requests again."""
        self.halted = False

    async def _post(self, what: str, body: bytes, *, num_tokens: int) -> Answer:
        """Return the answer to one request; retry it when no working engine can have received
        it.
        """
        assert self._session is not None, "used outside its context"
        # waited_s excludes the time of generation
        url, waited_s, pause_s = (
            self.router.url,
            0.0,
            FIRST_PAUSE_S,
        )
        while True:
            try:
                async with self._session.post(
                    f"{url}/generate", data=body, headers=JSON
                ) as response:
                    if response.status == 200:
                        content = await response.read()
                        loop = asyncio.get_running_loop()
                        return await loop.run_in_executor(
                            self._parsing, parse, content, self.routes
                        )
                    text = await response.text()
                    failure = f"answered {response.status}: {text[:500]}"
                    is_lost = response.status not in NOT_BEGUN and not any(
                        code in text for code in NOT_REACHED
                    )
            except TimeoutError as error:
                raise RolloutError(f"router {url}: {what} was not answered in time") from error
            except (
                aiohttp.ClientConnectionError,
                aiohttp.ClientPayloadError,
            ) as error:  # unreachable, or disconnected
                failure, is_lost = f"does not answer: {error or type(error).__name__}", False
            except (aiohttp.ClientError, ValueError) as error:
                failure, is_lost = f"answered 200 without a valid answer: {error}", True
            if is_lost or waited_s + pause_s > self.router.patience_s:
                raise RolloutError(f"router {url}: {what} ({num_tokens} tokens): {failure}")
            logger.debug("router %s %s; retrying in %.1f s", url, failure, pause_s)
            await asyncio.sleep(pause_s)
            waited_s += pause_s
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            if self.halted:
                raise Halted
