"""What every process of an engine does before it runs anything of SGLang.

1. Authenticate the links between them. SGLang forms its process groups with torch's store and, with
   several ranks or attention data parallelism, sends pickles through ZeroMQ over TCP. Neither knows
   a secret, so any user of the node could join a group, or have a pickle run. So the store is
   replaced (``common.torch_store``), and ZeroMQ's TCP sockets use CURVE with keys that follow from
   the secret (https://rfc.zeromq.org/spec/26): a client needs the server's public key to begin a
   handshake, and it is never sent. ``ipc://`` sockets are files in the engine's private folder.
2. Keep the file of load figures, which SGLang puts into /dev/shm and leaves there when it is killed,
   in that folder as well. It has 16 KiB for each replica.

Input: the key of the engine, the same for all its nodes.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING

from common.torch_store import replace_rendezvous

if TYPE_CHECKING:
    import zmq


class Guarded:
    """A function of SGLang that prepares its process before it runs.

    SGLang starts its processes by "spawn" and gives them this object, so the new process calls
    ``__setstate__`` before anything of SGLang.
    """

    def __init__(self, function: Callable[..., object], secret: str) -> None:
        self._function, self._secret = function, secret

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self._function(*args, **kwargs)

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        prepare(self._secret)


def prepare(secret: str) -> None:
    """Prepare this process; without a secret (tests of an engine alone) its links stay open."""
    from sglang.srt.managers import load_snapshot

    name_in_shm = load_snapshot.shm_path_for

    def name_in_private_folder(ipc_name: str) -> str:
        return os.path.join(tempfile.gettempdir(), os.path.basename(name_in_shm(ipc_name)))

    load_snapshot.shm_path_for = name_in_private_folder
    if secret:
        authenticate_links(secret)


def authenticate_links(secret: str) -> None:
    """Authenticate the groups and the ZeroMQ sockets that this process opens from now on."""
    import zmq

    replace_rendezvous(secret)
    keys = curve_keys(secret)
    for name in ("bind", "connect"):
        current = getattr(zmq.Socket, name)
        plain = getattr(current, "plain", current)
        setattr(zmq.Socket, name, _with_keys(plain, keys, is_server=name == "bind"))


def curve_keys(secret: str) -> tuple[bytes, bytes]:
    """Return public and secret key of the engine's sockets, in Z85."""
    import zmq.utils.z85

    seed = hmac.digest(secret.encode(), b"rlpost zmq", hashlib.sha256)
    private = zmq.utils.z85.encode(seed)
    return zmq.curve_public(private), private


def _with_keys(
    plain: Callable[..., object], keys: tuple[bytes, bytes], *, is_server: bool
) -> Callable[..., object]:
    def open_socket(socket: zmq.Socket[bytes], address: str) -> object:
        if address.startswith("tcp://"):
            socket.curve_publickey, socket.curve_secretkey = keys
            if is_server:
                socket.curve_server = True
            else:
                socket.curve_serverkey = keys[0]
        return plain(socket, address)

    open_socket.plain = plain  # type: ignore[attr-defined]
    return open_socket
