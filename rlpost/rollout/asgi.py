"""Types of the ASGI protocol (asgi.readthedocs.io, version 3), as far as middleware here uses it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypedDict

Header = tuple[bytes, bytes]


class Scope(TypedDict, total=False):
    """One connection; ``type`` is http, websocket or lifespan."""

    type: str
    method: str
    path: str
    query_string: bytes
    headers: list[Header]


class Event(TypedDict, total=False):
    """A part of a request or a response, by ``type``, such as ``http.request``."""

    type: str
    body: bytes
    more_body: bool
    status: int
    headers: list[Header]


Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
