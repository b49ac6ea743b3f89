"""Listen for HTTP with a bound on connections that have shown no key.

Anyone who reaches the port may connect, and a connection is a descriptor of the driver's process,
which needs them for its journal and its engines. A *stranger* is a connection without a request
that had a valid key: at most MAX_STRANGERS exist at a time, the oldest goes for a new one, and each
ends after PROOF_S seconds. ``admit`` makes it a client. A malformed request is answered and counted.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler

from common.addresses import http_url
from rlpost.errors import RolloutError

logger = logging.getLogger(__name__)

MAX_STRANGERS = 1024
PROOF_S = 20.0
GRACE_S = 2.0
"""After a loop that was held for PROOF_S, in which a request that has arrived is read."""
IDLE_S = 75.0
"""Of a connection between two requests; clients keep idle ones for 5 to 15 s."""
LOG_S = 60.0
_ADMIT = web.AppKey("admit", object)


class Strangers:
    """The connections of one listener that have shown no key."""

    def __init__(self, limit: int = MAX_STRANGERS, proof_s: float = PROOF_S) -> None:
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._limit = limit if descriptors < 0 else max(16, min(limit, descriptors // 4))
        self._proof_s = proof_s
        self._timers: dict[asyncio.BaseTransport, asyncio.TimerHandle] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._timers)

    def watch(self, server: web.Server) -> None:
        """Bound the connections of a server that does not listen yet."""
        add, remove = server.connection_made, server.connection_lost

        def connection_made(handler: RequestHandler, transport: asyncio.Transport) -> None:
            add(handler, transport)
            self._add(transport)

        def connection_lost(handler: RequestHandler, exc: BaseException | None = None) -> None:
            transport = handler.transport
            if transport is not None:
                self.admit(transport)
            remove(handler, exc)

        # aiohttp calls these two for each connection, and has no setting for a bound.
        server.connection_made = connection_made  # type: ignore[method-assign]
        server.connection_lost = connection_lost  # type: ignore[method-assign]

    def _add(self, transport: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        self._timers[transport] = loop.call_later(
            self._proof_s, lambda: self._expire(transport, loop)
        )
        if len(self._timers) > self._limit:
            self._abort(next(iter(self._timers)))

    def _expire(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._timers[transport] = loop.call_later(GRACE_S, lambda: self._abort(transport))

    def _abort(self, transport: asyncio.BaseTransport) -> None:
        self.admit(transport)
        assert isinstance(transport, asyncio.WriteTransport)
        transport.abort()

    def admit(self, transport: asyncio.BaseTransport | None) -> None:
        """Let a connection stay, whose request had a valid key."""
        if transport is not None and (timer := self._timers.pop(transport, None)) is not None:
            timer.cancel()


def admit(request: web.Request) -> None:
    """Let the connection of a request with a valid key stay."""
    strangers = request.app.get(_ADMIT)
    if isinstance(strangers, Strangers):
        strangers.admit(request.transport)


async def start_listener(
    app: web.Application,
    host: str,
    port: int = 0,
    *,
    shutdown_s: float,
    strangers: Strangers | None = None,
) -> tuple[web.AppRunner, str]:
    """Serve an application, whose handlers call ``admit``; return its runner and URL.

    A handler is cancelled when its client disconnects. Raises RolloutError if the address is taken.
    """
    strangers = Strangers() if strangers is None else strangers
    app[_ADMIT] = strangers
    runner = web.AppRunner(
        app,
        access_log=None,
        handler_cancellation=True,
        keepalive_timeout=IDLE_S,
        shutdown_timeout=shutdown_s,
        logger=_quiet_logger(),
    )
    await runner.setup()
    try:
        assert runner.server is not None
        strangers.watch(runner.server)
        await web.TCPSite(runner, host, port, backlog=4096).start()
    except OSError as error:
        await runner.cleanup()
        raise RolloutError(
            f"the gateway cannot listen at {host}:{port}: {error}; give an address of this host "
            "and a free port"
        ) from error
    return runner, http_url(host, runner.addresses[0][1])


class _Malformed(logging.Filter):
    """Turns tracebacks of malformed requests into one line a minute with their number."""

    def __init__(self) -> None:
        super().__init__()
        self._count, self._next = 0, 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        """See ``logging.Filter``."""
        error: Any = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError):
            return True
        self._count += 1
        now = time.monotonic()
        if now < self._next:
            return False
        record.exc_info = record.exc_text = None
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        record.msg = "%d malformed requests were refused; the last one: %s: %.200r"
        record.args = (self._count, type(error).__name__, str(error.message))
        self._count, self._next = 0, now + LOG_S
        return True


def _quiet_logger() -> logging.Logger:
    quiet = logging.getLogger(f"{__name__}.http")
    if not quiet.filters:
        quiet.addFilter(_Malformed())
    return quiet
