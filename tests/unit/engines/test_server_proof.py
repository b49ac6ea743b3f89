"""A client sends its key and prompts only to a server that knows the key."""

import asyncio
from urllib.parse import urlsplit

import pytest
from aiohttp import ClientSession, web

from common.addresses import http_url
from rlpost.engines.server_proof import PATH, ServerProof, check_server, proof
from rlpost.errors import EngineDied, RolloutError
from tests.unit.rollout.fake_engine import KEY, FakeEngine, serving


class Stranger(FakeEngine):
    """Another user's server, which records headers and may forward challenges to a real engine."""

    real: FakeEngine | None = None

    async def handle(self, request: web.Request) -> web.Response:
        self.got = [*getattr(self, "got", []), dict(request.headers)]
        if self.real is None:
            return web.json_response({"proof": "0" * 64})
        async with (
            ClientSession() as session,
            session.get(self.real.url + request.path_qs) as answer,
        ):
            return web.json_response(await answer.json())


async def test_an_engine_that_knows_the_key_is_accepted():
    engine = FakeEngine()
    async with serving(engine):
        await check_server(engine.url, KEY, timeout_s=5)
    assert not engine.log


@pytest.mark.parametrize("forwards", [False, True])
async def test_another_users_server_on_the_port_does_not_get_the_key(forwards):
    engine, stranger = FakeEngine(), Stranger()
    async with serving(engine, stranger):
        stranger.real = engine if forwards else None
        with pytest.raises(RolloutError, match="does not know the key"):
            await check_server(stranger.url, KEY, timeout_s=5)
    assert stranger.got and all(KEY not in str(headers) for headers in stranger.got)


async def test_a_server_with_another_key_and_an_unreachable_one_are_refused():
    engine = FakeEngine(knows="another key")
    async with serving(engine):
        with pytest.raises(RolloutError, match="does not know the key"):
            await check_server(engine.url, KEY, timeout_s=5)
    with pytest.raises(EngineDied):
        await check_server(engine.url, KEY, timeout_s=5)


def asked(path, query):
    """Return the messages that the middleware sends; None means that it passed the request on."""
    sent = []

    async def app(_scope, _receive, _send):
        sent.append(None)

    async def send(message):
        sent.append(message)

    made = ServerProof(app, key=KEY, address="10.0.0.1:30000")
    scope = {"type": "http", "path": path, "query_string": query}
    asyncio.run(made(scope, None, send))
    return sent


def test_the_server_answers_challenges_and_passes_everything_else_on():
    start, body = asked(PATH, b"challenge=abc")
    assert start["status"] == 200
    assert proof(KEY, "abc", "10.0.0.1:30000").encode() in body["body"]
    assert asked("/generate", b"") == [None]
    assert [asked(PATH, query)[0]["status"] for query in (b"", b"challenge=" + b"x" * 300)] == [
        400,
        400,
    ]


@pytest.mark.parametrize("host", ["10.0.0.1", "n1", "fd00::1"])
def test_addresses_are_parsed_from_urls(host):
    url = http_url(host, 30000)
    assert (urlsplit(url).hostname, urlsplit(url).port) == (host, 30000)
