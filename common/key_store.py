"""Keys and values that the processes of a run share over authenticated connections.

One process listens (``KeyServer``), all connect (``KeyClient``). torch.distributed needs such a
store to form process groups (``common.torch_store``): addresses of ranks and NCCL's unique ids
travel through it, so any process that reads or writes it could join.

Input: an address and a secret. Output: the operations of torch's TCPStore. Frames are those of
``common.message_codec``; their key is derived from the secret and the address, so that the process
at a port cannot forward a handshake to another store of the run. Values are not encrypted.

A request is an operation (1 byte) and fields; an answer is fields. A field is its length (4 bytes,
big endian) and its bytes. A request for keys that are missing is answered once they are there; the
client gives up by closing its connection.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from common.addresses import host_port, keep_alive
from common.message_codec import (
    MessageCodec,
    MessageError,
    hello_key,
    new_nonce,
    session_key,
)

MAX_REQUEST_BYTES = 1 << 28
"""Largest frame of a proven connection: the addresses of thousands of gloo ranks at once."""
MAX_UNPROVEN_BYTES = 256
"""Largest frame before the proof: a nonce."""
MAX_UNPROVEN, PROOF_S = 1024, 20.0
"""Number of connections that have not proven themselves, and the seconds that each has for it."""
RETRY_S = 0.05
CHUNK_BYTES = 1 << 18

SET, GET, WAIT, CHECK, ADD, APPEND, COMPARE_SET, DELETE, COUNT, LIST = (
    bytes([number]) for number in range(10)
)
WRITES = (SET, ADD, APPEND, COMPARE_SET)


class KeyStoreError(Exception):
    """The connection failed, or the other side does not know the secret."""


class KeyTimeout(KeyStoreError):
    """A key was not set, or the server did not answer, in time."""


def pack_fields(fields: Sequence[bytes]) -> bytes:
    """Return the fields as one byte string."""
    return b"".join(len(one).to_bytes(4, "big") + one for one in fields)


def unpack_fields(data: bytes) -> list[bytes]:
    """Invert ``pack_fields``. Raises MessageError."""
    fields, at = [], 0
    while at < len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "big")
        if end > len(data):
            raise MessageError("a field is longer than its frame")
        fields.append(data[at + 4 : end])
        at = end
    return fields


def store_key(secret: str, host: str, port: int) -> bytes:
    """Return the key of the store at an address."""
    text = f"rlpost store {host_port(host, port)}"
    return hmac.digest(secret.encode(), text.encode(), hashlib.sha256)


class KeyTable:
    """The keys and values, with the semantics of torch's TCPStore. Pure."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}

    def perform(self, operation: bytes, fields: list[bytes]) -> list[bytes] | None:
        """Return the answer to a request; None while keys that it names are missing.

        Raises MessageError when it is no request.
        """
        if operation in (GET, WAIT):
            if any(key not in self.values for key in fields):
                return None
            return [self.values[key] for key in fields] if operation == GET else []
        act = self._ACTIONS.get(operation)
        if act is None:
            raise MessageError(f"unknown operation {operation!r}")
        try:
            return act(self, *fields)
        except (TypeError, ValueError) as error:
            raise MessageError(f"not a request: {error}") from error

    def first_missing(self, keys: list[bytes]) -> bytes:
        """Return the first of ``keys`` that is not set."""
        return next(key for key in keys if key not in self.values)

    def _set(self, *pairs: bytes) -> list[bytes]:
        self.values.update(zip(pairs[::2], pairs[1::2], strict=True))
        return []

    def _check(self, *keys: bytes) -> list[bytes]:
        return [b"1" if all(key in self.values for key in keys) else b"0"]

    def _add(self, key: bytes, amount: bytes) -> list[bytes]:
        total = b"%d" % (int(self.values.get(key, b"0")) + int(amount))
        self.values[key] = total
        return [total]

    def _append(self, key: bytes, value: bytes) -> list[bytes]:
        self.values[key] = self.values.get(key, b"") + value
        return []

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> list[bytes]:
        """As TCPStore: a missing key is set if nothing was expected, else ``expected`` returns."""
        if self.values.get(key, b"") == expected:
            self.values[key] = desired
        return [self.values.get(key, expected)]

    def _delete(self, key: bytes) -> list[bytes]:
        return [b"0" if self.values.pop(key, None) is None else b"1"]

    def _count(self) -> list[bytes]:
        return [b"%d" % len(self.values)]

    def _list(self) -> list[bytes]:
        return list(self.values)

    _ACTIONS: dict[bytes, Callable[..., list[bytes]]] = {  # noqa: RUF012 - never written
        SET: _set,
        CHECK: _check,
        ADD: _add,
        APPEND: _append,
        COMPARE_SET: _compare_set,
        DELETE: _delete,
        COUNT: _count,
        LIST: _list,
    }


@dataclass(eq=False)
class _Peer:
    """One connection of the server."""

    connection: socket.socket
    codec: MessageCodec
    opened_at: float
    session: bytes = b""
    """Key of the session, once the welcome is sent."""
    outgoing: bytearray = field(default_factory=bytearray)
    request: tuple[bytes, list[bytes]] = (b"", [])
    """The request that waits for a key."""


class KeyServer:
    """Serves a store in a thread until ``close``. Listens on the given address alone."""

    def __init__(self, host: str, port: int, secret: str) -> None:
        """Listen. Raises OSError when the address cannot be bound."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=1024)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._key = store_key(secret, host, self.port)
        self._table = KeyTable()
        self._peers: set[_Peer] = set()
        self._unproven: dict[_Peer, None] = {}  # oldest first
        self._waiting: dict[bytes, list[_Peer]] = {}
        """Peers by the first key that they miss."""
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="key store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close all connections and the listener."""
        with contextlib.suppress(OSError):
            self._wake.send(b"0")
        self._thread.join()
        self._wake.close()

    def _serve(self) -> None:
        try:
            while True:
                for key, events in self._selector.select(1.0 if self._unproven else None):
                    if key.fileobj is self._woken:
                        return
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.data in self._peers:
                        self._attend(key.data, events)
                self._expire()
        finally:
            for peer in list(self._peers):
                self._drop(peer)
            self._listener.close()
            self._woken.close()
            self._selector.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        _set_options(connection)
        codec = MessageCodec(hello_key(self._key), "head", max_body_bytes=MAX_UNPROVEN_BYTES)
        peer = _Peer(connection, codec, time.monotonic())
        self._peers.add(peer)
        self._unproven[peer] = None
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _expire(self) -> None:
        """Drop connections that did not prove themselves in time, and the oldest of too many."""
        oldest = time.monotonic() - PROOF_S
        while self._unproven:
            peer = next(iter(self._unproven))
            if peer.opened_at >= oldest and len(self._unproven) <= MAX_UNPROVEN:
                return
            self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        self._peers.discard(peer)
        self._unproven.pop(peer, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.connection)
        peer.connection.close()

    def _attend(self, peer: _Peer, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(peer)
            if events & selectors.EVENT_READ:
                self._read(peer)
        except (OSError, MessageError, ValueError):
            self._drop(peer)

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.connection.recv(CHUNK_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise MessageError("closed")
        peer.codec.feed(data)
        while (body := peer.codec.unpack_body()) is not None:
            if not peer.session:
                self._welcome(peer, body)
                continue
            self._unproven.pop(peer, None)
            peer.codec.max_body_bytes = MAX_REQUEST_BYTES
            self._request(peer, body[:1], unpack_fields(body[1:]))

    def _welcome(self, peer: _Peer, hello: bytes) -> None:
        theirs, ours = str(json.loads(hello)["nonce"]), new_nonce()
        self._send(peer, json.dumps({"answers": theirs, "nonce": ours}).encode())
        peer.session = session_key(self._key, theirs, ours)
        peer.codec.rekey(peer.session)

    def _request(self, peer: _Peer, operation: bytes, fields: list[bytes]) -> None:
        answer = self._table.perform(operation, fields)
        if answer is None:
            peer.request = (operation, fields)
            self._waiting.setdefault(self._table.first_missing(fields), []).append(peer)
            return
        self._send(peer, pack_fields(answer))
        written = fields[::2] if operation == SET else fields[:1]
        for key in written if operation in WRITES else ():
            self._answer_waiting(key)

    def _answer_waiting(self, key: bytes) -> None:
        for peer in self._waiting.pop(key, ()):
            if peer not in self._peers:
                continue
            try:
                self._request(peer, *peer.request)
            except (OSError, ValueError):
                self._drop(peer)

    def _send(self, peer: _Peer, body: bytes) -> None:
        peer.outgoing += peer.codec.pack_body(body)
        self._flush(peer)

    def _flush(self, peer: _Peer) -> None:
        with contextlib.suppress(BlockingIOError):
            while peer.outgoing:
                sent = peer.connection.send(peer.outgoing[:CHUNK_BYTES])
                del peer.outgoing[:sent]
        events = selectors.EVENT_READ
        if peer.outgoing:
            events |= selectors.EVENT_WRITE
        self._selector.modify(peer.connection, events, peer)


class KeyClient:
    """Requests to a store. Thread-safe: concurrent requests use separate connections."""

    def __init__(self, host: str, port: int, secret: str) -> None:
        """Remember the address; nothing is sent before the first request."""
        self._address = (host, port)
        self._key = store_key(secret, host, port)
        self._idle: list[_Connection] = []
        self._is_closed = False

    def request(self, operation: bytes, fields: Sequence[bytes], timeout_s: float) -> list[bytes]:
        """Return the answer to a request; connect first if all connections are in use.

        Raises:
            KeyTimeout: no answer within ``timeout_s`` seconds.
            KeyStoreError: the server is gone or does not know the secret.
        """
        deadline = time.monotonic() + timeout_s
        with self._connection(deadline) as connection:
            connection.send(operation + pack_fields(fields), deadline)
            return unpack_fields(connection.receive(deadline))

    @contextlib.contextmanager
    def _connection(self, deadline: float) -> Iterator[_Connection]:
        where = f"store {host_port(*self._address)}"
        if self._is_closed:
            raise KeyStoreError(f"{where} is closed")
        connection = None
        try:
            connection = self._take_idle() or self._connect(deadline)
            yield connection
        except BaseException as error:
            if connection is not None:
                connection.close()
            if isinstance(error, TimeoutError):
                raise KeyTimeout(f"{where} did not answer in time") from error
            if isinstance(error, OSError | MessageError | EOFError):
                raise KeyStoreError(f"{where}: {error}") from error
            raise
        self._idle.append(connection)
        if self._is_closed:  # during the request
            self.close()

    def _take_idle(self) -> _Connection | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _connect(self, deadline: float) -> _Connection:
        """Connect and prove; retry until the server listens.

        Raises TimeoutError, MessageError, or KeyStoreError when another thread closes the client.
        """
        while not self._is_closed:
            try:
                return _Connection(self._address, self._key, deadline)
            except (EOFError, OSError) as error:
                if time.monotonic() + RETRY_S > deadline:
                    raise TimeoutError(f"cannot connect: {error}") from error
                time.sleep(RETRY_S)
        raise KeyStoreError(f"store {host_port(*self._address)} is closed")

    def close(self) -> None:
        """Close all connections, those in use after their request; later requests fail."""
        self._is_closed = True
        while (connection := self._take_idle()) is not None:
            connection.close()


class _Connection:
    """One authenticated connection of a client."""

    def __init__(self, address: tuple[str, int], key: bytes, deadline: float) -> None:
        self._socket = socket.create_connection(address, timeout=_until(deadline))
        try:
            _set_options(self._socket)
            self._codec = MessageCodec(hello_key(key), "node", max_body_bytes=MAX_UNPROVEN_BYTES)
            ours = new_nonce()
            proof_deadline = min(deadline, time.monotonic() + PROOF_S)
            self.send(json.dumps({"nonce": ours}).encode(), proof_deadline)
            welcome = json.loads(self.receive(proof_deadline))
            if welcome.get("answers") != ours:
                raise MessageError("it answers another handshake")
            self._codec.rekey(session_key(key, ours, str(welcome["nonce"])))
            self._codec.max_body_bytes = MAX_REQUEST_BYTES
        except BaseException:
            self._socket.close()
            raise

    def send(self, body: bytes, deadline: float) -> None:
        frame = self._codec.pack_body(body)
        self._socket.settimeout(_until(deadline))
        self._socket.sendall(frame)

    def receive(self, deadline: float) -> bytes:
        """Return the body of the next frame. Raises OSError, EOFError, MessageError."""
        while (body := self._codec.unpack_body()) is None:
            self._socket.settimeout(_until(deadline))
            data = self._socket.recv(CHUNK_BYTES)
            if not data:
                raise EOFError("the connection was closed; does the other side know the secret?")
            self._codec.feed(data)
        return body

    def close(self) -> None:
        self._socket.close()


def _until(deadline: float) -> float:
    return max(1e-3, deadline - time.monotonic())


def _set_options(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(connection)
