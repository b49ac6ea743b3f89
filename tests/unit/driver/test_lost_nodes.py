"""Engines and ranks of a lost node are restarted exactly once on its replacement.

The driver neither waits forever nor ends while the agents still decide about the node.
"""

import asyncio
from dataclasses import replace

import pytest

from common.cluster import Cluster, Node
from common.lost_nodes import LostNode, read_replaceable, write_lost_nodes
from rlpost.driver import lost_nodes
from rlpost.driver.decision import Death
from rlpost.driver.lost_nodes import LostNodes
from rlpost.driver.placement import Offer, Placement, Slot, replaced
from rlpost.errors import PlacementError, SyncError, TrainerDied
from tests.unit.driver.engines.test_engine_health import FakeFleet, nothing, watch_over

N1, N2, N3, N4 = (Node(f"n{i}", f"10.0.0.{i}", "eth0", 4) for i in (1, 2, 3, 4))


def slot(node, num_gpus=1, shared_with=()):
    return Slot(f"id-{node.ip}", node.ip, num_gpus, shared_with)


ENGINES_ON_2 = Placement((slot(N1), slot(N1)), ((slot(N1),), (slot(N2, 2),)))
RANKS_ON_2 = Placement((slot(N1), slot(N2)), ((slot(N1),), (slot(N2),)))
LOST = LostNode("n2", N2.ip, "n2 is gone", 1_000.0)


async def offer(node):
    return Offer(f"id-{node.ip}", node.ip, node.num_gpus)


class Scene:
    """The driver's side of an attempt on n1 and n2, with the list that the agents write."""

    def __init__(self, folder, placement=ENGINES_ON_2, *, ranks_recover=True):
        self.folder, self.events, self.joined = folder, [], []
        self.placement, self.ranks_recover = placement, ranks_recover
        cluster = Cluster("10.0.0.1:1", str(folder), (N1, N2), 1, 1)

        def record(event, **details):
            self.events.append((event, details))

        self.nodes = LostNodes(
            cluster, offer=offer, joined=self.joined.append, record=record, poll_s=0.01
        )

    async def __aenter__(self):
        await self.nodes.begin(self.placement, ranks_recover=self.ranks_recover)
        return self

    async def __aexit__(self, *_):
        await self.nodes.close()

    def say(self, *lost):
        write_lost_nodes(self.folder, lost)

    async def until(self, condition):
        while not condition():
            await asyncio.sleep(0.01)


def run(scene):
    asyncio.run(asyncio.wait_for(scene(), 20))


def test_only_the_slots_of_the_lost_node_move():
    shared = Placement((slot(N1), slot(N2)), ((slot(N1, 1, (0,)), slot(N2, 1, (1,))),))
    moved = replaced(shared, N2.ip, Offer("new", N3.ip, 1))
    new = Slot("new", N3.ip, 1)
    assert moved.actors == (slot(N1), new)
    assert moved.engines == ((slot(N1, 1, (0,)), replace(new, shared_with=(1,))),)


def test_a_replacement_with_too_few_gpus_is_refused():
    with pytest.raises(PlacementError, match=r"has 1 GPU and cannot replace 10\.0\.0\.2.* uses 2"):
        replaced(ENGINES_ON_2, N2.ip, Offer("new", N3.ip, 1))


@pytest.mark.parametrize(
    ("placement", "ranks_recover", "hosts"),
    [(ENGINES_ON_2, False, {"n2"}), (RANKS_ON_2, False, set()), (RANKS_ON_2, True, {"n2"})],
)
async def test_the_agents_get_the_nodes_that_the_run_can_lose(
    tmp_path, placement, ranks_recover, hosts
):
    async with Scene(tmp_path, placement, ranks_recover=ranks_recover):
        assert read_replaceable(tmp_path) == hosts


async def test_without_begin_nothing_is_written_or_awaited(tmp_path):
    nodes = LostNodes.none()
    assert not await nodes.another(than=0)
    assert await nodes.new_slots(Death((0,), "died"), RANKS_ON_2) is RANKS_ON_2
    assert await nodes.unless_lost(offer(N1)) == await offer(N1)
    assert read_replaceable(tmp_path) == set()


async def test_engines_move_when_the_replacement_has_joined_and_it_is_recorded_once(tmp_path):
    async with Scene(tmp_path) as driver:
        settling = asyncio.create_task(driver.nodes.wait_for_replacements())
        assert await settling == ENGINES_ON_2
        driver.say(LOST)
        await driver.until(lambda: driver.nodes.engines == [1])
        settling = asyncio.create_task(driver.nodes.wait_for_replacements())
        await asyncio.sleep(0.1)
        assert not settling.done()
        driver.say(replace(LOST, state="replaced", replacement=N3))
        assert (await settling).engines == ((slot(N1),), (slot(N3, 2),))
        assert driver.joined == [N3] and driver.events == []
        await driver.nodes.back("engines")
        ((event, details),) = driver.events
        assert (event, details["role"], details["host"]) == ("recovered", "node", "n2")
        assert details["replacement"] == "n3" and details["cause"] == "n2 is gone"
        assert driver.nodes.engines == [] and read_replaceable(tmp_path) == {"n3"}
        await driver.nodes.back("engines")
        assert len(driver.events) == 1


async def test_a_call_to_ranks_ends_when_their_node_is_lost(tmp_path):
    """Ray notices a silent machine only half a minute later."""
    async with Scene(tmp_path, RANKS_ON_2) as driver:
        hanging = asyncio.create_task(driver.nodes.unless_ranks_lost(asyncio.Event().wait))
        await asyncio.sleep(0.05)
        driver.say(LOST)
        with pytest.raises(TrainerDied, match="n2 is gone") as died:
            await hanging
        assert died.value.ranks == (1,)
        with pytest.raises(TrainerDied):
            await driver.nodes.unless_ranks_lost(asyncio.Event().wait)
        driver.say(replace(LOST, state="replaced", replacement=N3))
        death = Death((1,), "died")
        moved = await driver.nodes.new_slots(death, RANKS_ON_2)
        assert [each.ip for each in moved.actors] == [N1.ip, N3.ip]
        await driver.nodes.back("ranks")
        assert driver.events == []  # the node's engine has not been restarted yet
        assert await driver.nodes.unless_ranks_lost(lambda: offer(N1)) == await offer(N1)
        await driver.nodes.back("engines")
        assert len(driver.events) == 1


async def test_overlapping_calls_record_a_replaced_node_once(tmp_path):
    async with Scene(tmp_path, RANKS_ON_2) as driver:
        driver.say(replace(LOST, state="replaced", replacement=N3))
        await driver.until(lambda: driver.nodes.engines == [1])
        await driver.nodes.wait_for_replacements()
        calls = ("engines", "ranks", "engines", "ranks")
        async with driver.nodes._changed:  # none of them may go on
            waiting = [asyncio.create_task(driver.nodes.back(part)) for part in calls]
            await asyncio.sleep(0.01)
        await asyncio.gather(*waiting)
        assert len(driver.events) == 1 and driver.nodes.engines == driver.nodes.ranks == []


async def test_the_recovery_of_ranks_that_die_with_their_node_waits_for_the_agents(tmp_path):
    """Ray raises as soon as a connection breaks, before the agents write anything."""
    async with Scene(tmp_path, RANKS_ON_2) as driver:
        death = Death((1,), "died")
        asking = asyncio.create_task(driver.nodes.new_slots(death, RANKS_ON_2))
        await asyncio.sleep(0.1)
        driver.say(replace(LOST, state="replaced", replacement=N3))
        assert (await asking).actors[1].ip == N3.ip


async def test_a_node_that_is_never_replaced_ends_the_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(lost_nodes, "REPLACED_S", 0.2)
    async with Scene(tmp_path) as driver:
        driver.say(replace(LOST, state="given up"))
        await driver.until(lambda: driver.nodes.engines)
        with pytest.raises(PlacementError, match="n2 is not replaced"):
            await driver.nodes.wait_for_replacements()


class MovingFleet(FakeFleet):
    """A fleet whose engine 1 is on n2."""

    async def lose(self, indices):
        lost = [index for index in indices if index not in self.members.down]
        self.log += [f"lose {index}" for index in lost]
        self.members.lost(lost)

    async def move(self, placement):
        self.log.append(f"move to {placement.engines[1][0].ip}")

    def begin_restart(self, index):
        self.log.append(f"begin {index}")


def health_of(driver, fleet, **options):
    health = watch_over(fleet, **options)
    health._nodes = driver.nodes
    health._weights.move = lambda placement: None
    return health


MOVED_TO_3 = ["lose 1", "move to 10.0.0.3", "restart 1", "connect"]


async def test_an_engine_of_a_lost_node_is_restarted_on_the_replacement_while_others_generate(
    tmp_path,
):
    async with Scene(tmp_path) as driver:
        fleet = MovingFleet()
        health = health_of(driver, fleet)
        await health.update(4, pause="abort", before=nothing, ready=nothing)

        async def generate():
            driver.say(LOST)
            await driver.until(lambda: "lose 1" in fleet.log)
            driver.say(replace(LOST, state="replaced", replacement=N3))
            await driver.until(lambda: driver.events)

        await health.over(generate())
        assert fleet.log == ["update 4 abort", *MOVED_TO_3, "update 4 retract", "admit 1"]


async def test_an_update_that_waits_for_a_silent_node_is_repeated_without_it(tmp_path):
    async with Scene(tmp_path) as driver:
        fleet = MovingFleet()
        health = health_of(driver, fleet)
        update, hangs = health._weights.update, [True]

        async def update_that_hangs_once(version, **how):
            if hangs.pop() if hangs else False:
                fleet.log.append("hang")
                await asyncio.Event().wait()
            await update(version, **how)

        health._weights.update = update_that_hangs_once
        updating = asyncio.create_task(
            health.update(5, pause="abort", before=nothing, ready=nothing)
        )
        await driver.until(lambda: "hang" in fleet.log)
        driver.say(replace(LOST, state="replaced", replacement=N3))
        await updating
        assert fleet.log == [
            "hang",
            "lose 1",
            *MOVED_TO_3[1:],
            "update 5 abort",
            "admit 1",
        ]


async def test_the_replacement_is_lost_during_the_repair_and_replaced_as_well(tmp_path):
    async with Scene(tmp_path) as driver:
        fleet = MovingFleet()
        health = health_of(driver, fleet)
        first = replace(LOST, state="replaced", replacement=N3)
        second = LostNode("n3", N3.ip, "n3 is gone", 1_001.0)
        restart, hangs = fleet.restart, [True]

        async def restart_that_hangs_once(index):
            await restart(index)
            if hangs:
                assert read_replaceable(tmp_path) == {"n3"}
                hangs.pop()
                driver.say(first, replace(second, state="replaced", replacement=N4))
                await asyncio.Event().wait()

        fleet.restart = restart_that_hangs_once
        driver.say(first)
        await driver.until(lambda: driver.nodes.engines)
        await health.update(6, pause="abort", before=nothing, ready=nothing)
        assert "move to 10.0.0.4" in fleet.log and fleet.log[-1] == "admit 1"
        assert [details["host"] for _, details in driver.events] == ["n2", "n3"]
        assert not fleet.members.dismissed


async def test_engines_wait_for_the_ranks_of_their_node(tmp_path):
    """Engines get their weights from ranks, so repairing engines first would end the run."""
    async with Scene(tmp_path, RANKS_ON_2) as driver:
        fleet = MovingFleet()
        health = health_of(driver, fleet)

        async def generate():
            driver.say(replace(LOST, state="replaced", replacement=N3))
            await driver.until(lambda: "lose 1" in fleet.log)
            await asyncio.sleep(0.1)
            assert fleet.log == ["lose 1"]
            async with health.paused():  # the recovery of ranks does the same
                await health.begin_lost(await driver.nodes.wait_for_replacements())
                assert fleet.log[1:] == ["move to 10.0.0.3", "begin 1"]
                await driver.nodes.back("ranks")
            await driver.until(lambda: driver.events)

        await health.over(generate())
        assert fleet.log[-1] == "admit 1"


async def test_a_failure_that_no_lost_node_explains_is_raised_after_a_bounded_wait(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(lost_nodes, "MAY_FOLLOW_S", 0.1)
    async with Scene(tmp_path) as driver:
        fleet = MovingFleet(sick={1})
        with pytest.raises(SyncError, match="did not take part"):
            await health_of(driver, fleet, failures=2).update(
                7, pause="abort", before=nothing, ready=nothing
            )
        assert fleet.log.count("restart 1") == 1


JUDGE_ON_2 = Placement((slot(N1),), ((slot(N1),),), groups={"judge": ((slot(N1),), (slot(N2),))})


async def test_a_lost_node_with_engines_of_a_group_alone_concerns_only_that_group(tmp_path):
    async with Scene(tmp_path, JUDGE_ON_2) as driver:
        judge = driver.nodes.of_group("judge")
        updating = asyncio.create_task(driver.nodes.unless_lost(asyncio.sleep(0.3)))
        checking = asyncio.create_task(judge.unless_lost(asyncio.Event().wait()))
        await asyncio.sleep(0.05)
        driver.say(LOST)
        with pytest.raises(SyncError, match="n2 is gone"):
            await checking
        await updating
        assert driver.nodes.engines == [] and driver.nodes.num_lost == 0
        assert judge.engines == [1] and judge.num_lost == 1 and not judge.ranks
        driver.say(replace(LOST, state="replaced", replacement=N3))
        assert (await judge.wait_for_replacements()).engines == ((slot(N1),), (slot(N3),))
        await driver.nodes.back("engines")
        assert driver.events == []
        await judge.back("engines")
        assert driver.events[0][1]["replacement"] == "n3" and judge.engines == []
        assert driver.nodes.of_group("policy") is driver.nodes
