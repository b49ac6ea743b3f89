"""Generation requests to the engines: bounded, retried where safe, and aborted together.

Requests go directly to the engine that ``places`` chooses.

Input: prompts as token ids with sampling parameters. Output: the answer of SGLang's ``POST
/generate``; or ``Halted`` while generation is suspended.

The event loop only moves bytes: each body is parsed into columns in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Self

import aiohttp
import orjson

from common.bounded import for_each
from rlpost.columns import IntColumn
from rlpost.durable.daemon_threads import in_daemon
from rlpost.engines.answer import Answer, parse
from rlpost.engines.engine import LONGEST_GENERATION_S
from rlpost.engines.engine_client import EngineClient, authorization
from rlpost.engines.image_requests import ImageRequests
from rlpost.engines.places import GivenUp, Place, Places, Request, Use
from rlpost.engines.routes import RouteFormat
from rlpost.engines.streamed_answer import StreamedAnswer, events
from rlpost.errors import RolloutError
from rlpost.types import ImageSpan

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0  # between retries; doubles
ABORTED = 499
NOT_BEGUN = (ABORTED, 503)
"""Statuses that say nothing about the request: SGLang 0.5.17 answers 499 when it is aborted before it
reaches the scheduler (later versions answer as for any abort), 503 while the server is not ready.
"""
REFUSED = range(400, 499)  # another engine would refuse it, too
JSON = {"Content-Type": "application/json"}
ABORT_AGAIN_S = 0.5  # catches requests that reached an engine after the last abort
PARSE_THREADS = 1
"""Parsing holds the interpreter's lock: more threads parse no faster, and the loop would wait for
several in a row.
"""
LEAVE_S = 20.0  # deadline for running groups to abort after a stop request
MAX_FAULTS = 4  # faults (``Failure``) after which a request fails


class Halted(Exception):
    """Generation is suspended; the builder has the partial answer."""


@dataclass(frozen=True, slots=True)
class RunEngines:
    """The engines of a run, as requests see them: those of its job and those in other jobs."""

    places: Places = field(default_factory=Places, compare=False)
    timeout_s: float = float(LONGEST_GENERATION_S)  # for one request
    # Total wait between retries that reach no engine: one may be restarting.
    patience_s: float = 600.0

    @classmethod
    def of(
        cls, urls: Sequence[str], api_key: str, *, capacity: int, patience_s: float = 600.0
    ) -> Self:
        """Return engines that serve from the start, each with ``capacity`` requests in flight."""
        engines = cls(patience_s=patience_s)
        engines.places.set_own([Place(url, api_key, capacity) for url in urls])
        return engines

    async def abort_all(self) -> None:
        """Abort all requests on all engines. An engine that does not answer is logged only."""

        async def abort(place: Place) -> None:
            try:
                await EngineClient(place.url, place.api_key, timeout_s=5.0).abort()
            except RolloutError as error:
                logger.warning("abort: %s", error)

        await for_each(abort, self.places.all())


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that was not answered.

    Attributes:
        is_fault: the server answered with an error, or not in time.
        is_abort: the request was aborted before it began; the server works.
        is_refusal: the request itself is wrong.
    """

    text: str
    is_fault: bool
    is_abort: bool = False
    is_refusal: bool = False


@dataclass(frozen=True, slots=True)
class Watch:
    """Gets the tokens of an answer in progress about every ``every_s`` seconds.

    ``begin`` is called for each attempt of a request, whose tokens begin anew; ``add`` with the
    tokens since the last call, as an answer that is not finished.
    """

    every_s: float
    begin: Callable[[], None]
    add: Callable[[Answer], None]


class Connection:
    """A session of requests; an asynchronous context manager."""

    def __init__(
        self,
        engines: RunEngines,
        *,
        routes: RouteFormat | None = None,
        images: ImageRequests | None = None,
    ) -> None:
        """
        Args:
            routes: format of the routes that answers include; None for answers without.
            images: how images are sent; None if the model reads text alone.
        """
        self.engines, self.routes, self.images = engines, routes, images
        self.halted = False
        self.newest_version: int | None = None
        """Of the weights that engines may have; None: not known."""
        self._places = engines.places
        self._session: aiohttp.ClientSession | None = None
        self._parsing = ThreadPoolExecutor(PARSE_THREADS, thread_name_prefix="rlpost-parse")

    async def __aenter__(self) -> Connection:
        # The default limit of connections is far too low; the places are the only bound. No key in
        # the session: each place has its own.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self.engines.timeout_s),
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._session is not None
        await self._session.close()
        self._parsing.shutdown(wait=False)

    async def generate(
        self,
        what: str,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, object],
        *,
        images: Sequence[ImageSpan] = (),
        fields: Mapping[str, object] | None = None,
        prompt: Hashable = None,
        turn_of: Hashable = None,
        watch: Watch | None = None,
    ) -> Answer:
        """Return one answer, complete or aborted.

        Args:
            what: names the request in messages.
            input_ids: with all tokens of each image.
            images: the images in it.
            fields: further fields of the request.
            prompt: the same for requests that begin with the same prompt.
            turn_of: the same for the turns of a conversation.
            watch: gets the tokens while they are generated.

        Raises:
            Halted: ``halt`` was called, and no request was made.
            RolloutError: the request failed permanently, or images and tokens do not match.
            ImageError: an image is missing or damaged.
        """
        assert self.images is not None or not images, "images need a model that reads them"
        ids = IntColumn.of(input_ids)
        files: Sequence[Path] = ()
        if self.images is not None:
            ids = self.images.input_ids(ids, images)
            # not in the loop's own threads, whose end asyncio.run awaits
            files = await in_daemon(partial(self.images.files, images)) if images else ()

        async def body(place: Place, rank: int | None) -> bytes:
            image_fields: Mapping[str, object] = {}
            if files and self.images is not None:
                image_fields = await in_daemon(partial(self.images.fields, files))
            params, streams = dict(sampling_params), {}
            if watch is not None:
                params["stream_interval"] = self._places.tokens_within(place, watch.every_s)
                streams = {"stream": True}
            content = {
                "input_ids": ids.array,
                **image_fields,
                "sampling_params": params,
                "return_logprob": True,
                **streams,
                **(fields or {}),
                **({} if rank is None else {"routed_dp_rank": rank}),
            }
            return orjson.dumps(
                content, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
            )

        most = sampling_params.get("max_new_tokens")
        request = Request(
            num_input=len(input_ids),
            num_new=most if isinstance(most, int) else 1,
            prompt=None if prompt is None else (id(self), prompt),
            conversation=None if turn_of is None else (id(self), turn_of),
            owner=self,
        )
        return await self._post(what, body, request, watch)

    async def halt(
        self, running: Sequence[asyncio.Task[object]], *, must_leave: Callable[[], bool]
    ) -> None:
        """Abort requests until all ``running`` tasks are done.

        New requests raise Halted until ``resume``. Tasks that are not done LEAVE_S seconds after
        ``must_leave()`` became true are cancelled.
        """
        self.halted, left_at = True, math.inf
        self._places.fail_waiting(self, Halted)  # without an engine they would wait forever
        waiting = [task for task in running if not task.done()]
        while waiting:
            await self.engines.abort_all()
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

    def resume(self) -> None:
        """Allow requests again."""
        self.halted = False

    async def _post(
        self,
        what: str,
        make_body: Callable[[Place, int | None], Awaitable[bytes]],
        request: Request,
        watch: Watch | None,
    ) -> Answer:
        """Return the answer to one request; retry it when its engine will never answer it.

        The body is made only when there is capacity, because many requests wait.
        """
        waited_s, pause_s = 0.0, FIRST_PAUSE_S  # waited_s excludes the time of generation
        num_faults = 0
        while True:
            if self.halted:
                raise Halted
            try:
                async with self._places.take(request) as place:
                    if self.halted:  # while the request waited for a place
                        raise Halted
                    body = await make_body(place, request.rank)
                    failure = await self._answer_of(place, body, request, watch)
                    if isinstance(failure, Answer):
                        return failure
                    if not failure.is_abort:
                        self._places.failed(place, failure.text)
            except GivenUp as gone:  # this answer is never read, so another engine may write it
                logger.debug("engine %s is lost; %s is sent again", gone, what)
                continue
            num_faults += failure.is_fault
            is_final = failure.is_refusal or num_faults >= MAX_FAULTS
            if is_final or waited_s + pause_s > self.engines.patience_s:
                raise RolloutError(
                    f"engine {place.url}: {what} ({request.num_input} tokens): {failure.text}"
                )
            logger.debug("engine %s %s; retrying in %.1f s", place.url, failure.text, pause_s)
            await asyncio.sleep(pause_s)
            waited_s += pause_s
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _answer_of(
        self, place: Place, body: bytes, request: Request, watch: Watch | None
    ) -> Answer | Failure:
        """Send a request once; let the places learn from its answer."""
        began = time.monotonic()
        answer = await self._try(place, body, request.num_input, watch)
        if isinstance(answer, Answer):
            cached = answer.meta_info.get("cached_tokens")
            num_new = len(answer.token_ids)
            use = Use(1, num_new, request.num_input, cached if isinstance(cached, int) else 0)
            is_whole = answer.finish_reason["type"] != "abort"
            self._places.learn(place, use, seconds=time.monotonic() - began if is_whole else None)
        return answer

    async def _try(
        self, place: Place, body: bytes, num_input: int, watch: Watch | None
    ) -> Answer | Failure:
        """Send a request once."""
        assert self._session is not None, "used outside its context"
        headers = JSON | authorization(place.api_key)
        url = f"{place.url}/generate"
        try:
            async with self._session.post(url, data=body, headers=headers) as response:
                if response.status == 200 and watch is not None:
                    return await self._read_stream(response, num_input, watch)
                if response.status == 200:
                    answer = await self._parse(parse, await response.read(), self.routes)
                    self._check(answer, num_input)
                    return answer
                text = await response.text()
                return Failure(
                    f"answered {response.status}: {text[:500]}",
                    is_fault=response.status not in NOT_BEGUN,
                    is_abort=response.status == ABORTED,
                    is_refusal=response.status in REFUSED and place.is_own,
                )
        except TimeoutError:
            return Failure("was not answered in time", is_fault=True)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            # unreachable, or disconnected
            return Failure(f"does not answer: {error or type(error).__name__}", is_fault=False)
        except (aiohttp.ClientError, ValueError) as error:
            return Failure(f"answered 200 without a valid answer: {error}", is_fault=True)
        except RolloutError as error:  # the version, the routes or the read prompt are wrong
            if place.is_own:
                raise RolloutError(f"engine {place.url}: {error}") from error
            return Failure(str(error), is_fault=True)

    def _check(self, answer: Answer, num_sent: int) -> None:
        """Check that an engine read as many tokens as were sent, and has weights of this run.

        Only engines that read images have to say what they read: SGLang always does.

        Raises:
            RolloutError: the answer is to another prompt, or another run has updated the engine.
        """
        newest = max((version for version, _ in answer.version_spans), default=0)
        if self.newest_version is not None and newest > self.newest_version:
            raise RolloutError(
                f"an engine generates with weights of version {newest}, and the newest of this run are of version "
                f"{self.newest_version}; let no other run update this engine"
            )
        unsaid = num_sent if self.images is None else None
        num_read = answer.meta_info.get("prompt_tokens", unsaid)
        if answer.token_ids and num_read != num_sent:
            raise RolloutError(
                f"an engine read {num_read} tokens of a prompt that has {num_sent} with its images, so its answer is "
                "to another prompt; start engines without --allow-auto-truncate, and with the model folder and "
                "image processor of the trainer"
            )

    async def _parse(self, parse: Callable[..., Answer], *arguments: object) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._parsing, parse, *arguments)

    async def _read_stream(
        self, response: aiohttp.ClientResponse, num_input: int, watch: Watch
    ) -> Answer:
        """Read an answer that comes in events."""
        streamed = StreamedAnswer(self.routes)
        watch.begin()
        async for event in events(response.content.iter_any()):
            new = await self._parse(streamed.add, event)
            self._check(new, num_input)
            if new.token_ids:
                watch.add(new)
        return streamed.whole()
