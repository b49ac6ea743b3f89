"""A relay in front of the gateway for libraries that keep one client for all episodes.

Such a library names the conversation in a header (verifiers: ``X-Session-ID``, a random id of 128
bits) and has one key for all of them. Input: a request with that header. Output: the same request
to the gateway with the key of its episode. A conversation that is not open is refused.
"""

from __future__ import annotations

import aiohttp
from aiohttp import web

HEADER = "X-Session-ID"
# Headers that belong to one connection or that the relay replaces: of requests, then of answers.
_HOP = {"host", "content-length", "authorization", "x-api-key", "connection", "accept-encoding"}
_NOT_BACK = {"content-length", "content-encoding", "transfer-encoding", "connection"}
MAX_BODY = 256 << 20  # bytes of a request


class Relay:
    """Listens on the loopback interface of the driver's node; an asynchronous context manager."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[str, str]] = {}
        self._asked: set[str] = set()
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None
        self.url = ""

    def open(self, conversation: str, base_url: str, api_key: str) -> None:
        """Forward a conversation to an episode; ``base_url`` ends in /v1."""
        self._open[conversation] = (base_url.removesuffix("/v1"), api_key)

    def close(self, conversation: str) -> bool:
        """Refuse a conversation from now on; return whether it made a request."""
        self._open.pop(conversation, None)
        made_one = conversation in self._asked
        self._asked.discard(conversation)
        return made_one

    async def __aenter__(self) -> Relay:
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_route("*", "/{path:.*}", self._forward)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._runner is not None and self._session is not None
        await self._session.close()
        await self._runner.cleanup()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        assert self._session is not None
        conversation = request.headers.get(HEADER, "")
        endpoint = self._open.get(conversation)
        if endpoint is None:
            message = f"no episode is open for the conversation in {HEADER}"
            return web.json_response({"error": {"message": message}}, status=401)
        base_url, key = endpoint
        self._asked.add(conversation)
        headers = {
            name: value for name, value in request.headers.items() if name.lower() not in _HOP
        }
        headers["Authorization"] = f"Bearer {key}"
        async with self._session.request(
            request.method,
            f"{base_url}/{request.match_info['path']}",
            params=request.query,
            data=await request.read(),
            headers=headers,
        ) as answer:
            kept = {
                name: value
                for name, value in answer.headers.items()
                if name.lower() not in _NOT_BACK
            }
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response
