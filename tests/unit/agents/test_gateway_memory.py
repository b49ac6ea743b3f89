"""What the gateway keeps after its episodes: nothing, while clients keep their connections open."""

from __future__ import annotations

import asyncio
import functools
import gc
import random
import reprlib
import sys
import types
import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rlpost.extensions.agents import http_server
from rlpost.extensions.agents.conversation import Conversation, Line, MessageNode
from rlpost.extensions.agents.gateway import EpisodeLimits, OpenEpisode
from rlpost.extensions.agents.http_server import REPEATED_HEADER
from rlpost.extensions.agents.requests import ChatRequest, Completion, Reply
from tests.unit.agents.chat_models import write_model
from tests.unit.agents.harness import TOOLS
from tests.unit.agents.test_gateway import CALL, CHAT, MESSAGES, USER, Body, Setup, setup

RESPONSES = "/v1/responses"
KINDS = (OpenEpisode, Conversation, Line, MessageNode, ChatRequest, Completion, Reply)
NUM_EPISODES = 3
NUM_LOOKS = 300
CONTAINERS = (dict, list, tuple, set, frozenset)
FUNCTIONS = (types.FunctionType, types.MethodType, types.CellType, functools.partial)
SKIPPED = (type, types.ModuleType, OrderedDict)
LONG = "The weather of a city. " * 200  # its requests are worked on in threads


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("qwen"), "qwen")


@contextmanager
def no_collections() -> Iterator[None]:
    """Let reference counts alone free objects: full collections run between steps only."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def kept(known: set[int]) -> list[object]:
    """Return the objects of an episode that live, but for those with the ids ``known``."""
    return [each for each in gc.get_objects() if type(each) in KINDS and id(each) not in known]


def holders(value: object) -> list[str]:
    """Return what refers to an object, directly or through others, nearest first."""
    found, level, seen = [], [value], {id(value)}
    for _ in range(6):
        referrers = gc.get_referrers(*level)
        level = [each for each in referrers if id(each) not in seen and each is not level]
        level = level[:20]
        seen |= {id(each) for each in level}
        found += [f"{type(each).__qualname__} {reprlib.repr(each)}" for each in level]
    return found


async def converse(made: Setup, episode: OpenEpisode, draw: random.Random) -> None:
    """Hold a conversation of a few turns, with faults, by all APIs."""
    key = {"Authorization": f"Bearer {episode.api_key}"}

    async def post(path: str, body: Body, **headers: str) -> Any:
        url = (episode.base_url if path == CHAT else episode.anthropic_url) + path
        async with made.client.post(url, json=body, headers=key | headers) as response:
            content = await response.read()
            return await response.json() if not body.get("stream") else content

    async def leave(body: Body) -> None:
        asking = asyncio.ensure_future(post(CHAT, body))
        await asyncio.sleep(draw.uniform(0, 0.02))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    messages: list[Body] = [{"role": "user", "content": LONG}]
    for turn in range(2):
        body = {"messages": messages, "tools": TOOLS}
        await leave(body)
        twice = await asyncio.gather(*(post(CHAT, body) for _ in range(2)))
        await post(CHAT, body, **{REPEATED_HEADER: "1"})
        await post(CHAT, {**body, "stream": True, "n": 2})
        assert "error" in await post(CHAT, {**body, "functions": TOOLS})
        unknown = {"role": "tool", "content": "9", "tool_call_id": "unknown"}
        assert "error" in await post(CHAT, {**body, "messages": [*messages, unknown]})
        assert "error" in await post(CHAT, {**body, "n": 64})
        await post(CHAT, {**body, "messages": [USER], "stream": True})
        messages = [*messages, twice[turn % 2]["choices"][0]["message"]]
        for call in messages[-1].get("tool_calls", ()):
            messages = [*messages, {"role": "tool", "content": "9", "tool_call_id": call["id"]}]
        messages = [*messages, USER]
    first = await post(RESPONSES, {"input": "How is it?"})
    await post(RESPONSES, {"input": "And now?", "previous_response_id": first["id"]})
    await post(MESSAGES, {"messages": [USER], "max_tokens": 9, "stream": True})
    await post(MESSAGES + "/count_tokens", {"messages": [USER]})


def contents_of(*roots: object) -> Counter[str]:
    """Return the number of values in all containers that objects of rlpost hold, by their kind.

    An OrderedDict is a cache with a bound of its own (``engines.places``).
    """
    modules = {id(vars(module)) for module in list(sys.modules.values()) if module is not None}
    counts, seen, waiting = Counter[str](), set(modules), list(roots)
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, SKIPPED):
            continue
        seen.add(id(each))
        name = type(each).__module__
        is_ours = name.startswith(("rlpost.", "weakref", "collections", "aiohttp.web"))
        if isinstance(each, CONTAINERS):
            counts[type(each).__qualname__] += len(each)
        if is_ours or isinstance(each, (*CONTAINERS, *FUNCTIONS)):
            waiting += gc.get_referents(each)
    return counts


async def run_episodes(made: Setup, *, seed: int) -> list[weakref.ref[OpenEpisode]]:
    """Run some episodes at once and close them; return references to them."""
    limits = EpisodeLimits(max_requests=60, max_tokens=10**6)
    episodes = [await made.open(limits=limits) for _ in range(NUM_EPISODES)]
    draws = [random.Random(seed + place) for place in range(NUM_EPISODES)]
    await asyncio.gather(*map(converse, [made] * NUM_EPISODES, episodes, draws))
    assert all(len(each.trajectories()) > 1 for each in episodes)
    for each in episodes:
        await each.close()
    return [weakref.ref(each) for each in episodes]


async def test_nothing_of_an_episode_is_kept_after_its_end(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even until the next garbage collection, nor until a timer ends."""
    monkeypatch.setattr(http_server, "CLOSED_S", 3600.0)
    answers = [CALL, "Fine.", "<think>\nWell.\n</think>\n\nRain."] * 1000
    async with setup(folder, answers) as made:
        await run_episodes(made, seed=0)  # caches are full then
        with no_collections():
            known = {id(each) for each in kept(set())}
            before = contents_of(made.gateway, made.connection)
            episodes = await run_episodes(made, seed=NUM_EPISODES)
            for _ in range(NUM_LOOKS):
                if not any(each() for each in episodes) and not kept(known):
                    break
                await asyncio.sleep(0.1)
            objects = kept(known)
            names = Counter(type(each).__name__ for each in objects)
            assert not objects, (names, holders(objects[0]))
            assert not contents_of(made.gateway, made.connection) - before
