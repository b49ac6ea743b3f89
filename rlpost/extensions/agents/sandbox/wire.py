"""Messages between a driver and the sandbox server of a node: one connection for each sandbox.

Both sides prove that they know the run's secret before anything else (``greet``); the secret is
never sent. Frames are those of ``common.message_codec``, so each is authenticated with a key of the
connection. A message is a frame with the header as JSON, then its body in frames of at most
CHUNK bytes. The connection is the lease: when it ends, the server ends the sandbox.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from typing import Any, Literal

from common.addresses import host_port
from common.message_codec import (
    MessageCodec,
    MessageError,
    Side,
    hello_key,
    new_nonce,
    session_key,
)

CHUNK = 1 << 20
MAX_BODY = 1 << 30
MAX_HELLO = 256
"""Bytes that a peer may send before it has proven that it knows the secret."""
BEAT_SECONDS = 3.0  # between heartbeats of a server during a request
SILENCE_SECONDS = 20.0  # silence after which the other side counts as gone
READ_BYTES = 1 << 16

Header = dict[str, Any]
Role = Literal["driver", "server"]
SIDES: dict[Role, Side] = {"driver": "node", "server": "head"}


class PeerRefused(Exception):
    """The other side does not know the secret, or sent data that is not a message."""


class Wire:
    """One authenticated connection; see ``greet``."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, codec: MessageCodec
    ) -> None:
        self._reader, self._writer, self._codec = reader, writer, codec

    async def send(self, header: Header, body: bytes = b"") -> None:
        """Send one message."""
        head = json.dumps(header | {"size": len(body)}).encode()
        self._writer.write(self._codec.pack_body(head))
        for start in range(0, len(body), CHUNK):
            self._writer.write(self._codec.pack_body(body[start : start + CHUNK]))
            await self._writer.drain()
        await self._writer.drain()

    async def receive(self, timeout: float | None) -> tuple[Header, bytes]:
        """Receive one message. Raises EOFError, OSError, TimeoutError or ``PeerRefused``."""
        async with asyncio.timeout(timeout):
            try:
                header = json.loads(await self.frame())
                size = int(header["size"])
            except (ValueError, TypeError, KeyError) as error:
                raise PeerRefused(f"not a message: {error}") from None
            if not 0 <= size <= MAX_BODY:
                raise PeerRefused(f"a message of {size} bytes")
            body = bytearray()
            while len(body) < size:
                body += await self.frame()
            return header, bytes(body)

    async def frame(self) -> bytes:
        """Return the body of the next frame. Raises EOFError, OSError or ``PeerRefused``."""
        try:
            while (body := self._codec.unpack_body()) is None:
                data = await self._reader.read(READ_BYTES)
                if not data:
                    raise EOFError("the connection was closed")
                self._codec.feed(data)
        except MessageError as error:
            raise PeerRefused(
                f"the other side does not know the secret of this run: {error}"
            ) from None
        return body


async def greet(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    secret: bytes,
    role: Role,
    address: tuple[str, int],
) -> Wire:
    """Exchange challenges and proofs in SILENCE_SECONDS at most; ``role`` is ours.

    The driver begins, with a frame under a key of secret and ``address``, that of the server as its
    record has it: a process that has taken the port of a server that ended cannot forward the
    handshake to another server. Afterwards the key also depends on challenges of both sides, and
    the server is silent until a frame has proven that the driver knows it.

    Raises EOFError, OSError, TimeoutError, or ``PeerRefused`` when the other side does not know the
    secret.
    """
    text = f"rlpost sandbox {host_port(*address)}"
    key = hmac.digest(secret, text.encode(), hashlib.sha256)
    codec = MessageCodec(hello_key(key), SIDES[role], max_body_bytes=MAX_HELLO)
    wire, ours = Wire(reader, writer, codec), new_nonce()
    async with asyncio.timeout(SILENCE_SECONDS):
        if role == "driver":
            writer.write(codec.pack({"nonce": ours}))
            theirs = _nonce(await wire.frame(), answers=ours)
            codec.rekey(session_key(key, ours, theirs))
            writer.write(codec.pack({"nonce": ours}))
        else:
            theirs = _nonce(await wire.frame())
            writer.write(codec.pack({"nonce": ours, "answers": theirs}))
            codec.rekey(session_key(key, theirs, ours))
            _nonce(await wire.frame())
    codec.max_body_bytes = CHUNK
    return wire


def _nonce(frame: bytes, *, answers: str | None = None) -> str:
    greeting = json.loads(frame)
    if answers is not None and greeting.get("answers") != answers:
        raise PeerRefused("the other side answers another handshake")
    return str(greeting["nonce"])
