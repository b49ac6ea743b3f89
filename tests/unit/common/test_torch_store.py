"""A store answers those who know its secret as torch's TCPStore does, and no others."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from common import key_store
from common.key_store import KeyClient, KeyServer, KeyStoreError, KeyTimeout
from common.message_codec import MessageCodec, hello_key
from common.torch_store import AuthenticatedStore, join_ranks, open_store
from tests.ports import free_port

SECRET = "s" * 64
SHORT = timedelta(seconds=1)


@pytest.fixture
def server() -> Iterator[KeyServer]:
    server = KeyServer("127.0.0.1", 0, SECRET)
    yield server
    server.close()


def client(server: KeyServer, secret: str = SECRET) -> KeyClient:
    return KeyClient("127.0.0.1", server.port, secret)


def use(store: dist.Store) -> list[object]:
    """What torch's own store and ours return to the same calls."""
    store.set("a", "1")
    store.set("b", b"\x00\xff")
    results: list[object] = [store.get("a"), store.get("b"), store.multi_get(["b", "a"])]
    store.multi_set(["c", "d"], ["3", "4"])
    results += [store.check(["c", "d"]), store.check(["c", "e"])]
    results += [store.add("n", 2), store.add("n", 3), store.get("n"), store.add("fresh", 0)]
    store.append("c", "5")
    results += [store.get("c"), store.compare_set("x", "", "first")]
    results += [store.compare_set("x", "other", "second"), store.compare_set("x", "first", "third")]
    results += [store.compare_set("missing", "expected", "desired"), store.get("x")]
    results += [store.delete_key("a"), store.delete_key("a"), store.check(["a"])]
    store.wait(["b", "c"])
    results += [store.num_keys(), sorted(store.list_keys())]
    with pytest.raises(dist.DistStoreError):
        store.wait(["never"], timedelta(milliseconds=100))
    return results


def test_it_answers_as_tcpstore_does(server: KeyServer) -> None:
    theirs = dist.TCPStore("127.0.0.1", 0, 1, True, SHORT)
    ours = AuthenticatedStore(client(server), timeout=SHORT)
    expected, found = use(theirs), use(ours)
    # TCPStore keeps its own key, init/
    expected[-2:] = [expected[-2] - 1, [key for key in expected[-1] if key != "init/"]]
    assert found == expected


def test_a_value_wakes_those_that_wait_for_it(server: KeyServer) -> None:
    waiting, setting = client(server), client(server)
    with ThreadPoolExecutor(8) as pool:
        answers = [
            pool.submit(waiting.request, key_store.GET, [b"first", b"second"], 10.0)
            for _ in range(8)
        ]
        for key in (b"second", b"first"):
            assert not any(answer.done() for answer in answers)
            setting.request(key_store.SET, [key, key * 2], 10.0)
        expected = [b"firstfirst", b"secondsecond"]
        assert [answer.result() for answer in answers] == [expected] * 8


def test_each_request_has_its_own_time_limit(
    server: KeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of the request before it on the same connection."""
    asking = client(server)
    asking.request(key_store.COUNT, [], 1.0)
    delays, read = iter([1.5]), KeyServer._read

    def read_late(self: KeyServer, peer: key_store._Peer) -> None:
        time.sleep(next(delays, 0.0))
        read(self, peer)

    monkeypatch.setattr(KeyServer, "_read", read_late)
    asking.request(key_store.SET, [b"key", bytes(1 << 25)], 60.0)  # more than sockets buffer


def test_both_sides_notice_a_vanished_host_even_with_data_in_flight(server: KeyServer) -> None:
    asking = client(server)
    asking.request(key_store.COUNT, [], 10.0)
    (peer,), (connection,) = server._peers, asking._idle
    for side in (peer.connection, connection._socket):
        assert side.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert side.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 25_000


def test_a_request_during_close_ends_and_its_connection_is_closed(server: KeyServer) -> None:
    closing, setting = client(server), client(server)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(closing.request, key_store.GET, [b"late"], 10.0)
        while not server._waiting and not waiting.done():
            time.sleep(0.01)
        closing.close()
        setting.request(key_store.SET, [b"late", b"value"], 10.0)
        assert waiting.result() == [b"value"]
    assert closing._idle == []


def test_without_the_secret_nothing_is_answered(server: KeyServer) -> None:
    client(server).request(key_store.SET, [b"key", b"value"], 10.0)
    other = KeyServer("127.0.0.1", 0, SECRET)
    with pytest.raises((KeyTimeout, KeyStoreError)):
        client(server, "t" * 64).request(key_store.GET, [b"key"], 0.3)
    with pytest.raises((KeyTimeout, KeyStoreError)):  # the address is part of the proof
        relayed = KeyClient("127.0.0.1", other.port, SECRET)
        relayed._address = ("127.0.0.1", server.port)
        relayed.request(key_store.GET, [b"key"], 0.3)
    other.close()
    for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 1000, (1 << 24).to_bytes(4, "big")):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as stranger:
            stranger.sendall(noise)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(100) == b""
    with pytest.raises(dist.DistNetworkError):
        dist.TCPStore("127.0.0.1", server.port, None, False, SHORT, wait_for_workers=False)


def test_a_repeated_hello_does_not_prove_the_secret(
    server: KeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections without a proof are closed after a while, however many there are."""
    monkeypatch.setattr(key_store, "MAX_UNPROVEN", 20)
    key = key_store.store_key(SECRET, "127.0.0.1", server.port)
    recorded = MessageCodec(hello_key(key), "node").pack({"nonce": "recorded"})
    strangers = [
        socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(40)
    ]
    for stranger in strangers[-20:]:
        stranger.sendall(recorded)
        assert b'"answers": "recorded"' in stranger.recv(4096)
    assert client(server).request(key_store.COUNT, [], 10.0) == [b"0"]
    assert [stranger.recv(1) for stranger in strangers[:20]] == [b""] * 20  # the oldest of too many
    monkeypatch.setattr(key_store, "PROOF_S", 0.5)
    assert [stranger.recv(1) for stranger in strangers[20:]] == [b""] * 20
    for stranger in strangers:
        stranger.close()


def ranks_of_one_process(port: int, world: int, secret: str, timeout: timedelta) -> list[object]:
    def join(rank: int) -> object:
        try:
            store = open_store(
                "127.0.0.1", port, rank=rank, world_size=world, secret=secret, timeout=timeout
            )
            join_ranks(store, rank, world)
            return store
        except dist.DistError as error:
            return error

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(join, range(world)))


def test_gloo_forms_groups_over_it_and_it_listens_on_its_address_alone() -> None:
    port = free_port()
    stores = ranks_of_one_process(port, 3, SECRET, timedelta(seconds=60))
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    totals = [torch.ones(2) * rank for rank in range(3)]

    def reduce(rank: int) -> None:
        prefixed = dist.PrefixStore("group", stores[rank])
        group = dist.ProcessGroupGloo(prefixed, rank, 3, timedelta(seconds=60))
        group.allreduce([totals[rank]]).wait()

    threads = [threading.Thread(target=reduce, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [total.tolist() for total in totals] == [[3.0, 3.0]] * 3
    for store in reversed(stores):
        store.close()
    KeyServer("127.0.0.1", port, SECRET).close()  # the port is free again


@pytest.mark.parametrize(("rank", "missing"), [(0, "1, 2"), (2, "0, 1")])
def test_the_error_names_the_ranks_that_did_not_join(
    rank: int, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one request, as thousands of ranks that poll have one server."""
    requests = []
    request = KeyClient.request

    def recorded(client: KeyClient, operation: bytes, *rest: object) -> list[bytes]:
        requests.append(operation)
        return request(client, operation, *rest)

    monkeypatch.setattr(KeyClient, "request", recorded)
    port, options = free_port(), {"world_size": 3, "secret": SECRET, "timeout": SHORT}
    stores = [open_store("127.0.0.1", port, rank=each, **options) for each in range(3)]
    with pytest.raises(dist.DistStoreError, match=rf"these of 3 ranks .*: \[{missing}\]"):
        join_ranks(stores[rank], rank, 3)
    assert requests == [key_store.SET, key_store.WAIT, key_store.LIST]
    stores[0].close()


def test_a_world_of_one_opens_no_port_and_others_need_a_secret() -> None:
    alone = open_store("127.0.0.1", 1, rank=0, world_size=1, secret="", timeout=SHORT)
    assert isinstance(alone, dist.HashStore)
    with pytest.raises(ValueError, match="no secret"):
        open_store("127.0.0.1", 1, rank=0, world_size=2, secret="", timeout=SHORT)
