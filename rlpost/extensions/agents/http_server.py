"""The HTTP side of the gateway: routes, keys, limits of bodies, streams, errors.

Input: requests of harnesses. Output: what their episode answers, in the format of the API.

An answer is streamed when it is complete: only then are its tokens final. Until then a stream is
kept open by events, or comments, every KEEP_ALIVE_S seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import logging
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from aiohttp import web

from rlpost.errors import RolloutError
from rlpost.extensions.agents import anthropic_format, openai_format, responses_format
from rlpost.extensions.agents.aside import run_aside
from rlpost.extensions.agents.chat_messages import BadRequest
from rlpost.extensions.agents.episode import OpenEpisode
from rlpost.extensions.agents.json_values import check_depth, dumps, loads_body
from rlpost.extensions.agents.listener import admit
from rlpost.extensions.agents.requests import (
    NO_ANSWER,
    ChatRequest,
    Completion,
    Recall,
    Reply,
)

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 20
"""Of one request, and of all that an episode's clients are sending: a program that runs commands of
the policy may let it send requests."""
MAX_CONTAINERS = 1_000_000
"""Brackets in a body: Python takes up to 60 bytes for each, before a body can be refused."""
UNAUTHORIZED = 401
MAX_CONNECTIONS = 256
"""Of one episode; each is a descriptor of the driver's process."""
KEEP_ALIVE_S = 10.0
CLOSED_S = 2.0
"""After the end of an episode, in which its requests in progress are refused with an answer."""
END_EPISODE = web.AppKey[Callable[[str], None]]("end_episode")
"""Of the application: what to call with the key of an episode that has ended, in the loop of the
server."""
REPEATED_HEADER = "x-stainless-retry-count"
"""Request header with the number of a repetition, by the clients of OpenAI and Anthropic."""
OVERRIDDEN_HEADER = "x-rlpost-overridden"
"""Response header with the sampling parameters of the request that had no effect."""
DROPPED_HEADER = "x-rlpost-dropped-tools"
"""Response header with the kinds of tools that were left out, because a server would run them."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(episodes: Mapping[str, OpenEpisode]) -> web.Application:
    """Return the application.

    ``episodes``: the open ones, by the ID of their keys ``PREFIX-ID-SECRET``; read at each request.
    """
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors])
    routes = _Routes(episodes)
    app[END_EPISODE] = routes.end_episode
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

    read: Callable[[Mapping[str, object], Recall], ChatRequest]
    body: Callable[[Reply], Mapping[str, object]]
    events: Callable[[Reply, int], Iterable[Mapping[str, object]]]
    end: bytes = b""  # after the last event of a stream
    waiting: Callable[[Reply, int], Mapping[str, object]] | None = None
    """Event ``number`` before the answer, of a reply without it; None for a comment."""

    def content(self, reply: Reply, num_sent: int) -> bytes:
        """Return the body of a response, or the events of a stream after ``num_sent``."""
        if not reply.request.is_stream:
            return dumps(self.body(reply))
        return b"".join(_event(event) for event in self.events(reply, num_sent)) + self.end


class _KeepAlive:
    """What a stream sends before its answer: events, and comments where none may be sent."""

    def __init__(self, api: _Api) -> None:
        self._api = api
        self._lock = threading.Lock()  # ``end`` is called in another thread
        self._reply: Reply | None = None
        self._num_sent = 0

    def begin(self, reply: Reply) -> None:
        """Send events from now on; ``reply`` has no answer yet."""
        self._reply = reply

    def end(self) -> int:
        """Send comments from now on; return the number of events that were sent."""
        with self._lock:
            self._reply = None
            return self._num_sent

    def content(self) -> bytes:
        """Return the next event or comment."""
        with self._lock:
            if self._reply is None or self._api.waiting is None:
                return b": the answer is being generated\n\n"
            event = self._api.waiting(self._reply, self._num_sent)
            self._num_sent += 1
        return _event(event)


_CHAT = _Api(
    openai_format.chat_request,
    openai_format.chat_completion,
    lambda reply, _: openai_format.chat_chunks(reply),
    end=b"data: [DONE]\n\n",
)
_RESPONSES = _Api(
    responses_format.responses_request,
    responses_format.response_body,
    responses_format.response_events,
    waiting=responses_format.waiting_event,
)
_MESSAGES = _Api(
    anthropic_format.messages_request,
    anthropic_format.message_body,
    lambda reply, _: anthropic_format.message_events(reply),
    waiting=lambda *_: {"type": "ping"},
)


class _Routes:
    def __init__(self, episodes: Mapping[str, OpenEpisode]) -> None:
        self._episodes = episodes
        self._created = int(time.time())
        self._seen_overridden: set[str] = set()
        self._seen_dropped: set[str] = set()
        self._pending = Counter[str]()  # bytes of bodies, by the key of their episode
        self._connections = weakref.WeakKeyDictionary[
            OpenEpisode, weakref.WeakSet[asyncio.Transport]
        ]()
        # Connections with a request, by the key of its episode.
        self._busy = defaultdict[str, list[asyncio.Transport]](list)

    def end_episode(self, key: str) -> None:
        """Abort the connections whose requests to a closed episode do not end.

        A client may never send the rest of a body, or read an answer. Idle connections stay, for
        the client may share them among episodes.
        """

        def abort() -> None:
            for transport in list(self._busy.get(key, ())):
                transport.abort()

        # The timer has the key alone: it must not keep the episode.
        if key in self._busy:
            asyncio.get_running_loop().call_later(CLOSED_S, abort)

    @contextlib.contextmanager
    def _serving(self, request: web.Request, episode: OpenEpisode) -> Iterator[None]:
        """Count a connection of an episode as busy."""
        transport = request.transport
        if transport is None:
            yield
            return
        key = episode.api_key
        self._busy[key].append(transport)
        try:
            yield
        finally:
            self._busy[key].remove(transport)
            if not self._busy[key]:
                del self._busy[key]

    def answers(self, api: _Api) -> Handler:
        """Return the handler that answers the requests of one API."""

        async def handle(request: web.Request) -> web.StreamResponse:
            episode = self._episode(request)
            with self._serving(request, episode):
                return await answer(request, episode)

        async def answer(request: web.Request, episode: OpenEpisode) -> web.StreamResponse:
            asked = await self._read(request, episode, api.read)
            contents: list[bytes] = []
            keep_alive, created = _KeepAlive(api), int(time.time())

            def reply_of(completion: Completion) -> Reply:
                return Reply(
                    asked,
                    completion,
                    model=episode.model,
                    created=created,
                    token_bytes=episode.token_bytes,
                )

            def begin(completion_id: str) -> None:
                keep_alive.begin(reply_of(Completion(completion_id, 0, (NO_ANSWER,), 0)))

            def write(completion: Completion) -> None:
                contents.append(api.content(reply_of(completion), keep_alive.end()))

            is_repeated = request.headers.get(REPEATED_HEADER, "0") != "0"
            answering = asyncio.ensure_future(
                episode.answer(
                    asked, on_begin=begin, before_recording=write, is_repeated=is_repeated
                )
            )
            headers = self._headers(asked)
            try:
                if asked.is_stream:
                    return await _stream(request, api, answering, contents, keep_alive, headers)
                await answering
                response = _response(contents[-1], headers)
                # Sent here, so that a lost connection is an exception of this block.
                await response.prepare(request)
                await response.write_eof()
                return response
            except BaseException:  # cancelled if the client disconnects
                if _has_answered(answering):
                    await asyncio.shield(episode.retract(answering.result()))
                raise
            finally:
                answering.cancel()
                del answering  # as in ``run_aside``: its error refers to this frame

        return handle

    async def count_tokens(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/messages/count_tokens."""
        episode = self._episode(request)
        read = functools.partial(anthropic_format.messages_request, needs_answer=False)
        with self._serving(request, episode):
            count = await episode.count_tokens(await self._read(request, episode, read))
        return _json_response({"input_tokens": count})

    async def models(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/models."""
        only = openai_format.model_body(self._episode(request).model, self._created)
        return _json_response({"object": "list", "data": [only]})

    async def model(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/models/NAME."""
        episode = self._episode(request)
        if request.match_info["name"] != episode.model:
            raise BadRequest(f"the only model is {episode.model!r}", status=404)
        return _json_response(openai_format.model_body(episode.model, self._created))

    def _episode(self, request: web.Request) -> OpenEpisode:
        """Return the episode of a request's key. Raises BadRequest (401)."""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        # Clients may send both; the scheme is case-insensitive (RFC 9110, section 11.1).
        keys = [request.headers.get("x-api-key", "")]
        if scheme.lower() == "bearer":
            keys.append(token.strip())
        for key in keys:
            episode_id = key.rpartition("-")[0].rpartition("-")[2]
            episode = self._episodes.get(episode_id)
            # The id is public; only the whole key grants access, and is compared in constant time.
            # aiohttp decodes bytes above 127 to surrogates.
            sent = key.encode("utf-8", "surrogateescape")
            if episode is not None and hmac.compare_digest(episode.api_key.encode(), sent):
                self._admit(request, episode)
                return episode
        raise BadRequest("the key belongs to no open episode", status=401, code="invalid_api_key")

    def _admit(self, request: web.Request, episode: OpenEpisode) -> None:
        """Let the connection of an episode stay. Raises BadRequest (429) if it has too many."""
        transport = request.transport
        if transport is None:
            return
        known = self._connections.setdefault(episode, weakref.WeakSet())
        if transport not in known:
            if sum(not each.is_closing() for each in known) >= MAX_CONNECTIONS:
                raise BadRequest(
                    f"the episode has {MAX_CONNECTIONS} connections; close some", status=429
                )
            known.add(transport)
        admit(request)

    def _headers(self, asked: ChatRequest) -> dict[str, str]:
        for field in set(asked.overridden) - self._seen_overridden:
            logger.info(
                "a harness sets %s without effect: the policy samples with the run's parameters and "
                "reads all messages",
                field,
            )
            self._seen_overridden.add(field)
        for kind in set(asked.dropped_tools) - self._seen_dropped:
            logger.warning(
                "a harness offers the tool %s, which a server would run; the policy does not see it",
                kind,
            )
            self._seen_dropped.add(kind)
        values = {OVERRIDDEN_HEADER: asked.overridden, DROPPED_HEADER: asked.dropped_tools}
        return {name: ", ".join(words) for name, words in values.items() if words}

    async def _content(self, request: web.Request, episode: OpenEpisode) -> bytes:
        """Read a body, while those of the episode have at most MAX_BODY_BYTES together (429)."""
        content, key = bytearray(), episode.api_key
        try:
            async for part in request.content.iter_any():
                content += part
                self._pending[key] += len(part)
                if len(content) > MAX_BODY_BYTES:
                    raise web.HTTPRequestEntityTooLarge(MAX_BODY_BYTES, len(content))
                if self._pending[key] > MAX_BODY_BYTES:
                    text = (
                        f"bodies of more than {MAX_BODY_BYTES >> 20} MiB are being sent at a time"
                    )
                    raise BadRequest(f"{text}; send one after the other", status=429)
            return bytes(content)
        finally:
            self._pending[key] -= len(content)
            self._pending += Counter()  # drops those of 0

    async def _read(
        self,
        request: web.Request,
        episode: OpenEpisode,
        convert: Callable[[Mapping[str, object], Recall], ChatRequest],
    ) -> ChatRequest:
        """Return the request of a body. Raises BadRequest."""
        # before it is read
        episode.check_size(request.content_length or 0, may_have_images=True)
        content = await self._content(request, episode)
        size = len(content)
        episode.check_size(size, may_have_images=True)
        asked = await run_aside(lambda: convert(_parse(content), episode.recall), num_bytes=size)
        episode.check_size(size - asked.image_chars)
        return replace(asked, size=max(size, asked.num_chars()))


def _parse(content: bytes) -> Mapping[str, object]:
    if content.count(b"[") + content.count(b"{") > MAX_CONTAINERS:
        raise BadRequest(f"the body has more than {MAX_CONTAINERS} arrays and objects")
    try:
        body = loads_body(content)
        check_depth(body)
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(body, Mapping):
        raise BadRequest("the body must be a JSON object")
    return body


async def _stream(
    request: web.Request,
    api: _Api,
    answering: asyncio.Future[Completion],
    contents: list[bytes],
    keep_alive: _KeepAlive,
    headers: dict[str, str],
) -> web.StreamResponse:
    """Send server-sent events; ``contents`` holds them when the answer is complete.

    An error within the first KEEP_ALIVE_S seconds has its HTTP status; a later one is an event,
    because a second response would break the framing of the first.
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
            await response.write(keep_alive.content())
            await asyncio.wait([answering], timeout=KEEP_ALIVE_S)
        try:
            answering.result()
            last = contents[-1]
        except Exception as error:
            refused = _refusal(request, error)[1]
            # Events of chat completions have no type, those of the other APIs always have one.
            last = _event(refused if api is _CHAT else {"type": "error", **refused})
        await response.write(last)
        await response.write_eof()
        return response
    finally:
        del answering  # as in ``run_aside``


def _has_answered(answering: asyncio.Future[Completion]) -> bool:
    """Whether an answer was recorded."""
    return answering.done() and not answering.cancelled() and answering.exception() is None


def _json_response(body: object) -> web.StreamResponse:
    return _response(dumps(body))


def _event(content: Mapping[str, object]) -> bytes:
    """Return one server-sent event; its name is the type of the content."""
    name = b"event: %b\n" % str(content["type"]).encode() if "type" in content else b""
    return name + b"data: %b\n\n" % dumps(content)


def _refusal(request: web.Request, error: Exception) -> tuple[int, dict[str, object]]:
    """Return status and body for an error, in the format of the API; log an unexpected one."""
    status = 500
    code: str | None = "engine_error"
    param: str | None = None
    text = str(error)
    if isinstance(error, BadRequest):
        status, code, param = error.status, error.code, error.param
    elif isinstance(error, web.HTTPException):
        status, code = error.status, None
    elif not isinstance(error, RolloutError):
        logger.error("%s %s failed", request.method, request.path, exc_info=error)
        code, text = "gateway_error", "the gateway failed; see the driver's log"
    if request.path.startswith("/v1/messages"):
        return status, anthropic_format.error_body(text, status=status)
    return status, openai_format.error_body(text, status=status, code=code, param=param)


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ConnectionError:  # the client has left
        raise
    except Exception as error:
        status, body = _refusal(request, error)
        response = _response(dumps(body), status=status)
        if status == UNAUTHORIZED:
            response.force_close()  # its body is not read
        return response


def _response(
    body: bytes, headers: dict[str, str] | None = None, *, status: int = 200
) -> web.StreamResponse:
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)
