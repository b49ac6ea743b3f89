"""Repairs that cannot run at once: ranks of a lost node are away, engines are lent, a group breaks."""

import asyncio

import pytest

from rlpost.driver.lost_nodes import LostNodes
from rlpost.errors import EngineDied, TrainerDied
from tests.unit.driver.engines.test_engine_health import (
    INTERVAL_S,
    FakeFleet,
    updated,
    watch_over,
)


class AwayRanks(LostNodes):
    """Lost nodes of which the test sets the ranks."""

    away_ranks: tuple[int, ...] = ()

    @property
    def ranks(self):
        return [*self.away_ranks]


def ranks_of(watch):
    """Let the test set the ranks that are away."""
    watch._nodes = nodes = AwayRanks.none()
    return nodes


class ThreeEngines(FakeFleet):
    """The third of them can be lent."""

    num_engines = 3


@pytest.mark.parametrize("sick", [{1}, {0, 1}])
async def test_engines_that_fail_while_ranks_are_away_are_restarted_once_these_are_back(sick):
    fleet = FakeFleet()
    watch = watch_over(fleet)
    nodes = ranks_of(watch)
    await updated(watch, 4)

    async def generate():
        nodes.away_ranks, fleet.sick = (0,), {*sick}
        while fleet.members.down != [*sick]:
            await asyncio.sleep(INTERVAL_S)
        await asyncio.sleep(5 * INTERVAL_S)
        assert fleet.log.count("restart 1") == 0, "no weights can be sent"
        nodes.away_ranks = ()
        while fleet.members.serving != [0, 1]:
            await asyncio.sleep(INTERVAL_S)

    async with asyncio.timeout(20):
        await watch.over(generate())


async def test_a_repair_that_loses_its_ranks_while_engines_start_is_resumed():
    fleet = FakeFleet()
    watch = watch_over(fleet)
    nodes = ranks_of(watch)
    await updated(watch, 4)
    update = watch._weights.update

    async def fail_without_ranks(*args, **options):
        if "no ranks" not in fleet.log:
            fleet.log.append("no ranks")
            nodes.away_ranks = (0,)
            raise TrainerDied("lost with ranks [0]", [0])
        await update(*args, **options)

    watch._weights.update = fail_without_ranks

    async def generate():
        fleet.sick = {0, 1}
        while "no ranks" not in fleet.log:
            await asyncio.sleep(INTERVAL_S)
        await asyncio.sleep(3 * INTERVAL_S)
        nodes.away_ranks = ()
        while fleet.members.serving != [0, 1]:
            await asyncio.sleep(INTERVAL_S)

    async with asyncio.timeout(20):
        await watch.over(generate())
    assert fleet.log.count("restart 0") == 1, "its process serves"


async def test_only_members_of_a_broken_broadcast_are_restarted():
    fleet = ThreeEngines()
    watch = watch_over(fleet, failures=1, are_stuck=True)
    assert fleet.members.lend(1) == [2]
    fleet.sick = {1}
    await updated(watch, 4)
    assert [entry for entry in fleet.log if entry.startswith("restart")] == [
        "restart 0",
        "restart 1",
    ]
    assert fleet.members.lent == [2]


async def test_a_connection_that_failed_is_made_again():
    """Although the engines that get weights are those of the connection before it."""
    fleet = ThreeEngines()
    watch = watch_over(fleet)
    await updated(watch, 4)
    connect = watch._weights.connect

    async def fail():
        raise TrainerDied("rank 0 died", [0])

    watch._weights.connect = fail
    assert fleet.members.lend(1) == [2]
    with pytest.raises(TrainerDied):
        await updated(watch, 5)
    fleet.members.give_back([2], 4)
    watch._weights.connect = connect
    await updated(watch, 5)
    assert fleet.log == ["update 4 abort", "connect", "update 5 abort"]


async def test_an_engine_that_was_lent_waits_for_the_next_update_while_others_serve():
    fleet = ThreeEngines()
    watch = watch_over(fleet)
    await updated(watch, 4)
    assert fleet.members.lend(1) == [2]
    fleet.members.give_back([2], None)
    await watch.over(asyncio.sleep(5 * INTERVAL_S))
    assert fleet.log == ["update 4 abort"]


async def test_no_engine_is_left_when_none_serves_and_none_can_be_restarted():
    """On GPUs of their own as with --colocate."""
    fleet = FakeFleet()
    watch = watch_over(fleet)
    await updated(watch, 4)
    for engine in fleet.members._engines:
        engine.is_lent = True  # the last one is never lent; nothing else leaves none to repair
    with pytest.raises(EngineDied, match="no engine is left"):
        async with asyncio.timeout(20):
            await watch.over(asyncio.Event().wait())
