"""Adoption of engines by a later driver of an attempt, and what it clears in them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar

import pytest
from aiohttp import web

from common.cluster import Cluster, Node
from rlpost.config.load import load
from rlpost.driver.engines import own_engines
from rlpost.driver.engines.adoption import difference, is_adopted
from rlpost.driver.engines.own_engines import OwnEngines
from rlpost.driver.placement import Placement, Ports, Slot
from rlpost.driver.workers import StandbyWorker
from rlpost.engines.engine_client import EngineClient
from rlpost.engines.engine_side_weights import connection_name
from rlpost.engines.shard_mover import SLICES

SETTINGS = {"model_path": "/m", "server_args": {"nccl_port": 1}, "num_gpus": 1, "node_rank": 0}


def test_an_engine_at_the_wanted_address_with_the_wanted_settings_has_no_difference():
    wanted = [("http://a:1", SETTINGS), ("http://b:1", {**SETTINGS, "node_rank": 1})]
    assert difference(wanted, wanted) is None
    assert difference([wanted[0], None], wanted) == "a server has ended"
    assert "http://a:2" in str(difference([("http://a:2", SETTINGS), wanted[1]], wanted))
    other = ("http://a:1", {**SETTINGS, "model_path": "/n"})
    assert "model_path" in str(difference([other, wanted[1]], wanted))


class Server:
    """An engine within a weight update and in ``groups``; it records its requests."""

    def __init__(self, *groups: str, hangs: bool = False) -> None:
        self.asked: list[str] = []
        self.groups, self.hangs = set(groups), hangs
        app = web.Application()
        app.router.add_route("*", "/{path}", self.answer)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)

    async def __aenter__(self) -> Server:
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.port = self.runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.runner.cleanup()

    async def answer(self, request: web.Request) -> web.Response:
        path = request.path.removeprefix("/")
        if path == "destroy_weights_update_group":
            name = (await request.json())["group_name"]
            if name not in self.groups:
                return web.json_response({"success": False}, status=400)
            self.groups.remove(name)
        else:
            self.asked.append(path)
        if self.hangs and path == "end_weight_update":
            await asyncio.sleep(60)
        infos = {"model_info": {"weight_version": "7"}, "server_info": {"version": "0.5.21"}}
        return web.json_response(infos.get(path, {}))


class Workers:
    """The workers that the dead driver left behind."""

    def __init__(self, *running: Any) -> None:
        self.answers = list(running)

    async def running(self, within_s: float) -> list[Any]:
        return self.answers


async def adopted(server: Server, *, incarnation: int = 1, running: Any = None) -> bool:
    wanted = [(server.url, SETTINGS)]
    return await is_adopted(
        Workers(*(running or wanted)),
        EngineClient(server.url, "key", timeout_s=0.5),
        wanted,
        incarnation=incarnation,
        num_stages=2,
    )


async def test_an_adopted_engine_is_idle_and_in_no_group_of_the_dead_driver():
    names = [f"{connection_name(0, 3)}-{stage}" for stage in range(2)]
    async with Server(*names, f"{connection_name(1, 1)}-0") as server:
        assert await adopted(server, incarnation=2)
        assert not server.groups
        assert server.asked == [
            "health",
            "pause_generation",
            "end_weight_update",
            "continue_generation",
            "model_info",
        ]


async def test_an_engine_that_does_not_answer_is_not_adopted():
    """With NCCL, it may be blocked in a broadcast of the dead trainer."""
    async with Server(hangs=True) as server:
        assert not await adopted(server)
    assert not await adopted(server), "it has ended"


async def test_an_engine_whose_worker_does_not_answer_is_not_contacted():
    async with Server() as server:
        assert not await adopted(server, running=[None])
        assert server.asked == []


class Group:
    """A group of one worker; ``handle`` is the worker that the dead driver left, if any."""

    made: ClassVar[list[Group]] = []

    def __init__(self, makes: Any, slots: Any, *, standbys: Any, **options: Any) -> None:
        self.settings = {key: makes[0].keywords[key] for key in SETTINGS}
        self.handle = standbys[0].handle if standbys else None
        self.outlives = options["outlive_driver"]
        self.calls: list[str] = []
        Group.made.append(self)

    async def answers_aside(self, method: str, within_s: float) -> list[Any]:
        return [(self.handle, self.settings) if self.handle else None]

    async def call_each(self, method: str, places: Any, **options: Any) -> None:
        self.calls.append(method)

    async def call_aside(self, method: str) -> None:
        pass

    async def kill(self) -> None:
        self.calls.append("kill")


@pytest.mark.parametrize("incarnation", [0, 1])
async def test_a_later_driver_starts_only_engines_that_it_cannot_adopt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, incarnation: int
):
    """Engine 0 serves, engine 1 has ended, and the worker of engine 2 is gone."""
    monkeypatch.setattr(Group, "made", [])
    monkeypatch.setattr(own_engines, "WorkerGroup", Group)
    (tmp_path / "secret").write_text("key")
    (unformed := tmp_path / SLICES / connection_name(0, 1)).mkdir(parents=True)
    node = Node("n0", "127.0.0.1", "lo", 3)
    cluster = Cluster("", str(tmp_path), (node,), 20000, 100, incarnation=incarnation)
    async with Server() as first, Server() as second, Server() as third:
        servers = (first, second, third)
        left = {"engine-0": StandbyWorker(first.url), "engine-1": StandbyWorker("")}
        monkeypatch.setattr(own_engines, "left_workers", lambda: left)
        placement = Placement((), ((Slot("n0", "127.0.0.1", 1),),) * 3)
        ports = Ports(tuple(one.port for one in servers), (1, 1, 1), 4, ())
        fleet = OwnEngines(load([], {}).config, cluster, placement, ports)
        await fleet.start(())
    assert unformed.exists() == (incarnation == 0), "adopted engines would wait for the group"
    assert all(group.outlives for group in Group.made)
    calls = [(group.handle is not None, group.calls) for group in Group.made]
    if incarnation == 0:
        assert calls == [(False, ["start"])] * 3
    else:
        new = (False, ["start"])
        assert sorted(calls) == sorted([(True, []), (True, ["kill"]), new, new])
