"""Invariant: only a silent peer counts as lost, and the kind of loss is distinguished."""

import asyncio
import socket
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from bootstrap.links import link as link_module
from bootstrap.links.link import Link, LinkLost, plain_ip
from common.message_codec import MessageCodec

KEY = b"key"


@asynccontextmanager
async def connected(address: str = "127.0.0.1") -> AsyncIterator[tuple[Link, Link]]:
    """A node's and the head's end of a connection."""
    accepted: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
    server = await asyncio.start_server(
        lambda r, w: accepted.set_result(Link(r, w, MessageCodec(KEY, "head"))), address, 0
    )
    reader, writer = await asyncio.open_connection(address, server.sockets[0].getsockname()[1])
    node, head = Link(reader, writer, MessageCodec(KEY, "node")), await accepted
    async with asyncio.timeout(30):
        yield node, head
    node.close()
    head.close()
    server.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "BEAT_S", 0.01)
    monkeypatch.setattr(link_module, "SILENCE_S", 0.1)


async def test_signs_of_life_keep_a_quiet_peer_alive_and_are_no_messages() -> None:
    async with connected() as (node, head):
        node.start_beating()
        head.start_beating()
        await asyncio.sleep(0.25)  # more than twice the silence that would be too long
        await node.send({"kind": "lost"})
        assert await head.receive() == {"kind": "lost"}


async def test_an_agent_that_stood_still_itself_does_not_take_the_others_for_dead() -> None:
    """As after the suspension of a job: the deadline passes before received data could be read."""
    async with connected() as (node, head):
        node.start_beating()
        head.start_beating()
        receiving = asyncio.create_task(head.receive())
        await asyncio.sleep(0.02)
        time.sleep(0.3)  # three times the silence that would be too long
        await node.send({"kind": "lost"})
        assert await receiving == {"kind": "lost"}


async def test_a_peer_that_says_nothing_is_lost_and_its_node_is_bad() -> None:
    async with connected() as (_, head):
        head.start_beating()  # the node's agent hangs; its kernel goes on to acknowledge
        with pytest.raises(LinkLost, match="silent for 0 s: its agent hangs") as raised:
            await head.receive()
        assert raised.value.node_is_bad


async def test_a_closed_and_a_broken_connection_speak_for_the_machine() -> None:
    async with connected() as (node, head):
        node.close()
        with pytest.raises(LinkLost, match="the connection was closed") as raised:
            await head.receive()
        assert not raised.value.node_is_bad

    async with connected() as (node, head):
        node._writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
        node.close()
        with pytest.raises(LinkLost, match="the connection broke") as raised:
            await head.receive()
        assert not raised.value.node_is_bad


async def test_a_machine_that_acknowledges_nothing_is_bad() -> None:
    """As the kernel reports after its keepalive probes."""
    async with connected() as (_, head):
        head._reader.set_exception(TimeoutError(110, "Connection timed out"))
        with pytest.raises(LinkLost, match="its machine does not answer") as raised:
            await head.receive()
        assert raised.value.node_is_bad


@pytest.mark.skipif(not socket.has_ipv6, reason="this Python has no IPv6")
async def test_links_over_ipv6_know_their_addresses() -> None:
    async with connected("::1") as (node, head):
        assert node.local_ip == head.peer_ip == "::1"


@pytest.mark.parametrize(
    ("raw", "plain"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("fe80::1%eth0", "fe80::1"),
        ("FD00::0:1", "fd00::1"),
    ],
)
def test_addresses_have_one_spelling(raw: str, plain: str) -> None:
    assert plain_ip(raw) == plain
