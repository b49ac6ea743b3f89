"""The sandbox server of a node: ``python -m rlpost.extensions.agents.sandbox.server``, a step of a Slurm job.

Input: the run's folder, with the secret and the driver's lease. Output: sandboxes of this node for
every connection of the driver, and the node's record, renewed while it serves.

It ends when the lease is closed or no longer renewed, and on TERM; its sandboxes end with it, or
with the connection that asked for them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from common.addresses import keep_alive, node_address
from common.exit_codes import EXIT_CONFIG, EXIT_DONE, EXIT_PREEMPTED
from common.log_format import configure_logging
from rlpost.durable.daemon_threads import in_daemon
from rlpost.errors import ConfigError, RlpostError
from rlpost.extensions.agents.sandbox import wire
from rlpost.extensions.agents.sandbox.images import ImageCache, unpacked
from rlpost.extensions.agents.sandbox.local import Root
from rlpost.extensions.agents.sandbox.pool import LocalPool
from rlpost.extensions.agents.sandbox.protocol import Limits, Pool, Sandbox, SandboxLost
from rlpost.extensions.agents.sandbox.registry import BEAT_SECONDS, NodeRecord, Registry

logger = logging.getLogger(__name__)

LEASE_SECONDS = 1800.0  # a run without a renewed lease has ended; long, because of requeues
MAX_UNPROVEN = 64
"""Connections at a time that have not proven that they know the secret."""
Message = tuple[wire.Header, bytes]
T = TypeVar("T")


class SandboxServer:
    """Serves the sandboxes of one pool."""

    def __init__(self, pool: Pool, secret: bytes, host: str) -> None:
        """``host``: the address to listen on, as the record of this server has it."""
        self.pool, self.secret, self.host = pool, secret, host
        self.connections: set[asyncio.Task[None]] = set()
        self.num_unproven = 0

    async def serve_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve one connection: one sandbox."""
        task = asyncio.current_task()
        assert task is not None
        self.connections.add(task)
        try:
            keep_alive(writer.get_extra_info("socket"))
            await self._serve(await self._greet(reader, writer))
        except (wire.PeerRefused, KeyError, TypeError, RlpostError) as error:
            logger.warning("connection refused: %s", error)
        except (OSError, EOFError, TimeoutError):
            pass  # the driver has closed the connection, or is gone
        finally:
            self.connections.discard(task)
            writer.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> wire.Wire:
        """Let the other side prove itself; see ``wire.greet`` for the errors."""
        if self.num_unproven >= MAX_UNPROVEN:
            raise wire.PeerRefused(f"{MAX_UNPROVEN} connections have not proven themselves")
        self.num_unproven += 1
        try:
            address = (self.host, writer.get_extra_info("sockname")[1])
            return await wire.greet(reader, writer, self.secret, "server", address)
        finally:
            self.num_unproven -= 1

    async def _serve(self, peer: wire.Wire) -> None:
        header, _ = await peer.receive(wire.SILENCE_SECONDS)
        limits = Limits(**header["limits"])
        inbox: asyncio.Queue[Message | None] = asyncio.Queue()
        reading = asyncio.ensure_future(_read_all(peer, inbox))
        sandbox: Sandbox | None = None
        try:
            acquiring = self.pool.acquire(limits, header.get("image"))
            sandbox = await self._while_alive(acquiring, reading, peer)
            await peer.send({"ready": sandbox.name})
            while (request := await inbox.get()) is not None:
                answer = await self._while_alive(perform(sandbox, *request), reading, peer)
                await peer.send(*answer)
        except SandboxLost as lost:
            await peer.send({"lost": str(lost)})
        except ConfigError as error:  # of the image
            await peer.send({"refused": str(error)})
        finally:
            reading.cancel()
            if sandbox is not None:
                await asyncio.shield(sandbox.close())

    async def _while_alive(
        self, work: Awaitable[T], reading: asyncio.Task[None], peer: wire.Wire
    ) -> T:
        """Await work and send heartbeats to the driver; cancel it when the driver is gone."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait(
                    {task, reading},
                    timeout=wire.BEAT_SECONDS,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if task.done():
                    break
                if reading.done():
                    raise EOFError("the driver is gone")
                await peer.send({"beat": True})
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                with contextlib.suppress(BaseException):
                    sandbox: Any = await task
                    await sandbox.close()  # a sandbox that was acquired after the driver had gone

    async def close(self) -> None:
        """End all connections and the sandboxes of each."""
        for task in list(self.connections):
            task.cancel()
        await asyncio.gather(*self.connections, return_exceptions=True)


async def _read_all(peer: wire.Wire, inbox: asyncio.Queue[Message | None]) -> None:
    """Read requests until the connection ends, so that its end is seen during a command."""
    try:
        while True:
            await inbox.put(await peer.receive(None))
    except (OSError, EOFError, wire.PeerRefused):
        await inbox.put(None)


async def perform(sandbox: Sandbox, header: wire.Header, stdin: bytes) -> Message:
    """Perform one request of the driver; return its result as a message."""
    values = dataclasses.asdict(await sandbox.perform(header["request"], stdin))
    stdout, stderr = values.pop("stdout"), values.pop("stderr")
    return {"result": values, "stdout_size": len(stdout)}, stdout + stderr


async def serve(
    registry: Registry, name: str, pool: LocalPool, host: str, stopped: Callable[[], bool]
) -> int:
    """Serve until the run is over (0) or this job ends (75)."""
    server = SandboxServer(pool, registry.secret(), host)
    listening = await asyncio.start_server(server.serve_connection, host, 0)
    port = listening.sockets[0].getsockname()[1]
    lease = LeaseWatch(registry)
    number, is_written = 0, True
    try:
        # In a thread: where the shared file system hangs, the sandboxes still answer.
        while not stopped() and await in_daemon(lease.valid):
            number += 1
            record = NodeRecord(name, host, port, pool.size, number)
            try:
                await in_daemon(partial(registry.write, record))
                is_written = True
            except OSError as error:  # without a record this node gets no new sandboxes
                if is_written:
                    logger.warning("the record of this server is not renewed: %s", error)
                is_written = False
            await asyncio.sleep(BEAT_SECONDS)
        return EXIT_PREEMPTED if stopped() else EXIT_DONE
    finally:
        listening.close()
        await server.close()
        with contextlib.suppress(OSError):
            registry.remove(name)


class LeaseWatch:
    """Decides whether the driver renews its lease, by the clock of this node alone."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._last: int | None = None
        self._changed = time.monotonic()

    def valid(self) -> bool:
        """Return False when the lease is closed, or was not renewed for LEASE_SECONDS."""
        lease = self._registry.lease()
        if lease is not None and lease.closed:
            return False
        number = lease.number if lease is not None else None
        if number != self._last:
            self._last, self._changed = number, time.monotonic()
        return time.monotonic() - self._changed < LEASE_SECONDS


def _own_address() -> str:
    try:
        return node_address()
    except OSError as error:
        raise ConfigError(
            f"this node's name has no address that other nodes reach, and there is no default "
            f"route: {error}; add the name to DNS or /etc/hosts"
        ) from error


async def main(arguments: Sequence[str] | None = None) -> int:
    """Serve this node's sandboxes; return the exit code for the batch script."""
    parser = argparse.ArgumentParser(prog="python -m rlpost.extensions.agents.sandbox.server")
    parser.add_argument("--run-folder", type=Path, required=True)
    parser.add_argument(
        "--name", required=True, help="name of this server, the same after a requeue"
    )
    parser.add_argument("--places", type=int, required=True, help="sandboxes at a time")
    parser.add_argument("--warm", type=int, default=1, help="sandboxes that wait in advance")
    parser.add_argument("--image", help="folder with a root, or .sqsh file for enroot")
    parser.add_argument("--read-only", action="append", default=[], help="folder to show as well")
    parser.add_argument("--host", help="address to listen on; default: that of this node")
    options = parser.parse_args(arguments)
    configure_logging()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGUSR2):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    try:
        host = options.host or _own_address()
        with unpacked(options.image, options.name) as image:
            root = Root(image, tuple(options.read_only))
            images = ImageCache(f"{options.name}-task")
            pool = LocalPool(
                Limits(), size=options.places, warm=options.warm, root=root, images=images
            )
            async with pool:
                registry = Registry(options.run_folder)
                registry.create()
                logger.info("%s serves %s sandboxes on %s", options.name, options.places, host)
                return await serve(registry, options.name, pool, host, ended.is_set)
    except RlpostError as error:
        logger.error("%s: %s", os.uname().nodename, error)
        return EXIT_CONFIG


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
