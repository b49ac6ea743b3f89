"""Connections without a key are bounded in number and time, and their garbage in the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from aiohttp import web

from rlpost.extensions.agents import listener
from rlpost.extensions.agents.http_server import make_app
from rlpost.extensions.agents.listener import Strangers, admit, start_listener

WAIT_S = 30.0
POST = b"POST /v1/messages HTTP/1.1\r\nHost: x\r\n"
HEADS = {
    "nothing": b"",
    "half a header": POST + b"X-A: ",
    "a body that never comes": POST + b"Content-Length: 60000000\r\n\r\n",
    "a wrong key": POST + b"Authorization: Bearer no\r\nContent-Length: 60000000\r\n\r\n",
}
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def serving(app: web.Application, strangers: Strangers) -> AsyncIterator[int]:
    runner, url = await start_listener(app, "127.0.0.1", shutdown_s=0.1, strangers=strangers)
    try:
        yield int(url.rpartition(":")[2])
    finally:
        await runner.cleanup()


async def ended(reader: asyncio.StreamReader) -> bool:
    """Read until the connection ends."""
    try:
        async with asyncio.timeout(WAIT_S):
            await reader.read()
    except ConnectionError:
        pass
    return True


@asynccontextmanager
async def connecting(port: int, *heads: bytes) -> AsyncIterator[list[Streams]]:
    async with AsyncExitStack() as stack:
        pairs = []
        for head in heads:
            pair = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(pair[1].close)
            pair[1].write(head)
            pairs.append(pair)
        yield pairs


async def test_each_connection_without_a_key_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "GRACE_S", 0.05)
    strangers = Strangers(proof_s=0.2)
    async with (
        serving(make_app({}), strangers) as port,
        connecting(port, *HEADS.values()) as pairs,
    ):
        for reader, _ in pairs:
            assert await ended(reader)
        assert len(strangers) == 0


async def test_the_oldest_connection_without_a_key_goes_for_a_new_one() -> None:
    strangers = Strangers(limit=16, proof_s=WAIT_S)
    async with (
        serving(make_app({}), strangers) as port,
        connecting(port, *[HEADS["half a header"]] * 24) as pairs,
    ):
        for reader, _ in pairs[:8]:
            assert await ended(reader)
        assert len(strangers) == 16
        assert not any(reader.at_eof() for reader, _ in pairs[8:])


async def test_a_connection_with_a_key_stays_whatever_strangers_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener, "GRACE_S", 0.01)

    async def answer(request: web.Request) -> web.Response:
        if "X-Key" in request.headers:
            admit(request)
        return web.Response(text="fine")

    app, strangers = web.Application(), Strangers(limit=16, proof_s=0.2)
    app.router.add_get("/", answer)
    get = b"GET / HTTP/1.1\r\nHost: x\r\n"
    async with (
        serving(app, strangers) as port,
        connecting(port, get + b"X-Key: k\r\n\r\n") as pairs,
    ):
        ((reader, writer),) = pairs
        assert b"200 OK" in await reader.readuntil(b"fine")
        async with connecting(port, *[HEADS["nothing"]] * 20) as others:
            for other, _ in others:
                assert await ended(other)
        writer.write(get + b"\r\n")
        assert b"200 OK" in await reader.readuntil(b"fine"), "the same connection"
    assert len(strangers) == 0


async def test_malformed_requests_are_one_line_of_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [1000.0]
    monkeypatch.setattr(listener.time, "monotonic", lambda: now[0])
    hostile = (
        b"GET / HTTP/1.1\r\nX: \x1b]0;OWNED\x07\x1b[2J\0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nX-A: " + b"a" * 9000 + b"\r\n\r\n",
    )
    caplog.set_level(logging.INFO)
    for _ in range(2):
        async with (
            serving(make_app({}), Strangers()) as port,
            connecting(port, *hostile * 5) as pairs,
        ):
            for reader, _ in pairs:
                assert await ended(reader)
        now[0] += 61.0
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2 and "10 malformed requests were refused" in texts[1]
    assert "Traceback" not in caplog.text and "\x1b" not in caplog.text
    assert sum(map(len, texts)) < 1000
