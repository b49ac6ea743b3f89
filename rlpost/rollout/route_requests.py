"""Lets requests ask for routes of experts through a router that does not know the field for it.

Input: an ASGI application, SGLang's server. Output: the same, where a ``POST /generate`` with the label
``ROUTES_FROM`` has ``return_routed_experts`` and ``routed_experts_start_len`` instead.

sglang-router 0.3.2 parses a request into a structure and sends on what it knows: labels, but not these two.
This becomes unnecessary when the router passes ``return_routed_experts`` and ``routed_experts_start_len`` on.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from rlpost.rollout.routes import ROUTES_FROM

Receive = Callable[[], Awaitable[Any]]


class RouteRequests:
    """ASGI middleware (asgi.readthedocs.io, version 3)."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Any) -> None:
        """One connection."""
        if scope["type"] == "http" and scope["path"] == "/generate":
            scope, receive = await _translated(scope, receive)
        await self._app(scope, receive, send)


async def _translated(scope: dict[str, Any], receive: Receive) -> tuple[dict[str, Any], Receive]:
    """The connection with the translated body, which the application receives in one message."""
    pieces: list[bytes] = []
    message = await receive()
    while message["type"] == "http.request":
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            message = {"type": "http.request", "body": translated(b"".join(pieces)), "more_body": False}
            break
        message = await receive()
    waiting = [message]  # the body, or that the client has left before its end

    async def receive_translated() -> Any:
        return waiting.pop() if waiting else await receive()

    length = str(len(message.get("body", b""))).encode()
    others = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
    return {**scope, "headers": [*others, (b"content-length", length)]}, receive_translated


def translated(body: bytes) -> bytes:
    """The body of a request with the fields of SGLang in place of our label; any other body as it is."""
    if ROUTES_FROM.encode() not in body:
        return body
    fields = json.loads(body)
    labels = dict(fields.pop("custom_labels"))
    start = int(labels.pop(ROUTES_FROM))
    if labels:
        fields["custom_labels"] = labels
    return json.dumps({**fields, "return_routed_experts": True, "routed_experts_start_len": start}).encode()
