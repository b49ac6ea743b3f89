"""Sandboxes of other nodes: a pool over all sandbox servers of a run.

Input: RUN/sandboxes with the records of the servers. A sandbox goes to the node with the most free
places; waiting callers are served in order. A node whose server fails is avoided for AVOID_SECONDS;
afterwards it is used again while its record is renewed.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from common.addresses import keep_alive
from rlpost.durable.daemon_threads import in_daemon
from rlpost.errors import ConfigError
from rlpost.extensions.agents.sandbox import wire
from rlpost.extensions.agents.sandbox.inner.files import Request
from rlpost.extensions.agents.sandbox.protocol import Ended, Limits, Result, Sandbox, SandboxLost
from rlpost.extensions.agents.sandbox.registry import (
    BEAT_SECONDS,
    STALE_SECONDS,
    NodeRecord,
    Registry,
    SandboxLease,
)

CLOSED = "the pool of sandboxes is closed"
AVOID_SECONDS = 10.0  # time for which a node is avoided after a failure


class RemoteSandbox(Sandbox):
    """A sandbox of another node, over one connection to a server."""

    def __init__(
        self,
        limits: Limits,
        node: str,
        writer: asyncio.StreamWriter,
    ) -> None:
        super().__init__(limits, name=node)  # until the server has chosen the sandbox
        self.node = node
        self._writer = writer
        self._wire: wire.Wire
        self._busy = asyncio.Lock()
        self._open = True

    @classmethod
    async def connect(
        cls, node: NodeRecord, secret: bytes, limits: Limits, image: str | None = None
    ) -> RemoteSandbox:
        """Wait for a sandbox of a node. Raises ``SandboxLost``, ConfigError for its image."""
        try:
            # Not ``wait_for``: that of Python 3.11 drops a cancellation that arrives with the result.
            async with asyncio.timeout(wire.SILENCE_SECONDS):
                reader, writer = await asyncio.open_connection(node.host, node.port)
        except (OSError, TimeoutError) as error:
            raise SandboxLost(f"sandbox server {node.name} ({node.host}): {error}") from error
        sandbox = cls(limits, node.name, writer)
        try:
            keep_alive(writer.get_extra_info("socket"))
            address = (node.host, node.port)
            sandbox._wire = await wire.greet(reader, writer, secret, "driver", address)
            await sandbox._wire.send({"limits": asdict(limits), "image": image})
            header, _ = await sandbox._answer()
            if "refused" in header:
                raise ConfigError(f"sandbox server {node.name}: {header['refused']}")
            sandbox.name = str(header["ready"])
        except BaseException as error:
            await sandbox.close()
            if isinstance(error, OSError | EOFError | wire.PeerRefused):
                raise SandboxLost(f"sandbox server {node.name}: {error}") from error
            raise
        return sandbox

    async def perform(self, request: Request, stdin: bytes = b"") -> Result:
        """Let the server perform a request; see ``Sandbox.perform``."""
        async with self._busy:
            if not self._open:
                raise SandboxLost(f"sandbox {self.name} is closed")
            try:
                await self._wire.send({"request": request}, stdin)
                header, body = await self._answer()
            except (OSError, EOFError, wire.PeerRefused) as error:
                await self.close()
                raise SandboxLost(f"sandbox {self.name}: connection lost: {error}") from error
            except (SandboxLost, asyncio.CancelledError):
                await self.close()
                raise
        values, size = dict(header["result"]), header["stdout_size"]
        values["ended"] = Ended(values["ended"])
        return Result(stdout=body[:size], stderr=body[size:], **values)

    async def _answer(self) -> tuple[wire.Header, bytes]:
        """Return the next answer; heartbeats only extend the wait."""
        while True:
            header, body = await self._wire.receive(wire.SILENCE_SECONDS)
            if "lost" in header:
                raise SandboxLost(header["lost"])
            if "beat" not in header:
                return header, body

    async def close(self) -> None:
        """End the sandbox; the server sees the end of the connection."""
        self._open = False
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), 1.0)
        self._has_ended()


class RemotePool:
    """Implements ``Pool`` over the sandbox servers of a run."""

    def __init__(self, run_folder: Path, limits: Limits, *, wait_seconds: float = 600.0) -> None:
        self.limits = limits
        self._registry = Registry(run_folder)
        self._wait = wait_seconds
        self._seen: dict[str, tuple[NodeRecord, float]] = {}
        self._avoided: dict[str, float] = {}
        self._used: collections.Counter[str] = collections.Counter()
        self._waiting: collections.deque[asyncio.Future[NodeRecord]] = collections.deque()
        self._beats: asyncio.Task[None] | None = None
        self._secret = b""
        self._closed = False

    async def __aenter__(self) -> RemotePool:
        await in_daemon(self._registry.create)
        self._secret = await in_daemon(self._registry.secret)
        self._beats = asyncio.ensure_future(self._beat())
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _beat(self) -> None:
        """Renew the lease and read the records."""
        previous = await in_daemon(self._registry.lease)
        number = previous.number if previous is not None else 0
        while True:
            number += 1
            lease = SandboxLease(number)
            with contextlib.suppress(OSError):
                await in_daemon(lambda: self._registry.renew(lease))  # noqa: B023
                self.store_records(await in_daemon(self._registry.nodes), time.monotonic())
            self._serve_waiting()
            await asyncio.sleep(BEAT_SECONDS / 4 if self._waiting else BEAT_SECONDS)

    def store_records(self, records: Sequence[NodeRecord], now: float) -> None:
        """Store the records that were read at ``now`` (seconds of this process's clock)."""
        kept: dict[str, tuple[NodeRecord, float]] = {}
        for record in records:
            before = self._seen.get(record.name)
            renewed = before is None or before[0].number != record.number
            since = now if renewed or before is None else before[1]
            if now - since < STALE_SECONDS:
                kept[record.name] = (record, since)
        self._seen = kept

    def choose(self, now: float) -> NodeRecord | None:
        """Return the node with the most free places, None when all are full."""
        free = {
            name: record.places - self._used[name]
            for name, (record, _) in self._seen.items()
            if self._avoided.get(name, 0.0) <= now
        }
        best = max(free, key=lambda name: free[name], default=None)
        return self._seen[best][0] if best is not None and free[best] > 0 else None

    async def acquire(self, limits: Limits | None = None, image: str | None = None) -> Sandbox:
        """Wait for a fresh sandbox on any node; see ``Pool.acquire``."""
        node = await self._place()
        try:
            connecting = RemoteSandbox.connect(node, self._secret, limits or self.limits, image)
            sandbox = await connecting
        except BaseException as error:
            if not isinstance(error, asyncio.CancelledError | ConfigError):
                self._avoided[node.name] = time.monotonic() + AVOID_SECONDS
            self.release(node.name)
            if isinstance(error, TypeError | ValueError) and not isinstance(error, ConfigError):
                raise SandboxLost(f"sandbox server {node.name}: {error}") from error
            raise
        sandbox.on_close = lambda: self.release(node.name)
        return sandbox

    async def _place(self) -> NodeRecord:
        """Return a node on which a place is reserved for the caller."""
        if self._closed:
            raise SandboxLost(CLOSED)
        waiting: asyncio.Future[NodeRecord] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        self._serve_waiting()
        try:
            # Not ``wait_for``: that of Python 3.11 drops a cancellation that arrives with the place.
            async with asyncio.timeout(self._wait):
                return await waiting
        except (TimeoutError, asyncio.CancelledError) as error:
            # Both may arrive after the place was given.
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                self.release(waiting.result().name)
            if isinstance(error, asyncio.CancelledError):
                raise
            names = ", ".join(self._seen) or "none"
            raise SandboxLost(
                f"no free sandbox for {self._wait:.0f} s; sandbox servers of this run: {names}"
            ) from None

    def _serve_waiting(self) -> None:
        while self._waiting:
            if self._waiting[0].done():  # cancelled
                self._waiting.popleft()
                continue
            node = self.choose(time.monotonic())
            if node is None:
                return
            self._used[node.name] += 1
            self._waiting.popleft().set_result(node)

    def release(self, node: str) -> None:
        """Release a place of a node."""
        self._used[node] -= 1
        self._serve_waiting()

    async def close(self) -> None:
        """Close the lease: the servers end, and all sandboxes with them. Callers no longer wait."""
        self._closed = True
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(SandboxLost(CLOSED))
        self._waiting.clear()
        if self._beats is not None:
            self._beats.cancel()
            self._beats = None
            with contextlib.suppress(OSError):
                await in_daemon(lambda: self._registry.renew(SandboxLease(0, closed=True)))
