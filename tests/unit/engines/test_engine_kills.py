"""Conversations over engines that are killed a hundred times: no turn is lost, doubled or changed."""

import asyncio
import random
from contextlib import AsyncExitStack

from rlpost.engines import connection as module
from rlpost.engines.connection import Connection, RunEngines
from rlpost.engines.places import Place
from tests.unit.rollout.fake_engine import KEY, FakeEngine, generated, serving

NUM_ENGINES, NUM_CONVERSATIONS, NUM_KILLS = 4, 24, 100


def next_token(input_ids):
    """What every engine answers: it depends on the whole conversation."""
    return sum(input_ids) % 50_000


class Slow(FakeEngine):
    """An engine whose answers take some milliseconds, so that kills meet requests in flight."""

    async def generate(self, body):
        await asyncio.sleep(random.random() * 0.01)
        return await super().generate(body)


async def started():
    """Return an engine that answers, and the stack that kills it."""
    engine = Slow(answer=lambda body: generated([next_token(body["input_ids"])]))
    stack = AsyncExitStack()
    await stack.enter_async_context(serving(engine))
    return engine, stack


async def test_a_hundred_kills_of_engines_lose_no_turn(monkeypatch):
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.005)
    chance = random.Random(1)
    engines, running = RunEngines(), [await started() for _ in range(NUM_ENGINES)]
    is_over = asyncio.Event()

    def place():
        engines.places.set_own([Place(one.url, KEY, 16) for one, _ in running])

    async def converse(connection, number):
        """Grow one conversation, turn by turn; return it."""
        ids, key = [number], object()
        while not is_over.is_set() or len(ids) < 20:
            answer = await connection.generate(
                f"conversation {number}", ids, {"max_new_tokens": 1}, turn_of=key
            )
            ids = [*ids, *answer.token_ids]
        return ids

    place()
    async with Connection(engines) as connection, asyncio.timeout(120):
        talking = [
            asyncio.create_task(converse(connection, number)) for number in range(NUM_CONVERSATIONS)
        ]
        for _ in range(NUM_KILLS):
            await asyncio.sleep(0.02)
            victim = chance.randrange(NUM_ENGINES)
            url, stack = running[victim][0].url, running[victim][1]
            await stack.aclose()  # connections break
            engines.places.give_up(url)
            running[victim] = await started()
            place()
        is_over.set()
        conversations = await asyncio.gather(*talking)
    for _, stack in running:
        await stack.aclose()
    conversations, num_moved = conversations, engines.places.take_use()[1]
    for number, ids in enumerate(conversations):
        assert ids[0] == number and len(ids) >= 20
        for length in range(1, len(ids)):
            assert ids[length] == next_token(ids[:length])
    assert num_moved > NUM_KILLS / 2, "conversations went on at other engines"
