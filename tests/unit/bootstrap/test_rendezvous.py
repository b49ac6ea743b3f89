"""Invariant: a peer that has the secret joins; any other peer receives no byte and changes nothing."""

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from bootstrap.agent import rendezvous
from bootstrap.agent.rendezvous import (
    BringupError,
    Link,
    LinkLost,
    NodeReport,
    Reception,
    check_versions,
    join,
)
from bootstrap.network.sockets import Address
from common.message_codec import MessageCodec, hello_key
from common.port_blocks import claim_block, ephemeral_floor

SECRET = b"the secret of the attempt"


def listening() -> tuple[socket.socket, int]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    return listener, listener.getsockname()[1]


async def opened(hosts: tuple[str, ...]) -> tuple[Reception, int]:
    reception = Reception(SECRET, hosts, lambda report, link: None)
    listener, port = listening()
    await reception.open(listener)
    return reception, port


def joining(port: int, rank: int, secret: bytes = SECRET) -> Coroutine[Any, Any, Link]:
    return join(describing(rank), secret=secret, candidates=lambda: [("127.0.0.1", port)])


def describing(rank: int) -> Callable[[Link], NodeReport]:
    return lambda link: NodeReport(f"n{rank}", rank, 8, {}, link.local_ip, "lo")


def run(scene: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await scene

    asyncio.run(bounded())


async def test_all_nodes_join_and_talk_both_ways() -> None:
    reception, port = await opened(("n0", "n1", "n2"))
    links = await asyncio.gather(joining(port, 1), joining(port, 2))
    await reception.complete.wait()
    assert reception.reports[2] == NodeReport("n2", 2, 8, {}, "127.0.0.1", "lo")
    await links[0].send({"kind": "lost"})
    assert await reception.links[1].receive() == {"kind": "lost"}
    await reception.links[1].send({"kind": "end"})
    assert await links[0].receive() == {"kind": "end"}
    links[1].close()
    with pytest.raises(LinkLost):
        await reception.links[2].receive()
    reception.close()


@pytest.mark.parametrize(
    "noise", [b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x10" + b"x" * 100, b"\xff" * 64]
)
async def test_a_stranger_gets_no_byte_and_breaks_nothing(noise: bytes) -> None:
    reception, port = await opened(("n0", "n1"))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(noise)
    assert await reader.read() == b""
    writer.close()
    await joining(port, 1)
    await reception.complete.wait()
    reception.close()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
async def test_one_listener_takes_nodes_over_ipv4_and_ipv6() -> None:
    """Addresses are normalised: the node's report and the head's connection agree."""
    reception = Reception(SECRET, ("n0", "n1", "n2"), lambda report, link: None)
    block, claim = claim_block("77", ephemeral_floor(), "")
    await reception.open(claim)
    for rank, ip in ((1, "127.0.0.1"), (2, "::1")):
        link = await join(
            describing(rank), secret=SECRET, candidates=lambda ip=ip: [(ip, block.rendezvous)]
        )
        assert link.local_ip == ip
    await reception.complete.wait()
    assert [reception.reports[rank].ip for rank in (1, 2)] == ["127.0.0.1", "::1"]
    assert [reception.links[rank].local_ip for rank in (1, 2)] == ["127.0.0.1", "::1"]
    reception.close()


async def test_a_recorded_hello_joins_nothing() -> None:
    """A replay makes the head answer, but the peer cannot derive the session key."""
    reception, port = await opened(("n0", "n1"))
    hello = MessageCodec(hello_key(SECRET), "node").pack({"kind": "hello", "nonce": "recorded"})
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(hello + hello)
    assert await reader.read(4)
    assert b"joined" not in await reader.read()
    writer.close()
    assert reception.missing() == ["n1"]
    reception.close()


async def test_another_secret_never_joins_however_often_it_tries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turned_away: list[object] = []
    again = asyncio.Event()

    def warned(*said: object) -> None:
        turned_away.append(said)
        if len(turned_away) > 1:
            again.set()

    monkeypatch.setattr("bootstrap.agent.rendezvous.logger.warning", warned)
    reception, port = await opened(("n0", "n1"))
    stranger = asyncio.create_task(joining(port, 1, b"another secret"))
    await again.wait()
    assert not stranger.done() and reception.missing() == ["n1"]
    stranger.cancel()
    reception.close()


async def test_a_place_is_given_once() -> None:
    reception, port = await opened(("n0", "n1", "n2"))
    await joining(port, 1)
    second = await joining(port, 1)
    with pytest.raises(
        LinkLost, match="the head rejected this node: n1 claims rank 1, which is taken"
    ):
        await second.receive()
    assert reception.missing() == ["n2"]
    reception.close()


async def test_a_node_behind_address_translation_is_told_why_it_cannot_join() -> None:
    reception, port = await opened(("n0", "n1"))
    elsewhere = NodeReport("n1", 1, 8, {}, "10.0.0.7", "eth0")
    link = await join(lambda _: elsewhere, secret=SECRET, candidates=lambda: [("127.0.0.1", port)])
    with pytest.raises(
        LinkLost,
        match=r"n1 reports address 10\.0\.0\.7 but connected from 127\.0\.0\.1: address trans",
    ):
        await link.receive()
    assert reception.missing() == ["n1"]
    reception.close()


async def test_a_node_passes_over_places_that_are_not_its_head() -> None:
    """No process listens at the first address, a foreign one at the second; the third authenticates
    as the head.
    """
    reception, port = await opened(("n0", "n1"))
    unused, unused_port = listening()
    foreign = await asyncio.start_server(
        lambda reader, writer: writer.write(b"SSH-2.0-OpenSSH\r\n" * 4), port=0
    )
    foreign_port = foreign.sockets[0].getsockname()[1]
    places = [("127.0.0.1", unused_port), ("127.0.0.1", foreign_port), ("127.0.0.1", port)]
    link = await join(describing(1), secret=SECRET, candidates=lambda: places)
    await reception.complete.wait()
    link.close()
    unused.close()
    foreign.close()
    reception.close()


async def test_of_places_that_answer_almost_at_once_the_first_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a stall the head serves all waiting nodes at once; different choices would mix
    networks.
    """
    places = [(f"10.0.0.{number}", 20_000) for number in range(40)]

    class ALink(Link):
        def __init__(self, ip: str) -> None:
            self.ip = ip

        def close(self) -> None:
            """Nothing to close."""

    monkeypatch.setattr(rendezvous, "_STAGGER_S", 0.0)
    all_wait = asyncio.Event()

    async def connect(ip: str, *_: object) -> Link:
        if ip == places[-1][0]:
            all_wait.set()
        await all_wait.wait()
        if ip == places[0][0]:
            await asyncio.sleep(0.01)
        return ALink(ip)

    monkeypatch.setattr(rendezvous, "_connect", connect)
    link = await rendezvous._first_to_answer(places, SECRET, None)
    assert isinstance(link, ALink) and link.ip == "10.0.0.0"


async def test_a_name_service_that_hangs_does_not_keep_a_node_from_the_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolve, over = socket.getaddrinfo, threading.Event()

    def hanging(host: str, *rest: Any, **more: Any) -> Any:
        if host == "head":
            over.wait(20)
            raise OSError("no answer")
        return resolve(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", hanging)
    monkeypatch.setattr(rendezvous, "_RESOLVE_S", 0.05)
    reception, port = await opened(("n0", "n1"))
    places = [("head", port), ("127.0.0.1", port)]
    try:
        link = await asyncio.wait_for(
            join(describing(1), secret=SECRET, candidates=lambda: places), 10
        )
    finally:
        over.set()
    link.close()
    reception.close()


def test_the_head_is_looked_for_by_name_wherever_it_listens_before_its_addresses(
    tmp_path: Path,
) -> None:
    """The published order is that of the head's interfaces and means nothing; Slurm uses the name."""
    head_file = tmp_path / "head.json"
    assert rendezvous.head_candidates("n1", 10_000, head_file) == [("n1", 10_000)]
    addresses = (Address("docker0", "172.17.0.1"), Address("eth0", "10.0.0.1"))
    head_file.write_text(rendezvous.head_document(11_000, addresses))
    expected = [("n1", 10_000), ("n1", 11_000), ("172.17.0.1", 11_000), ("10.0.0.1", 11_000)]
    assert rendezvous.head_candidates("n1", 10_000, head_file) == expected


def test_the_node_with_another_version_is_named() -> None:
    versions = {"ray": "2.60.0", "torch": "2.13.0"}
    reports = [NodeReport(f"n{rank}", rank, 8, versions) for rank in range(3)]
    check_versions(reports)
    odd = NodeReport("n3", 3, 8, {**versions, "ray": "2.59.0"})
    with pytest.raises(BringupError, match=r"n3 has ray 2\.59\.0, the others 2\.60\.0"):
        check_versions([*reports, odd])
