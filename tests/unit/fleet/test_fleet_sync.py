"""The fleet's part of a weight update: hold, write, publish; a fleet may be created at any time."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from rlpost.engines.places import Places
from rlpost.errors import ConfigError, Fenced, RolloutError
from rlpost.extensions.fleet import fleet_sync as module
from rlpost.extensions.fleet.fleet_folder import FleetFolder
from rlpost.extensions.fleet.fleet_sync import FleetRules, FleetSync
from rlpost.extensions.fleet.membership import FleetLimits
from rlpost.extensions.fleet.records import EngineRecord, EngineState, Lease, LeaseState
from tests.unit.rollout.fake_engine import KEY, FakeEngine, serving

RULES = FleetRules(concurrency=8, limits=FleetLimits(lost_after_s=30))


class World:
    def __init__(self, root, engine, rules, group="policy"):
        self.folder, self.places, self.engine = FleetFolder(root, group), Places(), engine
        self.exported, self.owner, self.ledger = [], True, []
        self.exporting = self.export
        self.sync = FleetSync(
            self.folder,
            Lease("2", 0, settings="d", address="127.0.0.1"),
            self.places,
            export=lambda folder, version: self.exporting(folder, version),
            rules=replace(RULES, **rules),
            check=self.check,
            record=lambda event, **details: self.ledger.append({"event": event, **details}),
        )

    async def export(self, folder, version):
        assert not self.places.joined, "an engine of the fleet generates"
        self.exported.append(Path(folder).name)
        Path(folder).mkdir()

    def check(self):
        if not self.owner:
            raise Fenced("another attempt")

    def ask_for_a_fleet(self):
        self.folder.create()
        (self.folder.root / "secret").write_text(KEY + "\n")
        self.folder.write_engine(
            EngineRecord("7_0", "i", EngineState.READY, 1, url=self.engine.url, settings="d")
        )

    async def update(self, version):
        await self.sync.before()
        await self.sync.write(version)
        await self.sync.publish(version)

    async def until(self, *urls):
        async with asyncio.timeout(30):
            while [place.url for place in self.places.joined] != list(urls):
                await asyncio.sleep(0.02)


@asynccontextmanager
async def scenario(tmp_path, monkeypatch, group="policy", **rules):
    monkeypatch.setattr(FleetFolder, "secret", lambda _: KEY)
    engine = FakeEngine()
    async with serving(engine):
        world = World(tmp_path, engine, rules, group)
        try:
            yield world
        finally:
            await world.sync.close()


async def test_a_run_without_a_fleet_writes_no_weights(tmp_path, monkeypatch):
    async with scenario(tmp_path, monkeypatch) as world:
        await world.update(0)
        await world.update(1)
        await world.sync.enough(others=2)
    assert not world.exported and not world.folder.exists() and world.ledger == []


async def test_a_fleet_created_later_joins_at_the_next_update(tmp_path, monkeypatch):
    async with scenario(tmp_path, monkeypatch) as world:
        await world.update(0)
        world.ask_for_a_fleet()
        await world.update(1)
        await world.until(world.engine.url)
        (place,) = world.places.joined
        assert (place.api_key, place.capacity) == (KEY, 8)
        await world.update(2)
        await world.update(3)
        await world.until(world.engine.url)
    assert world.exported == ["2-0000001", "2-0000002", "2-0000003"]
    assert world.engine.version == "3"
    assert sorted(path.name for path in world.folder.weights.iterdir()) == world.exported[1:]
    assert world.folder.lease().state is LeaseState.RUNNING  # the next attempt finds the engine


async def test_weights_of_an_earlier_attempt_are_never_served(tmp_path, monkeypatch):
    async with scenario(tmp_path, monkeypatch) as world:
        world.ask_for_a_fleet()
        (world.folder.weights / "1-0000005").mkdir()
        world.engine.version = "5"
        await world.update(5)
        await world.until(world.engine.url)
    assert world.exported == ["2-0000005"]
    read = [body["model_path"] for body in world.engine.bodies if "model_path" in body]
    assert [Path(path).name for path in read] == ["2-0000005"]
    assert [path.name for path in world.folder.weights.iterdir()] == ["2-0000005"]


async def test_a_repeated_update_writes_weights_once(tmp_path, monkeypatch):
    async with scenario(tmp_path, monkeypatch) as world:
        world.ask_for_a_fleet()
        await world.sync.before()
        await world.sync.write(1)
        await world.sync.write(1)
    assert world.exported == ["2-0000001"]


async def test_at_the_end_of_the_run_engine_jobs_leave(tmp_path, monkeypatch):
    async with scenario(tmp_path, monkeypatch) as world:
        world.ask_for_a_fleet()
        await world.update(1)
        world.sync.end()
    assert world.folder.lease().state is LeaseState.ENDED


async def test_a_fenced_attempt_writes_no_lease(tmp_path, monkeypatch):
    async with scenario(tmp_path, monkeypatch) as world:
        world.ask_for_a_fleet()
        world.owner = False
        with pytest.raises(Fenced):
            await world.sync.before()
    assert world.folder.lease() is None


async def test_with_separate_gpus_the_trainer_writes_while_engines_generate(tmp_path, monkeypatch):
    async with scenario(tmp_path, monkeypatch) as world:
        world.ask_for_a_fleet()
        release = asyncio.Event()
        export = world.export

        async def slow(folder, version):
            await release.wait()
            await export(folder, version)

        world.exporting = slow
        await world.sync.before()
        world.sync.in_background(1)
        training = asyncio.create_task(world.sync.wait_for_write())
        await asyncio.sleep(0.05)
        assert not training.done() and not world.exported
        release.set()
        await training
        assert world.exported == ["2-0000001"]
        await world.until(world.engine.url)
        await world.sync.before()
        assert not world.places.joined
        world.sync.in_background(2)
        await world.until(world.engine.url)
    assert world.exported == ["2-0000001", "2-0000002"] and world.engine.version == "2"


@pytest.mark.parametrize("needs_fleet", [False, True])
async def test_weights_that_cannot_be_written_end_a_run_only_if_it_needs_its_fleet(
    tmp_path, monkeypatch, caplog, needs_fleet
):
    async with scenario(tmp_path, monkeypatch, min_engines=int(needs_fleet)) as world:
        world.ask_for_a_fleet()

        async def full(folder, version):
            raise OSError(28, "No space left on device")

        world.exporting = full
        await world.sync.before()
        world.sync.in_background(1)
        if needs_fleet:
            with pytest.raises(OSError, match="No space"):
                await world.sync.enough(others=0)
        else:
            await world.sync.wait_for_write()
            assert "No space left" in caplog.text
            await world.sync.before()  # the next update tries again
            world.exporting = world.export
            world.sync.in_background(2)
            await world.until(world.engine.url)


async def test_a_run_that_needs_its_fleet_waits_for_the_first_engine(tmp_path, monkeypatch):
    async with scenario(tmp_path, monkeypatch, min_engines=1, is_wanted=True) as world:
        await world.sync.before()  # creates the folder, which does not exist yet
        world.sync.in_background(1)
        waiting = asyncio.create_task(world.sync.enough(others=0))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        world.ask_for_a_fleet()
        async with asyncio.timeout(30):
            await waiting
        assert [place.url for place in world.places.joined] == [world.engine.url]


async def test_a_wait_without_any_engine_ends_with_an_error(tmp_path, monkeypatch, caplog):
    async with scenario(tmp_path, monkeypatch, min_engines=1, is_wanted=True, wait_s=0.05) as world:
        await world.sync.before()
        world.sync.check_any(others=1)
        world.sync.check_any(others=0)
        assert "answers wait for an engine" in caplog.text
        await asyncio.sleep(0.06)
        world.sync.check_any(others=1)
        world.sync.check_any(others=0)  # the wait starts again here
        await asyncio.sleep(0.06)
        with pytest.raises(RolloutError, match="--engine-wait-s"):
            world.sync.check_any(others=0)


async def test_a_model_that_a_fleet_cannot_serve_is_refused_once_with_the_reason(
    tmp_path, monkeypatch, caplog
):
    async with scenario(tmp_path, monkeypatch, refusal="fp8 weights") as world:
        world.ask_for_a_fleet()
        await world.update(1)
        await world.update(2)
    assert not world.exported and caplog.text.count("cannot join: fp8 weights") == 1


async def test_a_run_that_waits_for_engines_that_cannot_join_ends(tmp_path, monkeypatch):
    async with scenario(tmp_path, monkeypatch, refusal="fp8 weights", is_wanted=True) as world:
        with pytest.raises(ConfigError, match="cannot join: fp8 weights"):
            await world.sync.before()


async def test_the_ledger_gets_allocated_and_used_time_of_engines(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ACCOUNT_S", 0.1)
    async with scenario(tmp_path, monkeypatch) as world:
        world.ask_for_a_fleet()
        record = world.folder.engine("7_0").next(alive_s=120.0, num_gpus=4)
        world.folder.write_engine(record)
        await world.update(1)
        await world.until(world.engine.url)
        async with asyncio.timeout(30):
            while not (world.ledger and world.ledger[-1]["used"].get("7_0")):
                await asyncio.sleep(0.02)
    last = world.ledger[-1]
    assert (last["event"], last["attempt"], last["allocated"]) == ("fleet", "2", {"7_0": 480.0})
    assert last["used"]["7_0"] > 0


JUDGE = {"is_wanted": True, "min_engines": 1, "waits": "[engines.judge] needs {}: requests wait"}


async def test_engines_of_a_group_serve_the_weights_of_their_model(tmp_path, monkeypatch, caplog):
    async with scenario(tmp_path, monkeypatch, "judge", **JUDGE) as world:
        await world.sync.serve(0)
        world.sync.check_any(others=0)
        assert "0 engines serve, but [engines.judge] needs 1: requests wait; of the" in caplog.text
        world.ask_for_a_fleet()
        await world.until(world.engine.url)
        world.sync.check_any(others=0)
    assert world.folder.root.name == "fleet-judge" and not world.exported
    assert "update_weights_from_disk" not in world.engine.log and world.engine.version == "0"
    last = world.ledger[-1]
    assert (last["event"], last["group"]) == ("fleet", "judge") and "7_0" in last["used"]


async def test_engines_that_evaluate_read_a_folder_and_no_longer_once_it_may_be_removed(
    tmp_path, monkeypatch
):
    async with scenario(tmp_path, monkeypatch, "evaluator", **JUDGE, wait_s=0.2) as world:
        world.ask_for_a_fleet()
        for version in (4, 9):
            world.sync.check_any(others=0)  # it has served since the check before
            await world.sync.serve(version, tmp_path / f"step-{version}")
            await world.until(world.engine.url)
            assert world.engine.version == str(version)
            await world.sync.before()
            assert not world.places.joined
            await asyncio.sleep(0.3)
    read = [Path(body["model_path"]).name for body in world.engine.bodies if "model_path" in body]
    assert read == ["step-4", "step-9"]
