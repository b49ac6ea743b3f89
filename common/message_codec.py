"""Authenticated frames over a byte stream: the links of agents and of stores. Sans I/O.

A frame is ``length (4 bytes, big endian) | HMAC-SHA256 (32) | body``; the body of an agent is JSON.
The HMAC also covers the sender's side and the frame number in its direction, so a frame that is
modified, replayed, reordered or reflected to its sender does not verify.

Handshake, after which both sides know that the other holds the secret *now*:

    node -> head   hello    key derived from the secret; carries the node's nonce
    head -> node   welcome  same key; echoes that nonce, carries the head's nonce
    both           further frames: key derived from the secret and both nonces

A replayed hello gets a welcome but cannot continue. Frames contain no secrets and are not
encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from typing import Any, Literal

MAX_BODY_BYTES = 65_536
_LENGTH_BYTES = 4
_HEADER_BYTES = _LENGTH_BYTES + 32

Side = Literal["head", "node"]
Message = dict[str, Any]


class MessageError(Exception):
    """Invalid frame: forged, replayed, too long, or not a JSON object."""


def new_nonce() -> str:
    """128 random bits in hex."""
    return secrets.token_hex(16)


def hello_key(secret: bytes) -> bytes:
    """Key of the two frames of the handshake."""
    return hmac.digest(secret, b"rlpost hello", hashlib.sha256)


def session_key(secret: bytes, node_nonce: str, head_nonce: str) -> bytes:
    """Key of everything after the handshake."""
    return hmac.digest(secret, f"rlpost session {node_nonce} {head_nonce}".encode(), hashlib.sha256)


class MessageCodec:
    """One side of a link: packs outgoing messages and unpacks incoming frames."""

    def __init__(self, key: bytes, side: Side, *, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self.max_body_bytes = max_body_bytes
        self._key = key
        self._side = side
        self._other: Side = "node" if side == "head" else "head"
        self._num_packed = 0
        self._num_unpacked = 0
        self._received = bytearray()

    def rekey(self, key: bytes) -> None:
        """Switch to another key and reset the frame numbers."""
        self._key, self._num_packed, self._num_unpacked = key, 0, 0

    def pack(self, message: Message) -> bytes:
        """The frame of a message. Raises ValueError as ``pack_body`` does."""
        return self.pack_body(json.dumps(message).encode())

    def pack_body(self, body: bytes) -> bytes:
        """The frame of a body.

        Raises:
            ValueError: it is longer than ``max_body_bytes``.
        """
        if len(body) > self.max_body_bytes:
            raise ValueError(f"message of {len(body)} bytes; at most {self.max_body_bytes} fit")
        code = self._code(self._side, self._num_packed, body)
        self._num_packed += 1
        return len(body).to_bytes(_LENGTH_BYTES, "big") + code + body

    def feed(self, data: bytes) -> None:
        """Add received bytes, in chunks of any size."""
        self._received += data

    def unpack(self) -> Message | None:
        """Return the next message, or None while its frame is incomplete.

        Raises:
            MessageError: the frame is invalid or out of sequence.
        """
        body = self.unpack_body()
        if body is None:
            return None
        message = json.loads(body)
        if not isinstance(message, dict):
            raise MessageError(f"frame holds a {type(message).__name__}, not an object")
        return message

    def unpack_body(self) -> bytes | None:
        """Return the next body, or None while its frame is incomplete.

        Raises:
            MessageError: the frame is too long, not authentic or out of sequence.
        """
        if len(self._received) < _LENGTH_BYTES:
            return None
        num_bytes = int.from_bytes(self._received[:_LENGTH_BYTES], "big")
        if num_bytes > self.max_body_bytes:
            raise MessageError(
                f"frame of {num_bytes} bytes announced; at most {self.max_body_bytes} are allowed"
            )
        if len(self._received) < _HEADER_BYTES + num_bytes:
            return None
        code = bytes(self._received[_LENGTH_BYTES:_HEADER_BYTES])
        body = bytes(self._received[_HEADER_BYTES : _HEADER_BYTES + num_bytes])
        if not hmac.compare_digest(code, self._code(self._other, self._num_unpacked, body)):
            raise MessageError("frame is not authentic (other secret, changed, or repeated)")
        del self._received[: _HEADER_BYTES + num_bytes]
        self._num_unpacked += 1
        return body

    def _code(self, side: Side, number: int, body: bytes) -> bytes:
        return hmac.digest(self._key, f"{side} {number} ".encode() + body, hashlib.sha256)
