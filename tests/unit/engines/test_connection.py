"""Requests to engines of the run and of its fleet; each server gets only its own key."""

import asyncio

import pytest
from aiohttp import web

from rlpost.engines import connection as module
from rlpost.engines.connection import Connection, Halted, RunEngines, Watch
from rlpost.engines.places import Place
from rlpost.errors import RolloutError
from tests.unit.rollout.fake_engine import KEY, FakeEngine, generated, serving

FLEET_KEY = "key of the fleet"


class Recording(FakeEngine):
    """An engine that records every Authorization header and accepts any key."""

    async def handle(self, request: web.Request) -> web.Response:
        self.keys = [*getattr(self, "keys", []), request.headers.get("Authorization")]
        body = await request.json() if request.can_read_body else {}
        if request.path == "/generate":
            return await self.generate(body)
        self.log.append(request.path.removeprefix("/"))
        return web.json_response({})


def address(own, fleet=None, concurrency=1):
    made = RunEngines.of([own.url], KEY, capacity=concurrency, patience_s=30.0)
    if fleet is not None:
        made.places.set_joined([Place(fleet.url, FLEET_KEY, 1, is_own=False)])
    return made


async def test_a_fleet_engine_gets_requests_and_aborts_with_its_key_alone():
    own, fleet = Recording(), Recording()
    async with serving(own, fleet):
        engines = address(own, fleet)
        async with Connection(engines) as connection:
            asking = (connection.generate(f"request {n}", [1, n], {}) for n in range(6))
            answers = await asyncio.gather(*asking)
        assert [list(one.token_ids) for one in answers] == [[n, 1] for n in range(6)]
        await engines.abort_all()
    assert own.log.count("generate") and fleet.log.count("generate")
    assert set(own.keys) == {f"Bearer {KEY}"} and set(fleet.keys) == {f"Bearer {FLEET_KEY}"}
    assert own.log[-1] == fleet.log[-1] == "abort_request"


async def test_requests_of_a_killed_engine_are_answered_once_by_others():
    own, fleet = Recording(), Recording()
    fleet.holds = asyncio.Event()
    async with serving(own):
        async with serving(fleet):
            engines = address(own, fleet, concurrency=2)
            connection = await Connection(engines).__aenter__()
            asking = [
                asyncio.create_task(connection.generate(f"request {n}", [1, n], {}))
                for n in range(4)
            ]
            async with asyncio.timeout(30):
                while not fleet.under_way:
                    await asyncio.sleep(0.01)
        async with asyncio.timeout(20):  # the fleet's engine is dead, but still in the list
            answers = await asyncio.gather(*asking)
        await connection.__aexit__(None, None, None)
    assert [list(one.token_ids) for one in answers] == [[n, 1] for n in range(4)]
    assert own.log.count("generate") == 4


async def test_without_its_own_engines_a_run_waits_for_the_fleet():
    own, fleet = Recording(), Recording()
    fleet.answer = lambda body: generated([7], version="3")
    async with serving(own, fleet):
        engines = address(own, concurrency=0)
        async with Connection(engines) as connection:
            asking = asyncio.create_task(connection.generate("request", [1], {}))
            await asyncio.sleep(0.05)
            assert not asking.done()
            engines.places.set_joined([Place(fleet.url, FLEET_KEY, 1, is_own=False)])
            answer = await asking
    assert answer.version_spans == ((3, 1),) and not own.log


def version_of_no_update(body):
    return generated([7], version="not-admitted")


def no_answer(body):
    return {"text": "no tokens"}


@pytest.mark.parametrize("kind", ["500", "400", "no answer", "a version of no update"])
async def test_a_fleet_engine_that_answers_with_errors_does_not_fail_the_run(kind, monkeypatch):
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.01)
    own, fleet, problems = Recording(), Recording(), []
    fleet.unavailable = 10**9 if kind.isdecimal() else 0
    fleet.unavailable_status = int(kind) if kind.isdecimal() else 0
    fleet.answer = no_answer if kind == "no answer" else version_of_no_update
    async with serving(own, fleet):
        engines = address(own, fleet, concurrency=4)
        engines.places.listen(lambda url, problem: problems.append(url))
        async with Connection(engines) as connection:
            asking = (connection.generate(f"request {n}", [1, n], {}) for n in range(8))
            answers = await asyncio.gather(*asking)
    assert [list(one.token_ids) for one in answers] == [[n, 1] for n in range(8)]
    assert problems and set(problems) == {fleet.url}


async def test_a_request_that_every_engine_refuses_is_an_error(monkeypatch):
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.01)
    fleet = Recording()
    fleet.unavailable, fleet.unavailable_status = 10**9, 400
    async with serving(fleet):
        engines = RunEngines()
        engines.places.set_joined([Place(fleet.url, FLEET_KEY, 1, is_own=False)])
        async with Connection(engines) as connection:
            with pytest.raises(RolloutError, match="answered 400"):
                await connection.generate("a request", [1], {})
    assert fleet.log.count("generate") == module.MAX_FAULTS


async def test_a_request_to_a_hanging_engine_is_resent_when_the_engine_is_lost():
    own, fleet = Recording(), Recording()
    fleet.holds, own.holds = asyncio.Event(), asyncio.Event()
    async with serving(own, fleet):
        engines = address(own, fleet)
        async with Connection(engines) as connection:
            asking = [
                asyncio.create_task(connection.generate(f"request {n}", [1, n], {}))
                for n in range(2)
            ]
            async with asyncio.timeout(30):
                while not (fleet.under_way and own.under_way):
                    await asyncio.sleep(0.01)
            own.holds.set()
            engines.places.set_joined([])
            engines.places.give_up(fleet.url)
            async with asyncio.timeout(30):
                answers = await asyncio.gather(*asking)
        assert [list(one.token_ids) for one in answers] == [[0, 1], [1, 1]]
        assert own.log.count("generate") == 2 and fleet.log.count("generate") == 1


async def test_a_halt_ends_requests_that_wait_for_an_engine():
    own = Recording()
    async with serving(own):
        engines = address(own, concurrency=0)
        async with Connection(engines) as connection:
            asking = asyncio.create_task(connection.generate("a request", [1], {}))
            await asyncio.sleep(0.05)
            async with asyncio.timeout(30):
                await connection.halt([asking], must_leave=lambda: False)
            assert isinstance(asking.exception(), Halted)


@pytest.mark.parametrize(("status", "attempts"), [(400, 1), (500, module.MAX_FAULTS)])
async def test_an_engine_of_the_run_that_answers_with_an_error_fails_the_request(
    monkeypatch, status, attempts
):
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.01)
    own = Recording()
    own.unavailable, own.unavailable_status = 10**9, status
    async with serving(own), Connection(address(own)) as connection:
        with pytest.raises(RolloutError, match=f"answered {status}"):
            await connection.generate("a request", [1], {})
    assert own.log.count("generate") == attempts


async def test_engines_that_are_not_ready_for_a_minute_get_few_requests(monkeypatch):
    """A pause doubles, and an engine that failed is avoided: no storm of retries."""
    paused = []

    async def sleep(seconds):
        paused.append(seconds)
        await real_sleep(0)

    real_sleep = asyncio.sleep
    monkeypatch.setattr(module.asyncio, "sleep", sleep)
    own, other = Recording(), Recording()
    for engine in (own, other):
        engine.unavailable, engine.unavailable_status = 10**9, 503
    async with serving(own, other):
        engines = RunEngines.of([own.url, other.url], KEY, capacity=64, patience_s=60.0)
        async with Connection(engines) as connection:
            asking = [connection.generate(f"request {n}", [1, n], {}) for n in range(16)]
            found = await asyncio.gather(*asking, return_exceptions=True)
    assert all(isinstance(one, RolloutError) for one in found)
    assert own.log.count("generate") + other.log.count("generate") <= 16 * 12
    assert sum(paused) <= 16 * 60.0


async def test_the_connection_tells_the_places_prompt_conversation_and_use():
    own, other = Recording(), Recording()
    async with serving(own, other):
        engines = RunEngines.of([own.url, other.url], KEY, capacity=64)
        async with Connection(engines) as connection:
            for _ in range(3):
                await connection.generate("a turn", [1, 2], {}, turn_of="x")
    counts = (own.log.count("generate"), other.log.count("generate"))
    assert sorted(counts) == [0, 3]
    (use,) = engines.places.take_use()[0].values()
    assert use.num_answers == 3 and use.num_input == 6


async def test_requests_to_engines_bypass_a_site_proxy(monkeypatch):
    """Users have it in their environment for downloads; it cannot reach nodes of the cluster."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    own = Recording()
    async with serving(own), Connection(address(own)) as connection:
        answer = await connection.generate("a request", [1], {})
        assert len(answer.token_ids)


def test_a_request_names_the_rank_of_an_engine_with_several():
    async def scenario():
        own = Recording()
        async with serving(own):
            engines = RunEngines()
            engines.places.set_own([Place(own.url, KEY, 4, num_ranks=2)])
            async with Connection(engines) as connection:
                for prompt in (7, 8, 7):
                    await connection.generate("a request", [1], {}, prompt=prompt)
        return [body["routed_dp_rank"] for body in own.bodies]

    assert asyncio.run(scenario()) == [0, 1, 0]


async def test_an_answer_to_a_part_of_the_prompt_is_an_error():
    """NVIDIA-NeMo/Gym#1557: an engine that cuts a prompt returns 200 and an ordinary answer."""

    def cut(body):
        made = generated([7], text="7")
        made["meta_info"]["prompt_tokens"] = min(4, len(body["input_ids"]))
        return made

    own = FakeEngine(answer=cut)
    async with serving(own), Connection(address(own)) as connection:
        await connection.generate("a request", [1, 2, 3, 4], {})
        with pytest.raises(RolloutError, match="read 4 tokens of a prompt that has 5"):
            await connection.generate("a request", [1, 2, 3, 4, 5], {})


@pytest.mark.parametrize("watches", [False, True])
async def test_weights_that_this_run_has_not_sent_are_those_of_another(watches: bool):
    """Two runs may have the same external engine; each checks the version at its own updates alone."""
    engine = FakeEngine(version="9")
    watch = Watch(0.01, begin=lambda: None, add=lambda _: None) if watches else None
    async with serving(engine):
        engines = RunEngines.of([engine.url], KEY, capacity=1)
        async with Connection(engines) as connection:
            for known in (None, 9, 12):
                connection.newest_version = known
                answer = await connection.generate("a", [1, 2], {"max_new_tokens": 2}, watch=watch)
                assert {version for version, _ in answer.version_spans} == {9}
            connection.newest_version = 8
            with pytest.raises(
                RolloutError, match="weights of version 9, and the newest of this run"
            ):
                await connection.generate("a", [1, 2], {"max_new_tokens": 2}, watch=watch)
