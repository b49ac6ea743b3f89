"""Groups of engines: the same start, health and restarts as the policy's, under their names."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import web

from common.cluster import Cluster, Node
from rlpost.config.load import load
from rlpost.driver.engines import own_engines
from rlpost.driver.engines.engine_groups import EngineGroups
from rlpost.driver.placement import Placement, Ports, Slot
from rlpost.driver.preemption import StopRequest
from rlpost.engines.group_client import EngineClients
from rlpost.engines.own_membership import MAX_RESTARTS, GiveUp, OwnMembership, Start
from rlpost.extensions.fleet.fleet_folder import FleetFolder
from rlpost.extensions.fleet.records import EngineRecord, EngineState, LeaseState
from tests.unit.driver.engines.test_own_engines import FakeGroup
from tests.unit.rollout.fake_engine import KEY, FakeEngine, serving

SETTINGS = {
    "engines": {"judge": {"model": "/judge", "engines": 2, "concurrency": 3}},
    "sglang": {"rollout_health_check_interval": 0.01, "rollout_health_check_timeout": 0.5},
}


class Started(FakeGroup):
    """A process that serves again after each start."""

    names: list[str]

    def __init__(self, makes, slots, *, names, **options):
        super().__init__(makes, slots, **options)
        self.names, self.model = names, makes[0].keywords["model_path"]

    async def call_each(self, method, arguments, **options):
        self.num_starts = getattr(self, "num_starts", 0) + 1
        await self.on_start(self)

    async def on_start(self, group):
        pass


async def test_an_engine_of_a_group_that_dies_is_restarted_while_answers_are_generated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_engines, "WorkerGroup", Started)
    monkeypatch.setattr(FakeGroup, "made", [])
    events: list[tuple[str, object]] = []
    async with asyncio.timeout(30):
        runners = [await engine_on(0) for _ in range(2)]
        (tmp_path / "secret").write_text("key")
        node = Node("n0", "127.0.0.1", "lo", 2)
        cluster = Cluster("127.0.0.1:1", str(tmp_path), (node,), 20000, 100)
        config = load([], SETTINGS).config
        slot = (Slot("n0", "127.0.0.1", 1),)
        numbers = tuple(runner.addresses[0][1] for runner in runners)
        placement = Placement((), (), groups={"judge": (slot, slot)})
        ports = Ports((), (), 0, (), groups={"judge": Ports(numbers, (1, 2), 0, ())})
        clients = EngineClients.of(config)
        groups = EngineGroups(
            config,
            cluster,
            placement,
            ports,
            clients,
            hf={},
            check=lambda: None,
            record=lambda event, **details: events.append((event, details)),
        )
        await groups.start()
        groups.watch(stop=StopRequest(tmp_path / "STOP"))
        judge = clients["judge"]
        assert [(place.url, place.capacity) for place in judge.places.all()] == [
            (f"http://127.0.0.1:{number}", 3) for number in numbers
        ]
        assert [group.names for group in Started.made] == [["engine-judge-0"], ["engine-judge-1"]]
        assert {group.model for group in Started.made} == {"/judge"}
        again = asyncio.Event()

        async def serve_again(group: Started) -> None:
            runners[1] = await engine_on(numbers[1])
            again.set()

        Started.made[1].on_start = serve_again

        async def generating() -> str:
            await runners[1].cleanup()
            await again.wait()
            while len(judge.places.all()) < 2:
                await asyncio.sleep(0.01)
            return "answers"

        assert await groups.over(generating()) == "answers"
        await groups.close()
        await clients.close()
        for runner in runners:
            await runner.cleanup()
    assert [group.num_starts for group in Started.made] == [1, 2]
    lost, recovered = events
    assert lost[0] == "engine_lost" and recovered[0] == "recovered"
    assert lost[1]["group"] == recovered[1]["group"] == "judge" and lost[1]["engines"] == [1]


async def test_the_death_of_a_fleet_engine_loses_no_answer_of_a_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests wait while none has joined; one in flight to a lost engine goes to the next."""
    monkeypatch.setattr(FleetFolder, "secret", lambda _: KEY)
    settings = {"engines": {"judge": {"model": "/judge", "fleet": True, "engines": 0}}}
    monkeypatch.setattr(FakeGroup, "made", [])
    async with asyncio.timeout(30):
        node = Node("n0", "127.0.0.1", "lo", 2)
        attempt = tmp_path / "run/attempts/0"
        attempt.mkdir(parents=True)
        (attempt / "secret").write_text("key")
        cluster = Cluster("127.0.0.1:1", str(attempt), (node,), 20000, 100)
        config = load([], settings).config
        clients = EngineClients.of(config)
        none = Ports((), (), 0, ())
        groups = EngineGroups(
            config,
            cluster,
            Placement((), (), groups={"judge": ()}),
            Ports((), (), 0, (), groups={"judge": none}),
            clients,
            hf={},
            check=lambda: None,
        )
        await groups.start()
        groups.watch(stop=StopRequest(tmp_path / "STOP"))
        folder = FleetFolder(tmp_path / "run", "judge")
        settings_of = folder.lease().settings
        asked = asyncio.create_task(groups.over(clients["judge"].generate([5, 6])))
        await asyncio.sleep(0.05)
        assert not asked.done() and not FakeGroup.made, "the job starts no engine"
        first, second = FakeEngine(holds=asyncio.Event()), FakeEngine()
        async with serving(second):
            async with serving(first):
                folder.write_engine(joined("7_0", first, settings_of))
                while not first.under_way:
                    await asyncio.sleep(0.01)
                gone = joined("7_0", first, settings_of).next(state=EngineState.GONE)
                folder.write_engine(gone)
                folder.write_engine(joined("7_1", second, settings_of))
                assert (await asked)["output_ids"]
                first.holds.set()
            assert [place.url for place in clients["judge"].places.all()] == [second.url]
            groups.end()
            await groups.close()
        await clients.close()
        assert folder.lease().state is LeaseState.ENDED


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_trained_batch_is_no_progress_of_engines_that_only_evaluate(
    tmp_path: Path, evaluates: bool
) -> None:
    """Else one that never starts would be started again as long as training lasts."""
    (tmp_path / "secret").write_text("key")
    cluster = Cluster("127.0.0.1:1", str(tmp_path), (Node("n0", "127.0.0.1", "lo", 2),), 20000, 100)
    config = load([], {**SETTINGS, "eval": {"eval_engines": "judge" if evaluates else None}}).config
    groups = EngineGroups(
        config,
        cluster,
        Placement((), (), groups={"judge": ()}),
        Ports((), (), 0, (), groups={"judge": Ports((), (), 0, ())}),
        EngineClients.of(config),
        hf={},
        check=lambda: None,
    )
    groups.watch(stop=StopRequest(tmp_path / "STOP"))
    members = groups.engines["judge"].members = OwnMembership(1)
    for _ in range(MAX_RESTARTS + 1):
        members.stopped(0)
        members.started(0)
        groups.forget_restarts()
    members.stopped(0)
    assert isinstance(members.next_action(), GiveUp if evaluates else Start)
    groups.health["judge"].forget_restarts()  # after an evaluation
    assert isinstance(members.next_action(), Start)


def joined(name: str, engine: FakeEngine, settings: str) -> EngineRecord:
    """Return the record of an engine that is ready."""
    return EngineRecord(name, f"of {name}", EngineState.READY, 1, url=engine.url, settings=settings)


async def engine_on(port: int) -> web.AppRunner:
    """Start an engine that is healthy; port 0: any."""
    app = web.Application()

    async def answer(request):
        return web.json_response({"version": "0.5.21"})

    app.router.add_route("*", "/{path}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
    return runner
