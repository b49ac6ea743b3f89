"""An engine that has died or hangs is dismissed at whatever it is asked next; the others do what they were asked."""

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest
from aiohttp import web

from rlpost.config.load import load
from rlpost.errors import EngineDied, RolloutError
from rlpost.orchestration import engines
from rlpost.orchestration.engines import Fleet
from rlpost.types import EngineAddress


class FakeRouter:
    """Knows who serves."""

    def __init__(self, urls):
        self.urls = set(urls)
        self.ended = threading.Event()

    def remove_engine(self, url):
        self.urls.remove(url)

    def add_engines(self, urls, *, deadline_s):
        """Looks at engines that nobody can reach until it ends itself."""
        assert self.ended.wait(deadline_s)
        raise RolloutError("router ended")


class FakeWorkers:
    """The process of one engine; it can be told to stop."""

    def __init__(self):
        self.calls = []
        self.has_ended = False

    async def check_alive(self):
        if self.has_ended:
            raise EngineDied("engine 1 ended by itself")

    async def stop(self):
        self.calls.append("stop")


async def engine(asked):
    """An engine that says yes to everything and writes down what it was asked; returns what ends it."""
    app = web.Application()

    async def answer(request):
        asked.append(request.path)
        return web.json_response({})

    app.router.add_post("/{path}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner


def fleet_of(runners, folder):
    cluster = SimpleNamespace(attempt_dir=str(folder), secret="key")
    fleet = Fleet(load([], {"cluster": {"colocate": True}}).config, cluster, None, None)
    urls = [f"http://127.0.0.1:{runner.addresses[0][1]}" for runner in runners]
    fleet.addresses = tuple(EngineAddress(url, 1) for url in urls)
    fleet._router, fleet._workers = FakeRouter(urls), [FakeWorkers() for _ in urls]
    return fleet


def asked_of_two(work, folder):
    """What two engines were asked, and the fleet: the second one dies after it gave up its memory."""

    async def run():
        asked = [], []
        runners = [await engine(each) for each in asked]
        fleet = fleet_of(runners, folder)
        try:
            await fleet.release_memory("weights", "kv_cache")
            await runners[1].cleanup()
            await work(fleet)
        finally:
            await runners[0].cleanup()
        return fleet, asked

    return asyncio.run(run())


def test_an_engine_that_died_with_its_memory_released_is_dismissed_when_it_is_to_take_it_again(tmp_path):
    fleet, asked = asked_of_two(lambda fleet: fleet.restore_memory("weights"), tmp_path)
    assert fleet.dismissed == {1} and fleet._workers[1].calls == ["stop"] and not fleet._workers[0].calls
    assert fleet._router.urls == {fleet.addresses[0].url}
    assert asked[0][-1] == "/resume_memory_occupation" and "/resume_memory_occupation" not in asked[1]
    assert fleet.is_released("kv_cache") and not fleet.is_released("weights"), "of the one that lives"


def test_an_engine_that_hangs_instead_of_giving_up_its_memory_is_dismissed_and_a_refusal_is_an_error(tmp_path):
    """A process that is ended gives up its memory; settings under which none can give it up have to be mended."""

    async def answers(how):
        app = web.Application()
        app.router.add_post("/pause_generation", yes)
        app.router.add_post("/release_memory_occupation", how)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    async def released(how):
        runners = [await engine([]), await answers(how)]
        fleet = fleet_of(runners, tmp_path)
        fleet._deadline_s = 0.3
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
    assert fleet.dismissed == {1} and fleet._workers[1].calls == ["stop"] and fleet.is_released("kv_cache")
    with pytest.raises(RolloutError, match="POST /release_memory_occupation answered 400"):
        asyncio.run(released(refuse))


def test_an_engine_that_died_is_dismissed_when_it_is_to_generate_again(tmp_path):
    fleet, asked = asked_of_two(lambda fleet: fleet.resume(), tmp_path)
    assert fleet.dismissed == {1} and asked[0][-1] == "/continue_generation"


def test_an_engine_that_ends_before_the_router_has_reached_it_is_named_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "ALIVE_POLL_S", 0.01)

    async def run():
        runners = [await engine([]), await engine([])]
        fleet = fleet_of(runners, tmp_path)
        fleet.dismissed = {1}
        try:
            admitting = asyncio.create_task(fleet.admit(1))
            await asyncio.sleep(0.1)
            assert not admitting.done(), "the router waits for an engine that lives"
            fleet._workers[1].has_ended, started = True, time.monotonic()
            with pytest.raises(EngineDied, match="engine 1 ended"):
                await admitting
            return fleet.dismissed, time.monotonic() - started
        finally:
            fleet._router.ended.set()  # as when the fleet is closed
            for runner in runners:
                await runner.cleanup()

    dismissed, seconds = asyncio.run(run())
    assert dismissed == {1}
    assert seconds < 60, "not after the deadline of a start"


@pytest.mark.parametrize(("replay", "mode"), [(False, "retract"), (True, "abort")])
def test_new_weights_abort_answers_whose_routes_a_retraction_would_replace(tmp_path, replay, mode):
    config = load([], {"grpo": {"use_rollout_routing_replay": replay}}).config
    fleet = Fleet(config, SimpleNamespace(attempt_dir=str(tmp_path), secret="key"), None, None)
    assert fleet.pause_mode == "abort", "until the versions of the engines are known"
    fleet.can_retract = True
    assert fleet.pause_mode == mode


@pytest.mark.parametrize("replay", [False, True])
def test_engines_are_started_to_return_routes_where_these_are_replayed(tmp_path, monkeypatch, replay):
    made = []

    class Workers:
        async def start(self, *places, **options):
            raise EngineDied("enough")

    monkeypatch.setattr(engines, "WorkerGroup", lambda makes, *rest, **named: made.extend(makes))
    monkeypatch.setattr(engines, "EngineWorkers", lambda group: Workers())
    config = load([], {"grpo": {"use_rollout_routing_replay": replay}}).config
    part = SimpleNamespace(ip="127.0.0.1", num_gpus=1, shared_with=())
    placement = SimpleNamespace(engines=[[part]])
    ports = SimpleNamespace(engines=[1], engine_groups=[2])
    cluster = SimpleNamespace(attempt_dir=str(tmp_path), secret="key")
    with pytest.raises(EngineDied):
        asyncio.run(Fleet(config, cluster, placement, ports).start([]))
    assert made[0].keywords["server_args"].get("enable_return_routed_experts", False) is replay
