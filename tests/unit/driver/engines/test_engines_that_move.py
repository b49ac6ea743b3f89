"""Engines of a lost node get no more requests and start exactly once on the replacement node.

Other engines are not affected.
"""

import asyncio
from types import SimpleNamespace

import pytest

from common.cluster import Cluster, Node
from rlpost.config.load import load
from rlpost.driver.engines.own_engines import OwnEngines
from rlpost.driver.placement import Offer, Placement, Ports, Slot, replaced
from rlpost.engines.own_membership import OwnMembership
from rlpost.engines.places import GivenUp, Request

ONE, TWO = Slot("id1", "10.0.0.1", 1), Slot("id2", "10.0.0.2", 1)
PLACEMENT = Placement((), ((ONE,), (TWO,), (ONE, TWO)))
MOVED = replaced(PLACEMENT, TWO.ip, Offer("id3", "10.0.0.3", 2))


@pytest.fixture
def scene(tmp_path, monkeypatch):
    """A fleet of three engines, the last one on both nodes; starts wait for ``may_start``."""
    (tmp_path / "secret").write_text("key")
    cluster = Cluster("10.0.0.1:1", str(tmp_path), (Node("n1", ONE.ip, "lo", 2),), 20000, 100)
    ports = Ports((1, 1, 2), (3, 3, 4), 7, ())
    fleet, log = OwnEngines(load([], {}).config, cluster, PLACEMENT, ports), []
    found = SimpleNamespace(fleet=fleet, log=log, may_start=asyncio.Event(), fails=False)

    def group(index, *_):
        async def abandon(left, **_):
            log.append(f"abandon {index}, left: {left}")

        async def check_alive():
            pass

        return SimpleNamespace(abandon=abandon, check_alive=check_alive)

    async def start_engine(index):
        log.append(f"start {index} at {fleet._address(index).url}")
        await found.may_start.wait()
        if found.fails:
            raise RuntimeError("its image is broken")

    monkeypatch.setattr(fleet, "_group", group)
    monkeypatch.setattr(fleet, "_start_engine", start_engine)
    fleet._workers = [group(index) for index in range(3)]
    fleet.members = OwnMembership(3)
    fleet.addresses = tuple(fleet._address(index) for index in range(3))
    fleet._place()
    return found


def run(act):
    asyncio.run(asyncio.wait_for(act(), 10))


async def test_engines_of_a_lost_node_get_no_requests_and_those_in_flight_are_given_up(scene):
    places = scene.fleet.serving.places
    ends = []

    async def one(conversation):
        try:
            async with places.take(Request(conversation=conversation)) as place:
                await asyncio.sleep(10)
        except GivenUp:
            ends.append(place.url)

    asking = [asyncio.create_task(one(number)) for number in range(3)]
    await asyncio.sleep(0)
    await scene.fleet.lose([1, 2])
    await scene.fleet.lose([1, 2])
    await asyncio.sleep(0.05)
    assert sorted(ends) == ["http://10.0.0.1:2", "http://10.0.0.2:1"]
    assert [place.url for place in places.all()] == ["http://10.0.0.1:1"]
    assert scene.fleet.members.dismissed == {1, 2} and not asking[0].done()


async def test_only_engines_with_other_slots_get_new_workers_and_addresses(scene):
    await scene.fleet.move(MOVED)
    assert scene.log == ["abandon 1, left: []", "abandon 2, left: [0]"]
    urls = ["http://10.0.0.1:1", "http://10.0.0.3:1", "http://10.0.0.1:2"]
    assert [address.url for address in scene.fleet.addresses] == urls
    await scene.fleet.move(MOVED)
    assert len(scene.log) == 2


async def test_a_restart_in_progress_is_awaited_and_not_repeated(scene):
    await scene.fleet.move(MOVED)
    scene.log.clear()
    scene.fleet.begin_restart(1)
    scene.fleet.begin_restart(1)
    restarting = asyncio.create_task(scene.fleet.restart(1))
    await asyncio.sleep(0.05)
    assert scene.log == ["start 1 at http://10.0.0.3:1"] and not restarting.done()
    scene.may_start.set()
    await restarting
    scene.fleet.members.lost([1])
    await scene.fleet.restart(1)  # a later restart starts the engine again
    assert len(scene.log) == 2


async def test_a_failed_restart_in_progress_is_an_error_of_the_repair(scene):
    scene.fails = True
    scene.may_start.set()
    scene.fleet.begin_restart(1)
    with pytest.raises(RuntimeError, match="its image is broken"):
        await scene.fleet.restart(1)
