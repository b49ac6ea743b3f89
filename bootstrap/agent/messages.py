"""The language of the agents: authenticated frames over a byte stream, without any socket in sight.

A frame is ``length (4 bytes, big endian) | HMAC-SHA256 (32) | JSON``. The code is made over the speaker's side and the
number of the frame in its direction as well, so a frame that is changed, repeated, reordered or sent back to its
speaker does not verify.

Handshake, after which both sides know that the other holds the secret *now*:

    node -> head   hello    under a key made from the secret; carries the node's nonce
    head -> node   welcome  under the same key; repeats that nonce, carries the head's own
    both           further frames under a key made from the secret and both nonces

A recorded hello replayed later gets a welcome and can go no further. Nothing is secret in a frame; encryption is not
the aim.
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
    """What arrived is not a frame of ours: forged, repeated, too long or no JSON object."""


def new_nonce() -> str:
    """128 random bits in hex."""
    return secrets.token_hex(16)


def hello_key(secret: bytes) -> bytes:
    """Key of the two frames of the handshake."""
    return hmac.digest(secret, b"rlpost hello", hashlib.sha256)


def session_key(secret: bytes, node_nonce: str, head_nonce: str) -> bytes:
    """Key of everything after the handshake."""
    return hmac.digest(secret, f"rlpost session {node_nonce} {head_nonce}".encode(), hashlib.sha256)


class Codec:
    """One side of one conversation: packs what this side says, unpacks what the other side said."""

    def __init__(self, key: bytes, side: Side) -> None:
        self._key = key
        self._side = side
        self._other: Side = "node" if side == "head" else "head"
        self._num_packed = 0
        self._num_unpacked = 0
        self._received = bytearray()

    def rekey(self, key: bytes) -> None:
        """Go on under another key; numbers start anew."""
        self._key, self._num_packed, self._num_unpacked = key, 0, 0

    def pack(self, message: Message) -> bytes:
        """The frame of a message.

        Raises:
            ValueError: the message is longer than ``MAX_BODY_BYTES``.
        """
        body = json.dumps(message).encode()
        if len(body) > MAX_BODY_BYTES:
            raise ValueError(f"message of {len(body)} bytes; at most {MAX_BODY_BYTES} fit")
        code = self._code(self._side, self._num_packed, body)
        self._num_packed += 1
        return len(body).to_bytes(_LENGTH_BYTES, "big") + code + body

    def feed(self, data: bytes) -> None:
        """Take bytes as they arrive, in pieces of any size."""
        self._received += data

    def unpack(self) -> Message | None:
        """The next message, or None while its frame is not complete.

        Raises:
            MessageError: the frame is not the one the other side would send next.
        """
        if len(self._received) < _LENGTH_BYTES:
            return None
        num_bytes = int.from_bytes(self._received[:_LENGTH_BYTES], "big")
        if num_bytes > MAX_BODY_BYTES:
            raise MessageError(f"frame of {num_bytes} bytes announced; at most {MAX_BODY_BYTES} are allowed")
        if len(self._received) < _HEADER_BYTES + num_bytes:
            return None
        code = bytes(self._received[_LENGTH_BYTES:_HEADER_BYTES])
        body = bytes(self._received[_HEADER_BYTES : _HEADER_BYTES + num_bytes])
        if not hmac.compare_digest(code, self._code(self._other, self._num_unpacked, body)):
            raise MessageError("frame is not authentic (other secret, changed, or repeated)")
        del self._received[: _HEADER_BYTES + num_bytes]
        self._num_unpacked += 1
        message = json.loads(body)
        if not isinstance(message, dict):
            raise MessageError(f"frame holds a {type(message).__name__}, not an object")
        return message

    def _code(self, side: Side, number: int, body: bytes) -> bytes:
        return hmac.digest(self._key, f"{side} {number} ".encode() + body, hashlib.sha256)
