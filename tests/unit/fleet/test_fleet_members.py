"""The driver's side of the fleet, with fake engines and a router that is a list."""

import asyncio
import logging
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from rlpost.engines.load_check import LoadCheck
from rlpost.errors import RolloutError, WeightError
from rlpost.extensions.fleet import fleet_members as module
from rlpost.extensions.fleet.fleet_folder import FleetFolder
from rlpost.extensions.fleet.fleet_members import FleetMembers
from rlpost.extensions.fleet.fleet_servers import Deadlines
from rlpost.extensions.fleet.membership import FleetLimits, Membership
from rlpost.extensions.fleet.records import EngineRecord, EngineState, Lease, LeaseState
from tests.unit.rollout.fake_engine import KEY, FakeEngine, serving

DEADLINES = Deadlines(update_s=5, control_s=5)
LIMITS = FleetLimits(lost_after_s=0.6, pulls_at_once=2, retry_s=0.05)


class Engine(FakeEngine):
    """An engine with configurable health; ``told`` are its requests except health checks."""

    hangs = False
    health_status = 200

    @property
    def told(self):
        return [path for path in self.log if path != "health_generate"]

    async def handle(self, request):
        if self.hangs:
            await asyncio.sleep(3600)
        if request.path == "/health_generate" and self.health_status != 200:
            return web.json_response({}, status=self.health_status)
        return await super().handle(request)


class World:
    def __init__(self, root, *engines, deadlines, limits, **more):
        self.folder, self.engines = FleetFolder(root), engines
        self.folder.create()
        (self.folder.root / "secret").write_text(KEY + "\n")
        self.urls, self.names, self.lost = [], [], []
        """URLs and names of engines that get requests; URLs whose requests are given up."""
        self.members = FleetMembers(
            self.folder,
            Membership(limits),
            Lease("3", 0, host="h"),
            changed=self.change,
            lost=self.lost.append,
            deadlines=deadlines,
            poll_s=0.02,
            **more,
        )
        self.records = {
            f"7_{index}": EngineRecord(
                f"7_{index}", "i", EngineState.READY, 0, url=engine.url or "http://127.0.0.1:1"
            )
            for index, engine in enumerate(engines)
        }
        self.silent = set()
        self.beating = asyncio.create_task(self.beat())

    def change(self, now):
        self.urls, self.names = [one.url for one in now], [one.engine for one in now]
        # otherwise a draining agent would end its server before its requests are aborted
        assert {one.incarnation for one in now} <= set(self.folder.lease().in_use)
        for engine in self.engines:
            if engine.url in self.urls:
                assert engine.told[-1] == "continue_generation"

    async def beat(self):
        while True:
            for name, record in self.records.items():
                if name not in self.silent:
                    self.records[name] = record.next()
                    self.folder.write_engine(self.records[name])
            await asyncio.sleep(0.05)

    async def until(self, *names):
        async with asyncio.timeout(30):
            while self.names != list(names):
                await asyncio.sleep(0.01)

    async def close(self):
        self.beating.cancel()
        await self.members.close(has_ended=True)


@asynccontextmanager
async def scenario(tmp_path, count, monkeypatch, *, deadlines=DEADLINES, limits=LIMITS, **more):
    monkeypatch.setattr(FleetFolder, "secret", lambda _: KEY)
    engines = [Engine() for _ in range(count)]
    async with serving(*engines):
        world = World(tmp_path, *engines, deadlines=deadlines, limits=limits, **more)
        await world.members.start()
        try:
            yield world
        finally:
            await world.close()


async def test_engines_get_weights_before_requests(tmp_path, monkeypatch):
    async with scenario(tmp_path, 2, monkeypatch) as world:
        await asyncio.sleep(0.2)
        assert not world.urls and not world.engines[0].log
        await world.members.publish(5, Path("/w/5"))
        await world.until("7_0", "7_1")
        assert sorted(world.urls) == sorted(engine.url for engine in world.engines)
    for engine in world.engines:
        assert engine.told == [
            *("pause_generation", "update_weights_from_disk", "flush_cache", "model_info"),
            "continue_generation",
        ]
        assert engine.bodies[1]["model_path"] == "/w/5" and engine.version == "5"
    assert world.folder.lease().state is LeaseState.ENDED


async def test_engines_replace_the_adapter_of_the_previous_version(tmp_path, monkeypatch):
    async with scenario(tmp_path, 1, monkeypatch, load_adapters=True) as world:
        for version in (5, 6):
            await world.members.hold()
            await world.members.publish(version, Path(f"/w/{version}"))
            await world.until("7_0")
    (engine,) = world.engines
    assert (engine.adapters, engine.version) == (["version-6"], "6")
    loads = zip(engine.log, engine.bodies, strict=True)
    paths = [body["lora_path"] for path, body in loads if path == "load_lora_adapter"]
    assert paths == ["/w/5", "/w/6"]
    assert "update_weights_from_disk" not in engine.log


async def test_an_engine_that_would_skip_a_tensor_reads_no_folder(tmp_path, monkeypatch, caplog):
    """The others are checked once, not at each version."""
    checked = []

    async def check_folder(_, receivers, weights):
        (address,) = [one.address for one in receivers]
        checked.append(address.url)
        assert weights.parent == Path("/w")
        if address.url == world.engines[0].url:
            raise WeightError("v: the ranks of engine 0 load nothing of it")

    monkeypatch.setattr(LoadCheck, "check_folder", check_folder)
    async with scenario(tmp_path, 2, monkeypatch) as world:
        for version in (5, 6):
            await world.members.hold()
            await world.members.publish(version, Path(f"/w/{version}"))
            await world.until("7_1")
    refused, other = world.engines
    assert "update_weights_from_disk" not in refused.log and other.version == "6"
    assert checked.count(other.url) == 1 and checked.count(refused.url) >= 1
    assert f"7_0: {refused.url}: v: the ranks of engine 0 load nothing of it" in caplog.text


async def test_hold_returns_when_no_engine_gets_requests(tmp_path, monkeypatch):
    async with scenario(tmp_path, 2, monkeypatch) as world:
        await world.members.publish(1, Path("/w/1"))
        await world.until("7_0", "7_1")
        await world.members.hold()
        assert world.urls == []
        assert all(engine.told[-1] == "pause_generation" for engine in world.engines)
        await world.members.publish(2, Path("/w/2"))
        await world.until("7_0", "7_1")
    assert {engine.version for engine in world.engines} == {"2"}


async def test_an_engine_that_drains_is_dismissed_and_removed_from_the_lease(tmp_path, monkeypatch):
    async with scenario(tmp_path, 2, monkeypatch) as world:
        await world.members.publish(1, Path("/w"))
        await world.until("7_0", "7_1")
        world.records["7_0"] = replace(world.records["7_0"], state=EngineState.DRAINING)
        await world.until("7_1")
        while world.folder.lease().in_use != ("i",):  # only the other engine is left
            await asyncio.sleep(0.01)
        while world.engines[0].told[-1] != "pause_generation":
            await asyncio.sleep(0.01)
        assert world.members.usage()["7_0"].engine_s > 0


async def test_an_engine_whose_record_is_not_renewed_is_dismissed(tmp_path, monkeypatch):
    async with scenario(tmp_path, 2, monkeypatch) as world:
        await world.members.publish(1, Path("/w"))
        await world.until("7_0", "7_1")
        world.silent.add("7_1")
        await world.until("7_0")
        assert world.urls == [world.engines[0].url]
        world.silent.clear()
        await world.until("7_0", "7_1")  # it is admitted again with new weights
    assert world.engines[1].log.count("update_weights_from_disk") == 2


async def test_an_engine_with_another_version_is_not_admitted(tmp_path, monkeypatch, caplog):
    async with scenario(tmp_path, 2, monkeypatch) as world:
        world.engines[0].ignores_version = True
        await world.members.publish(4, Path("/w"))
        await world.until("7_1")
        await asyncio.sleep(0.1)
        assert world.urls == [world.engines[1].url]
    assert "has version '0' instead of 4" in caplog.text


async def test_a_step_waits_for_enough_engines_and_logs_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(module, "SAY_FIRST_S", 0.05)
    with caplog.at_level(logging.WARNING):
        async with scenario(tmp_path, 1, monkeypatch) as world:
            waiting = asyncio.create_task(world.members.enough(1))
            await asyncio.sleep(0.1)
            assert not waiting.done()
            await world.members.publish(1, Path("/w"))
            async with asyncio.timeout(30):
                await waiting
    assert "--min-engines is 1" in caplog.text


async def test_an_order_of_the_user_is_followed_without_the_agent(tmp_path, monkeypatch):
    async with scenario(tmp_path, 1, monkeypatch) as world:
        await world.members.publish(1, Path("/w"))
        await world.until("7_0")
        await asyncio.to_thread(world.folder.order, drain=["7_0"])
        await world.until()


@pytest.mark.parametrize("has_ended", [False, True])
async def test_the_lease_tells_engine_jobs_whether_to_wait(tmp_path, monkeypatch, has_ended):
    async with scenario(tmp_path, 0, monkeypatch) as world:
        await world.members.close(has_ended=has_ended)
        state = world.folder.lease().state
        assert state is (LeaseState.ENDED if has_ended else LeaseState.RUNNING)


@pytest.mark.parametrize("hangs", [False, True])
async def test_an_unhealthy_engine_leaves_although_its_agent_is_alive(tmp_path, monkeypatch, hangs):
    deadlines = replace(DEADLINES, health_s=0.3, health_every_s=0.1)
    async with scenario(tmp_path, 2, monkeypatch, deadlines=deadlines) as world:
        await world.members.publish(1, Path("/w"))
        await world.until("7_0", "7_1")
        world.engines[0].hangs, world.engines[0].health_status = hangs, 503
        await world.until("7_1")
        async with asyncio.timeout(30):
            while not world.lost:  # its requests in flight would never be answered
                await asyncio.sleep(0.01)
        assert set(world.lost) == {world.engines[0].url}
        world.engines[0].hangs, world.engines[0].health_status = False, 200
        await world.until("7_0", "7_1")
    assert world.engines[0].told.count("update_weights_from_disk") >= 2


async def test_an_engine_that_fails_requests_is_checked_at_once_and_leaves_after_three(
    tmp_path, monkeypatch
):
    async with scenario(tmp_path, 2, monkeypatch) as world:
        await world.members.publish(1, Path("/w"))
        await world.until("7_0", "7_1")
        for _ in range(2):
            world.members.request_failed(world.engines[0].url, "answered 500")
            await asyncio.sleep(0.05)
            assert world.names == ["7_0", "7_1"]  # the health check succeeds
        world.members.request_failed(world.engines[0].url, "answered 500")
        world.members.request_failed("http://127.0.0.1:9", "not of the fleet")
        await world.until("7_1")
        await world.until("7_0", "7_1")  # it loads the weights and is admitted again


async def test_requests_of_a_lost_engine_are_aborted_and_those_of_a_draining_one_are_not(
    tmp_path, monkeypatch
):
    async with scenario(tmp_path, 2, monkeypatch) as world:
        await world.members.publish(1, Path("/w"))
        await world.until("7_0", "7_1")
        world.records["7_0"] = replace(world.records["7_0"], state=EngineState.DRAINING)
        await world.until("7_1")
        await asyncio.sleep(0.1)
        assert not world.lost
        world.silent.add("7_1")
        await world.until()
        await asyncio.sleep(0.1)
        assert world.lost == [world.engines[1].url]


async def test_a_server_that_does_not_prove_the_key_gets_neither_key_nor_weights(
    tmp_path, monkeypatch
):
    async with scenario(tmp_path, 2, monkeypatch) as world:
        world.engines[0].knows = "another key"
        await world.members.publish(1, Path("/w"))
        await world.until("7_1")
        await asyncio.sleep(0.1)
    assert world.engines[0].log == []


async def test_a_wait_for_engines_ends_with_an_error(tmp_path, monkeypatch):
    async with scenario(tmp_path, 0, monkeypatch) as world:
        with pytest.raises(RolloutError, match=r"--min-engines is 2.*--engine-wait-s"):
            await world.members.enough(2, 1, wait_s=0.1)


async def test_many_changes_are_written_in_few_leases_the_newest_last(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LEASE_S", 60.0)
    async with scenario(tmp_path, 12, monkeypatch, limits=FleetLimits(pulls_at_once=12)) as world:
        written = []
        write = FleetFolder.write_lease

        def slow(folder, lease):
            time.sleep(0.02)
            written.append(lease.beat)
            write(folder, lease)

        monkeypatch.setattr(FleetFolder, "write_lease", slow)
        await world.members.publish(1, Path("/w"))
        await world.until(*sorted(f"7_{number}" for number in range(12)))
        await world.members.hold()
        await world.members.close(has_ended=True)
        assert written == sorted(written) and len(written) < 24
        assert world.folder.lease().state is LeaseState.ENDED
        assert world.folder.lease().beat == written[-1]


async def test_files_of_engines_that_ended_long_ago_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "RECORD_KEPT_S", 0.2)
    async with scenario(tmp_path, 2, monkeypatch) as world:
        world.records.pop("7_1")
        gone = EngineRecord("6_0", "i", EngineState.GONE, 50, alive_s=7.0)
        world.folder.write_engine(gone)
        await world.members.publish(1, Path("/w"))
        await world.until("7_0")
        async with asyncio.timeout(30):
            while world.folder.engine("6_0") is not None:
                await asyncio.sleep(0.02)
        assert world.folder.engine("7_0") is not None
        world.folder.write_engine(
            EngineRecord("6_0", "j", EngineState.READY, 1, url=world.engines[1].url)
        )
        world.records["6_0"] = world.folder.engine("6_0")
        await world.until("6_0", "7_0")  # the job was requeued, so its count starts again
