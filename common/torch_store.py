"""torch.distributed's store over authenticated connections, and how process groups get it.

torch's TCPStore listens on all interfaces, and any process that connects may read and write it, so
any user of a node could become a rank: receive weights, or send a pickle to ``all_gather_object``.
Here the store listens on one address, and a peer that does not know the run's secret gets no
answer.

``open_store`` and ``join_ranks`` are for groups that are formed here. ``replace_rendezvous`` makes every ``tcp://`` and
``env://`` rendezvous of this process use it, for libraries that form groups themselves (SGLang).

The store does not protect the sockets that gloo and NCCL open afterwards. NCCL's accept a random
number of 64 bits that is in the unique id; gloo's accept sequence numbers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch.distributed as dist

from common import key_store
from common.addresses import host_port
from common.attempt import SECRET_VARIABLE
from common.key_store import KeyClient, KeyServer, KeyStoreError, KeyTimeout

DEFAULT_TIMEOUT = timedelta(minutes=30)


class AuthenticatedStore(dist.Store):  # type: ignore[misc]
    """A store for process groups. torch calls the methods from C++, in any thread.

    Keep a reference to it as long as a group uses it: C++ does not keep the Python object.
    """

    def __init__(
        self, client: KeyClient, *, timeout: timedelta, server: KeyServer | None = None
    ) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._client, self._server = client, server
        self._clones: list[AuthenticatedStore] = []

    def close(self) -> None:
        """Close the connections, and the server on the rank that has it."""
        self._client.close()
        if self._server is not None:
            self._server.close()

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value; wakes those that wait for it."""
        self._request(key_store.SET, key, value)

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""
        return self._request(key_store.GET, key)[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait for several keys and return their values."""
        return self._request(key_store.GET, *keys)

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        pairs = zip(keys, values, strict=True)
        self._request(key_store.SET, *(part for pair in pairs for part in pair))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._request(key_store.WAIT, *keys, timeout=timeout)

    def check(self, keys: list[str]) -> bool:
        return self._request(key_store.CHECK, *keys) == [b"1"]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its sum."""
        return int(self._request(key_store.ADD, key, str(amount))[0])

    def append(self, key: str, value: str | bytes) -> None:
        self._request(key_store.APPEND, key, value)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a value if the present one is ``expected``; return the value."""
        return self._request(key_store.COMPARE_SET, key, expected, desired)[0]

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it was set."""
        return self._request(key_store.DELETE, key) == [b"1"]

    def num_keys(self) -> int:
        return int(self._request(key_store.COUNT)[0])

    def list_keys(self) -> list[str]:
        return [key.decode() for key in self._request(key_store.LIST)]

    def has_extended_api(self) -> bool:
        """Return that append, multi_get and multi_set are there."""
        return True

    def clone(self) -> AuthenticatedStore:
        """Return a store with the same values, which lives as long as this one."""
        self._clones.append(AuthenticatedStore(self._client, timeout=self.timeout))
        return self._clones[-1]

    def _request(
        self, operation: bytes, *fields: str | bytes, timeout: timedelta | None = None
    ) -> list[bytes]:
        sent = [one.encode() if isinstance(one, str) else bytes(one) for one in fields]
        limit = self.timeout if timeout is None else timeout
        try:
            return self._client.request(operation, sent, limit.total_seconds())
        except KeyTimeout as error:
            keys = ", ".join(map(str, fields[:3]))
            raise dist.DistStoreError(f"{error} ({limit}): {keys}") from error
        except KeyStoreError as error:
            raise dist.DistNetworkError(str(error)) from error


def open_store(
    host: str, port: int, *, rank: int, world_size: int, secret: str, timeout: timedelta
) -> dist.Store:
    """The store at an address, without waiting for any rank; rank 0 listens there.

    A world of one rank opens no port.

    Raises:
        ValueError: there is no secret.
        torch.distributed.DistError: the address cannot be bound.
    """
    if world_size == 1:
        alone = dist.HashStore()
        alone.set_timeout(timeout)
        return alone
    if not secret:
        raise ValueError(
            f"no secret for the store {host_port(host, port)}; set {SECRET_VARIABLE} to a file with one that only "
            "its owner can read"
        )
    server = None
    if rank == 0:
        try:
            server = KeyServer(host, port, secret)
        except OSError as error:
            raise dist.DistNetworkError(
                f"cannot listen on {host_port(host, port)}: {error}"
            ) from error
    return AuthenticatedStore(KeyClient(host, port, secret), timeout=timeout, server=server)


def close_store(store: dist.Store | None) -> None:
    """Close a store of ``open_store``; others, as of a world of one rank, have no connections."""
    if isinstance(store, AuthenticatedStore):
        store.close()


def join_ranks(store: dist.Store, rank: int, world_size: int, *, group: str = "") -> None:
    """Join a store of ``open_store``, and wait until all ranks have; closes it on failure.

    Several groups that are formed one after another at the same address need names: a rank that
    comes late for one of them then does not count for the next. Ranks with different names wait for
    each other in vain.

    Raises torch.distributed.DistError: a rank did not join in time, or the store was closed.
    """
    keys = [f"joined/{group}/{each}" for each in range(world_size)]
    try:
        store.set(keys[rank], b"")
        _wait_for_all(store, rank, keys, all_joined=f"joined/{group}")
    except BaseException:
        close_store(store)
        raise


def _wait_for_all(store: dist.Store, rank: int, keys: list[str], *, all_joined: str) -> None:
    """Wait for the keys of all ranks on rank 0; for one key on the others, which may be thousands."""
    try:
        store.wait(keys if rank == 0 else [all_joined])
    except dist.DistStoreError as error:
        # one request: a rank that polls would send thousands of ``check`` each second
        joined = set(store.list_keys())
        missing = [each for each, key in enumerate(keys) if key not in joined]
        raise dist.DistStoreError(
            f"these of {len(keys)} ranks did not join within {store.timeout}: {missing}"
        ) from error
    if rank == 0:
        store.set(all_joined, b"")


_stores: dict[tuple[str, int], dist.Store] = {}
"""Stores of ``replace_rendezvous`` by address, kept alive; a new one of an address closes the old."""


def replace_rendezvous(secret: str) -> None:
    """Use authenticated stores for ``tcp://`` and ``env://`` in this process.

    ``tcp://HOST:PORT?group=NAME`` names the group; see ``join_ranks``.

    torch has no public way to replace a handler (``register_rendezvous_handler`` refuses).
    """

    def open_kept(
        host: str, port: int, rank: int, world_size: int, timeout: timedelta, group: str = ""
    ) -> dist.Store:
        close_store(_stores.pop((host, port), None))
        place = {"rank": rank, "world_size": world_size}
        store = open_store(host, port, **place, secret=secret, timeout=timeout)
        join_ranks(store, **place, group=group)
        _stores[(host, port)] = store
        return store

    def by_url(
        url: str, timeout: timedelta = DEFAULT_TIMEOUT, **_: Any
    ) -> Iterator[tuple[dist.Store, int, int]]:
        parts = urlsplit(url)
        options = parse_qs(parts.query)
        rank, world_size = int(options["rank"][0]), int(options["world_size"][0])
        if not parts.hostname or parts.port is None:
            raise ValueError(f"{url}: a rendezvous needs tcp://HOST:PORT")
        group = options.get("group", [""])[0]
        store = open_kept(parts.hostname, parts.port, rank, world_size, timeout, group)
        yield store, rank, world_size

    def by_environment(
        url: str, timeout: timedelta = DEFAULT_TIMEOUT, **_: Any
    ) -> Iterator[tuple[dist.Store, int, int]]:
        options = parse_qs(urlsplit(url).query)
        rank = int(options.get("rank", [os.environ.get("RANK", "")])[0])
        world_size = int(options.get("world_size", [os.environ.get("WORLD_SIZE", "")])[0])
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        yield open_kept(host, port, rank, world_size, timeout), rank, world_size

    # the package has a function of this name
    handlers = import_module("torch.distributed.rendezvous")._rendezvous_handlers
    handlers["tcp"], handlers["env"] = by_url, by_environment
