"""Messages between a driver and the sandbox server of a node: one connection for each sandbox.

A message is the length of a header (4 bytes, big-endian), the header as JSON, and ``size`` bytes.
Both sides prove that they know the run's secret before anything else; the secret is never sent.
The connection is the lease: when it ends, the server ends the sandbox.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import socket
import struct
from typing import Any

MAX_HEADER = 1 << 20
MAX_BODY = 1 << 30
BEAT_SECONDS = 3.0  # between heartbeats of a server during a request
SILENCE_SECONDS = 20.0  # silence after which the other side counts as gone

Header = dict[str, Any]


class PeerRefused(Exception):
    """The other side does not know the secret, or sent data that is not a message."""


async def send(writer: asyncio.StreamWriter, header: Header, body: bytes = b"") -> None:
    """Send one message."""
    head = json.dumps(header | {"size": len(body)}).encode()
    writer.write(struct.pack(">I", len(head)) + head + body)
    await writer.drain()


async def receive(reader: asyncio.StreamReader, timeout: float | None) -> tuple[Header, bytes]:
    """Receive one message. Raises EOFError, OSError, TimeoutError or ``PeerRefused``."""
    async with asyncio.timeout(timeout):
        (length,) = struct.unpack(">I", await reader.readexactly(4))
        if length > MAX_HEADER:
            raise PeerRefused(f"a header of {length} bytes")
        try:
            header = json.loads(await reader.readexactly(length))
            size = int(header["size"])
        except (ValueError, TypeError, KeyError) as error:
            raise PeerRefused(f"not a message: {error}") from None
        if not 0 <= size <= MAX_BODY:
            raise PeerRefused(f"a message of {size} bytes")
        return header, await reader.readexactly(size)


def proof(secret: bytes, role: str, challenge: str) -> str:
    """Return the answer of ``role`` to a challenge."""
    return hmac.new(secret, f"{role}:{challenge}".encode(), hashlib.sha256).hexdigest()


async def greet(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, role: str
) -> None:
    """Exchange challenges and proofs; ``role`` is ours, "driver" or "server".

    Raises ``PeerRefused`` when the other side does not know the secret.
    """
    other = "server" if role == "driver" else "driver"
    challenge = secrets.token_hex(16)
    await send(writer, {"challenge": challenge})
    theirs, _ = await receive(reader, SILENCE_SECONDS)
    # The driver proves itself first, so that a stranger learns nothing from a server.
    if role == "driver":
        await send(writer, {"proof": proof(secret, role, str(theirs.get("challenge")))})
    answer, _ = await receive(reader, SILENCE_SECONDS)
    expected = proof(secret, other, challenge)
    if not hmac.compare_digest(str(answer.get("proof")), expected):
        raise PeerRefused(f"the {other} does not know the secret of this run")
    if role == "server":
        await send(writer, {"proof": proof(secret, role, str(theirs.get("challenge")))})


def keep_alive(writer: asyncio.StreamWriter) -> None:
    """Let the kernel end a connection whose other node vanished, within half a minute."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 25_000)  # ms
