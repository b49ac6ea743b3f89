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
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import orjson
from aiohttp import web

from rlpost.agents import anthropic_format, openai_format, responses_format
from rlpost.agents.chat_messages import BadRequest
from rlpost.agents.episode import OpenEpisode
from rlpost.agents.requests import ChatRequest, Completion, Reply
from rlpost.errors import RolloutError

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 20
KEEP_ALIVE_S = 10.0
OVERRIDDEN_HEADER = "x-rlpost-overridden"
"""Response header with the sampling parameters of the request that had no effect."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(episodes: Mapping[str, OpenEpisode]) -> web.Application:
    """Return the application.

    ``episodes``: the open ones, by the ID of their keys ``PREFIX-ID-SECRET``; read at each request.
    """
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors])
    routes = _Routes(episodes)
    app.router.add_post("/v1/chat/completions", routes.answers(_CHAT))
    app.router.add_get("/v1/models", routes.models)
    app.router.add_get("/v1/models/{name:.+}", routes.model)
    app.router.add_post("/v1/responses", routes.answers(_RESPONSES))
    app.router.add_post("/v1/messages", routes.answers(_MESSAGES))
    app.router.add_post("/v1/messages/count_tokens", routes.count_tokens)
    return app


@dataclass(frozen=True)
class _Api:
    """One API: how a request is read, and how a reply is written as one body or as events."""

    read: Callable[[Mapping[str, object]], ChatRequest]
    body: Callable[[Reply], Mapping[str, object]]
    events: Callable[[Reply], Iterable[Mapping[str, object]]]
    end: bytes = b""  # after the last event of a stream


_CHAT = _Api(
    openai_format.chat_request,
    openai_format.chat_completion,
    openai_format.chat_chunks,
    end=b"data: [DONE]\n\n",
)
_RESPONSES = _Api(
    responses_format.responses_request,
    responses_format.response_body,
    responses_format.response_events,
)
_MESSAGES = _Api(
    anthropic_format.messages_request,
    anthropic_format.message_body,
    anthropic_format.message_events,
)


class _Routes:
    def __init__(self, episodes: Mapping[str, OpenEpisode]) -> None:
        self._episodes = episodes
        self._created = int(time.time())
        self._seen_overridden: set[str] = set()

    def answers(self, api: _Api) -> Handler:
        """Return the handler that answers the requests of one API."""

        async def handle(request: web.Request) -> web.StreamResponse:
            episode = self._episode(request)
            asked = api.read(await _body(request))
            reply = partial(
                Reply,
                asked,
                model=episode.model,
                created=int(time.time()),
                token_text=episode.token_text,
            )
            answering = asyncio.ensure_future(episode.answer(asked))
            headers = self._headers(asked)
            if asked.is_stream:
                return await _stream(request, api, answering, reply, headers)
            completion = await answering  # cancelled with the handler if the client disconnects
            return _json(api.body(reply(completion)), headers)

        return handle

    async def count_tokens(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/messages/count_tokens."""
        episode = self._episode(request)
        asked = anthropic_format.messages_request(await _body(request))
        return _json({"input_tokens": episode.count_tokens(asked)})

    async def models(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/models."""
        only = openai_format.model_body(self._episode(request).model, self._created)
        return _json({"object": "list", "data": [only]})

    async def model(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/models/NAME."""
        episode = self._episode(request)
        if request.match_info["name"] != episode.model:
            raise BadRequest(f"the only model is {episode.model!r}", status=404)
        return _json(openai_format.model_body(episode.model, self._created))

    def _episode(self, request: web.Request) -> OpenEpisode:
        """Return the episode of a request's key. Raises BadRequest (401)."""
        given = request.headers.get("Authorization", "")
        key = given.removeprefix("Bearer ").strip() or request.headers.get("x-api-key", "")
        episode_id = key.rpartition("-")[0].rpartition("-")[2]
        episode = self._episodes.get(episode_id)
        # The id is public; only the whole key grants access, and is compared in constant time.
        known = "" if episode is None else episode.api_key
        if episode is None or not hmac.compare_digest(known.encode(), key.encode()):
            raise BadRequest(
                "the key belongs to no open episode", status=401, code="invalid_api_key"
            )
        return episode

    def _headers(self, asked: ChatRequest) -> dict[str, str]:
        for field in set(asked.overridden) - self._seen_overridden:
            logger.info("a harness sets %s; the policy samples with the run's value", field)
            self._seen_overridden.add(field)
        return {OVERRIDDEN_HEADER: ", ".join(asked.overridden)} if asked.overridden else {}


async def _body(request: web.Request) -> Mapping[str, object]:
    content = await request.read()
    try:
        body = orjson.loads(content)
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(body, Mapping):
        raise BadRequest("the body must be a JSON object")
    return body


async def _stream(
    request: web.Request,
    api: _Api,
    answering: asyncio.Future[Completion],
    reply: Callable[[Completion], Reply],
    headers: dict[str, str],
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
        while not answering.done():
            await response.write(b": the answer is being generated\n\n")
            await asyncio.wait([answering], timeout=KEEP_ALIVE_S)
        try:
            events = [_event(event) for event in api.events(reply(answering.result()))]
            await response.write(b"".join(events) + api.end)
        except (BadRequest, RolloutError) as error:
            refused = _refusal(request, error)[1]
            # Events of chat completions have no type, those of the other APIs always have one.
            await response.write(_event(refused if api is _CHAT else {"type": "error", **refused}))
        await response.write_eof()
        return response
    finally:
        answering.cancel()


def _event(content: Mapping[str, object]) -> bytes:
    """Return one server-sent event; its name is the type of the content."""
    name = b"event: %b\n" % str(content["type"]).encode() if "type" in content else b""
    return name + b"data: %b\n\n" % orjson.dumps(content)


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
