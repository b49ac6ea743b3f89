"""A dead or hanging engine is dismissed at its next request; the other engines carry it out."""

import asyncio
from types import SimpleNamespace
from typing import ClassVar

import pytest
from aiohttp import web

from common.bounded import MAX_AT_ONCE
from common.cluster import Cluster, Node
from rlpost.config.load import load
from rlpost.driver.engines import engine_settings, own_engines
from rlpost.driver.engines.own_engines import OwnEngines
from rlpost.driver.placement import Placement, Ports, Slot
from rlpost.engines.connection import RunEngines
from rlpost.engines.own_membership import Admit, OwnMembership
from rlpost.errors import EngineDied, RolloutError


def serving(fleet):
    """The addresses that get requests."""
    return {place.url for place in fleet.serving.places.all()}


class FakeGroup:
    """The process of one engine, which counts its stops."""

    made: ClassVar[list["FakeGroup"]] = []

    def __init__(self, makes, slots, **options):
        self.stopped, self.has_ended = 0, False
        FakeGroup.made.append(self)

    async def call(self, method):
        self.stopped += method == "stop"

    async def call_each(self, method, arguments, **options):
        assert method == "start"

    async def call_aside(self, method):
        if self.has_ended:
            raise EngineDied("engine 1 ended by itself")


@pytest.fixture(autouse=True)
def _workers(monkeypatch):
    """Replace the processes of Ray."""
    monkeypatch.setattr(own_engines, "WorkerGroup", FakeGroup)
    monkeypatch.setattr(FakeGroup, "made", [])


async def info(request):
    return web.json_response({"version": "0.5.21"})


async def engine(asked):
    """Start an engine that accepts every request and appends its path to ``asked``.

    Return its runner, whose ``cleanup`` ends it.
    """
    app = web.Application()

    async def answer(request):
        asked.append(request.path)
        return web.json_response({})

    app.router.add_post("/{path}", answer)
    app.router.add_get("/server_info", info)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner


async def fleet_of(runners, folder, **settings):
    """Return a fleet whose engines are these servers."""
    (folder / "secret").write_text("key")
    cluster = Cluster("127.0.0.1:1", str(folder), (Node("n0", "127.0.0.1", "lo", 2),), 20000, 100)
    config = load([], {"cluster": {"colocate": True, **settings}}).config
    placement = Placement((), tuple((Slot("n0", "127.0.0.1", 1),) for _ in runners))
    ports = Ports(tuple(runner.addresses[0][1] for runner in runners), (1,) * len(runners), 4, ())
    fleet = OwnEngines(config, cluster, placement, ports)
    await fleet.start([""] * len(runners))
    return fleet


def asked_of_two(work, folder):
    """Run ``work`` on two engines, of which the second dies after it has released its memory.

    Return the fleet, and the requests to each engine.
    """

    async def run():
        asked = [], []
        runners = [await engine(each) for each in asked]
        fleet = await fleet_of(runners, folder)
        try:
            await fleet.release_memory("weights", "kv_cache")
            await runners[1].cleanup()
            await work(fleet)
        finally:
            await runners[0].cleanup()
        return fleet, asked

    return asyncio.run(run())


def test_an_engine_that_died_with_its_memory_released_is_dismissed_when_asked_to_restore_it(
    tmp_path,
):
    fleet, asked = asked_of_two(lambda fleet: fleet.restore_memory("weights"), tmp_path)
    assert fleet.members.dismissed == {1} and [group.stopped for group in FakeGroup.made] == [0, 1]
    assert serving(fleet) == {fleet.addresses[0].url}
    assert (
        asked[0][-1] == "/resume_memory_occupation" and "/resume_memory_occupation" not in asked[1]
    )
    assert fleet.is_released("kv_cache") and not fleet.is_released("weights"), (
        "of the one that lives"
    )


def test_an_engine_that_hangs_when_asked_to_release_memory_is_dismissed_and_a_refusal_is_an_error(
    tmp_path,
):
    """Ending a process frees its memory. A refusal means that the settings have to be corrected."""

    async def answers(how):
        app = web.Application()
        app.router.add_get("/server_info", info)
        app.router.add_post("/pause_generation", yes)
        app.router.add_post("/release_memory_occupation", how)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    async def released(how):
        runners = [await engine([]), await answers(how)]
        fleet = await fleet_of(runners, tmp_path, bringup_deadline_s=1)
        try:
            await fleet.release_memory("kv_cache")
        finally:
            for runner in runners:
                await runner.cleanup()
        return fleet

    async def yes(request):
        return web.json_response({})

    async def hang(request):
        await asyncio.Event().wait()

    async def refuse(request):
        return web.json_response({"success": False}, status=400)

    fleet = asyncio.run(released(hang))
    assert (
        fleet.members.dismissed == {1}
        and FakeGroup.made[1].stopped
        and fleet.is_released("kv_cache")
    )
    with pytest.raises(RolloutError, match="POST /release_memory_occupation answered 400"):
        asyncio.run(released(refuse))


def test_an_engine_that_died_is_dismissed_when_asked_to_resume(tmp_path):
    fleet, asked = asked_of_two(lambda fleet: fleet.resume(), tmp_path)
    assert fleet.members.dismissed == {1} and asked[0][-1] == "/continue_generation"


class Busy:
    """A server that counts concurrent requests."""

    def __init__(self):
        self.now = self.most = self.total = 0

    async def answer(self, request):
        self.now += 1
        self.most, self.total = max(self.most, self.now), self.total + 1
        await asyncio.sleep(0.02)
        self.now -= 1
        return web.json_response({"version": "0.5.21"})


@pytest.mark.parametrize("ask", ["health", "abort", "versions"])
async def test_a_bounded_number_of_engines_is_asked_at_a_time(ask, tmp_path):
    """Each request needs a socket, so asking all engines at once would open hundreds of them."""
    busy, num_engines = Busy(), 3 * MAX_AT_ONCE + 5
    app = web.Application()
    app.router.add_route("*", "/{path}", busy.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    fleet = await fleet_of([runner], tmp_path)
    busy.total = 0  # requests of its start
    url = fleet.addresses[0].url
    fleet.addresses *= num_engines
    fleet.members = OwnMembership(num_engines)
    try:
        if ask == "health":
            assert await fleet.unhealthy(generating=True) == []
        elif ask == "abort":
            await RunEngines.of([url] * num_engines, "key", capacity=1).abort_all()
        else:
            await fleet._check_versions()
    finally:
        await runner.cleanup()
    assert busy.total == num_engines * (2 if ask == "health" else 1)
    assert 2 < busy.most <= MAX_AT_ONCE


def test_an_engine_that_has_ended_is_not_admitted(tmp_path):
    async def run():
        runners = [await engine([]), await engine([])]
        fleet = await fleet_of(runners, tmp_path)
        try:
            await fleet.dismiss(1)
            await fleet.restart(1)
            FakeGroup.made[1].has_ended = True
            with pytest.raises(EngineDied, match="engine 1 ended"):
                await fleet.admit([1])
            return fleet.members.dismissed, serving(fleet), fleet.addresses[0].url
        finally:
            fleet.close()
            for runner in runners:
                await runner.cleanup()

    dismissed, urls, first = asyncio.run(run())
    assert dismissed == {1} and urls == {first}


@pytest.mark.parametrize(
    ("states", "slots"),
    [
        ([{"effective_max_running_requests_per_dp": 64}], 73),
        ([{"effective_max_running_requests_per_dp": 64}] * 2, 145),
        ([{"effective_max_running_requests_per_dp": 4096}], 512),
        ([{}], 512),
        ([], 512),
    ],
)
def test_an_engine_gets_what_it_runs_at_once_and_an_eighth_more(states, slots):
    assert engine_settings.num_slots({"internal_states": states}, 512) == slots


@pytest.mark.parametrize(
    ("groups", "mode"),
    [
        ({}, "retract"),
        ({"grpo": {"use_rollout_routing_replay": True}}, "abort"),
        ({"sync": {"update_weight_mode": "adapter"}}, "abort"),
    ],
)
def test_new_weights_abort_answers_that_would_mix_routes_or_adapters(tmp_path, groups, mode):
    config = load([], groups).config
    fleet = OwnEngines(config, SimpleNamespace(attempt_dir=str(tmp_path), secret="key"), None, None)
    assert fleet.pause_mode == mode


@pytest.mark.parametrize("replay", [False, True])
def test_engines_are_started_with_routes_enabled_if_routes_are_replayed(
    tmp_path, monkeypatch, replay
):
    made = []

    class Workers:
        async def start(self, *places, **options):
            raise EngineDied("enough")

    monkeypatch.setattr(
        own_engines, "WorkerGroup", lambda makes, *rest, **named: made.extend(makes)
    )
    monkeypatch.setattr(own_engines, "EngineWorkers", lambda group: Workers())
    config = load([], {"grpo": {"use_rollout_routing_replay": replay}}).config
    part = Slot("node-1", "127.0.0.1", 1)
    placement = SimpleNamespace(engines=[[part]])
    ports = SimpleNamespace(engines=[1], engine_groups=[2])
    cluster = SimpleNamespace(attempt_dir=str(tmp_path), secret="key", incarnation=0)
    with pytest.raises(EngineDied):
        asyncio.run(OwnEngines(config, cluster, placement, ports).start([]))
    assert made[0].keywords["server_args"].get("enable_return_routed_experts", False) is replay


async def test_engines_that_are_lent_get_neither_requests_nor_weights_until_they_are_back(tmp_path):
    runners = [await engine([]) for _ in range(3)]
    fleet = await fleet_of(runners, tmp_path)
    urls = [address.url for address in fleet.addresses]
    assert fleet.lend(5) == [2, 1], "one engine generates"
    assert fleet.lend(1) == []
    assert serving(fleet) == {urls[0]} and fleet.receivers == fleet.addresses[:1]
    fleet.members.sent(5)
    fleet.give_back([1], 5)
    assert serving(fleet) == {urls[0], urls[1]}
    fleet.give_back([2], None)
    assert serving(fleet) == {urls[0], urls[1]} and fleet.receivers == fleet.addresses
    assert fleet.members.serving == [0, 1] and fleet.lend(1) == [2], "no update may follow"
    fleet.give_back([2], 4)
    fleet.members.sent(6)
    assert fleet.members.next_action() == Admit((2,), restarted=())
    await fleet.admit([2])
    assert serving(fleet) == {*urls}
    assert fleet.lend(1) == [2]
    await runners[2].cleanup()
    assert 2 not in await fleet.unhealthy(generating=False), "paused, while it reads weights"
    fleet.members.evaluates([1, 2], 5)
    assert fleet.members.lent == [2], "1 is not lent"
    assert 2 in await fleet.unhealthy(generating=False)
    await fleet.dismiss(2)
    assert not fleet.members.lent, "it is restarted as an engine of the policy"
    fleet.give_back([2], None)
    await fleet.restart(2)
    fleet.members.sent(6)
    await fleet.admit([2])
    assert serving(fleet) == {*urls}
    for runner in runners:
        await runner.cleanup()
