"""The HTTP side of the gateway: routes, keys, limits of bodies, streams, errors.

Input: requests of harnesses. Output: what their episode answers, in the format of the API.

An answer is streamed when it is complete: only then are its tokens final. Until then a stream is
kept open by comments.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial

import orjson
from aiohttp import web

from rlpost.agents import anthropic_format, openai_format, responses_format
from rlpost.agents.episode import OpenEpisode
from rlpost.agents.messages import BadRequest
from rlpost.agents.requests import ChatRequest, Completion
from rlpost.errors import RolloutError

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 20
KEEP_ALIVE_S = 10.0
OVERRIDDEN_HEADER = "x-rlpost-overridden"
"""Response header with the sampling parameters of the request that had no effect."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Episodes:
    """The open episodes by key. Safe in all threads: a dict is changed by single operations."""

    def __init__(self) -> None:
        self._by_id: dict[str, OpenEpisode] = {}

    def add(self, episode_id: str, episode: OpenEpisode) -> None:
        """Admit an episode under the key ``PREFIX-ID-SECRET``."""
        self._by_id[episode_id] = episode

    def remove(self, episode_id: str) -> None:
        """Refuse its key from now on."""
        self._by_id.pop(episode_id, None)

    def of(self, key: str) -> OpenEpisode:
        """Return the episode of a key. Raises BadRequest (401)."""
        episode_id = key.rpartition("-")[0].rpartition("-")[2]
        episode = self._by_id.get(episode_id)
        # The id is no secret; the whole key is compared in constant time.
        known = "" if episode is None else episode.api_key
        if episode is None or not hmac.compare_digest(known.encode(), key.encode()):
            raise BadRequest(
                "the key belongs to no open episode", status=401, code="invalid_api_key"
            )
        return episode


def make_app(episodes: Episodes) -> web.Application:
    """Return the application."""
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors])
    routes = _Routes(episodes)
    app.router.add_post("/v1/chat/completions", routes.chat_completions)
    app.router.add_get("/v1/models", routes.models)
    app.router.add_get("/v1/models/{name:.+}", routes.model)
    app.router.add_post("/v1/responses", routes.responses)
    app.router.add_post("/v1/messages", routes.messages)
    app.router.add_post("/v1/messages/count_tokens", routes.count_tokens)
    return app


class _Routes:
    def __init__(self, episodes: Episodes) -> None:
        self._episodes = episodes
        self._created = int(time.time())
        self._seen_overridden: set[str] = set()

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        episode = self._episode(request)
        asked = openai_format.chat_request(await _body(request))
        created = int(time.time())
        token_text = episode.token_text

        def events(completion: Completion) -> Iterable[bytes]:
            chunks = openai_format.chat_chunks(
                completion, asked, model=episode.model, created=created, token_text=token_text
            )
            for chunk in chunks:
                yield b"data: %b\n\n" % orjson.dumps(chunk)
            yield b"data: [DONE]\n\n"

        def failed(body: dict[str, object]) -> bytes:
            return b"data: %b\n\n" % orjson.dumps(body)

        def body(completion: Completion) -> object:
            return openai_format.chat_completion(
                completion, asked, model=episode.model, created=created, token_text=token_text
            )

        return await self._respond(request, episode, asked, events=events, failed=failed, body=body)

    async def responses(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/responses."""
        episode = self._episode(request)
        asked = responses_format.responses_request(await _body(request))
        created = int(time.time())

        def events(completion: Completion) -> Iterable[bytes]:
            for event in responses_format.response_events(
                completion, asked, model=episode.model, created=created
            ):
                yield b"event: %b\ndata: %b\n\n" % (
                    str(event["type"]).encode(),
                    orjson.dumps(event),
                )

        def failed(body: dict[str, object]) -> bytes:
            return b"event: error\ndata: %b\n\n" % orjson.dumps({"type": "error", **body})

        def body(completion: Completion) -> object:
            return responses_format.response_body(
                completion, asked, model=episode.model, created=created
            )

        return await self._respond(request, episode, asked, events=events, failed=failed, body=body)

    async def messages(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/messages."""
        episode = self._episode(request)
        asked = anthropic_format.messages_request(await _body(request))

        def events(completion: Completion) -> Iterable[bytes]:
            for name, event in anthropic_format.message_events(completion, model=episode.model):
                yield b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(event))

        def failed(body: dict[str, object]) -> bytes:
            return b"event: error\ndata: %b\n\n" % orjson.dumps(body)

        body = partial(anthropic_format.message_body, model=episode.model)
        return await self._respond(request, episode, asked, events=events, failed=failed, body=body)

    async def _respond(
        self,
        request: web.Request,
        episode: OpenEpisode,
        asked: ChatRequest,
        *,
        events: Callable[[Completion], Iterable[bytes]],
        failed: Callable[[dict[str, object]], bytes],
        body: Callable[[Completion], object],
    ) -> web.StreamResponse:
        """Send the episode's answer: as ``events`` if the request wants a stream, else as JSON."""
        answering = asyncio.ensure_future(episode.answer(asked))
        headers = self._headers(asked)
        if asked.is_stream:
            return await _stream(request, answering, headers, events, failed)
        return _json(body(await _awaited(answering)), headers)

    async def count_tokens(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/messages/count_tokens."""
        episode = self._episode(request)
        asked = anthropic_format.messages_request(await _body(request))
        return _json({"input_tokens": episode.count_tokens(asked)})

    async def models(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/models."""
        return _json(openai_format.models(self._episode(request).model, self._created))

    async def model(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/models/NAME."""
        episode = self._episode(request)
        if request.match_info["name"] != episode.model:
            raise BadRequest(f"the only model is {episode.model!r}", status=404)
        return _json(openai_format.models(episode.model, self._created)["data"][0])

    def _episode(self, request: web.Request) -> OpenEpisode:
        given = request.headers.get("Authorization", "")
        key = given.removeprefix("Bearer ").strip() or request.headers.get("x-api-key", "")
        return self._episodes.of(key)

    def _headers(self, asked: ChatRequest) -> dict[str, str]:
        for field in set(asked.overridden) - self._seen_overridden:
            logger.info("a harness sets %s; the policy samples with the run's value", field)
            self._seen_overridden.add(field)
        return {OVERRIDDEN_HEADER: ", ".join(asked.overridden)} if asked.overridden else {}


async def _body(request: web.Request) -> object:
    content = await request.read()
    try:
        return orjson.loads(content)
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error


async def _awaited(answering: asyncio.Future[Completion]) -> Completion:
    """Return the answer; cancel it if the client disconnects."""
    try:
        return await answering
    finally:
        answering.cancel()


async def _stream(
    request: web.Request,
    answering: asyncio.Future[Completion],
    headers: dict[str, str],
    events: Callable[[Completion], Iterable[bytes]],
    failed: Callable[[dict[str, object]], bytes],
) -> web.StreamResponse:
    """Send server-sent events.

    An error within the first KEEP_ALIVE_S seconds has its HTTP status; a later one is an event.
    """
    try:
        await asyncio.wait([answering], timeout=KEEP_ALIVE_S)
        if answering.done():
            answering.result()  # raises
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **headers}
        )
        await response.prepare(request)
        async for piece in _pieces(request, answering, events, failed):
            await response.write(piece)
        await response.write_eof()
        return response
    finally:
        answering.cancel()


async def _pieces(
    request: web.Request,
    answering: asyncio.Future[Completion],
    events: Callable[[Completion], Iterable[bytes]],
    failed: Callable[[dict[str, object]], bytes],
) -> AsyncIterator[bytes]:
    while not answering.done():
        yield b": the answer is being generated\n\n"
        await asyncio.wait([answering], timeout=KEEP_ALIVE_S)
    try:
        completion = answering.result()
    except (BadRequest, RolloutError) as error:
        yield failed(_refusal(request, error)[1])
        return
    yield b"".join(events(completion))


def _refusal(request: web.Request, error: Exception) -> tuple[int, dict[str, object]]:
    """Return status and body for an error, in the format of the API."""
    status = 500
    code: str | None = "engine_error"
    param: str | None = None
    if isinstance(error, BadRequest):
        status, code, param = error.status, error.code, error.param
    elif isinstance(error, web.HTTPException):
        status, code = error.status, None
    text = str(error)
    if request.path.startswith("/v1/messages"):
        return status, anthropic_format.error_body(text, status=status)
    return status, openai_format.error_body(text, status=status, code=code, param=param)


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except (BadRequest, RolloutError, web.HTTPException) as error:
        status, body = _refusal(request, error)
        return _json(body, status=status)
    except Exception:
        logger.exception("%s %s failed", request.method, request.path)
        status, body = _refusal(request, RolloutError("the gateway failed; see the driver's log"))
        return _json(body, status=status)


def _json(
    body: object, headers: dict[str, str] | None = None, *, status: int = 200
) -> web.StreamResponse:
    return web.Response(
        body=orjson.dumps(body), status=status, content_type="application/json", headers=headers
    )
