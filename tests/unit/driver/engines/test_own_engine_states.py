"""A run's own engines in random orders of failures: what every token and every end must satisfy.

``tests/unit/driver/engines/engine_world.py`` checks at every token that its engine has the weights of
the last update, that no request runs on two engines that answer, and that no update waits for an
engine that the run has stopped.
"""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from common.bounded import cancel_all
from rlpost.engines.own_membership import MAX_ABANDONED, MAX_RESTARTS
from rlpost.errors import EngineDied, SyncError
from tests.unit.driver.engines.engine_world import NUM_ENGINES, Scene, VirtualLoop, stand_ins

REQUESTS = 6
EVENTS = ("die", "hang", "start_badly", "lose_node", "evaluate")
SECOND_UPDATE = range(8 * 4, 11 * 4)  # when it runs if nothing happened before, in quarters
QUARTERS = st.integers(0, 240) | st.sampled_from(SECOND_UPDATE)
EVENT = st.tuples(
    QUARTERS.map(lambda quarter: quarter / 4),  # seconds since the first update
    st.sampled_from(EVENTS),
    st.integers(0, NUM_ENGINES - 1),
)


class Program:
    """A run of some steps, during which events happen at given times."""

    def __init__(self, events, **kind):
        self.events, self.scene = sorted(events), Scene(**kind)
        self.asked = 0

    async def run(self):
        """Return the error that ended the run, or None."""
        await self.scene.start()
        happening = asyncio.create_task(self._happen())
        getting, quiet = set(), 0
        try:
            while quiet < 2:
                quiet += happening.done()
                await self.scene.health.over(self._generate(getting))
                await self.scene.train()
                await self.scene.sync()
            await self.scene.health.over(asyncio.gather(*getting))
            await happening
        except (EngineDied, SyncError) as error:
            return error
        finally:
            await cancel_all([happening, *getting])
            await self.scene.nodes.close()
            self.scene.engines.close()
        return None

    async def _generate(self, getting):
        """Ask for answers; with shared GPUs wait for all, else some are in flight at the update."""
        new = range(self.asked, self.asked + REQUESTS)
        self.asked += REQUESTS
        getting |= {
            asyncio.create_task(self.scene.get(number, self.scene.requests)) for number in new
        }
        await asyncio.sleep(8)
        while sum(not task.done() for task in getting) > (0 if self.scene.colocate else 2):
            await asyncio.sleep(0.5)

    async def _happen(self):
        started, evaluating = asyncio.get_running_loop().time(), []
        for at, what, index in self.events:
            await asyncio.sleep(max(0, started + at - asyncio.get_running_loop().time()))
            if what == "evaluate":
                if not self.scene.colocate and all(task.done() for task in evaluating):
                    evaluating.append(asyncio.create_task(self.scene.evaluate()))
            elif what == "lose_node":
                await self.scene.lose_node(index)
            else:
                getattr(self.scene, what)(index)
        await asyncio.gather(*evaluating)


def run(events, **kind):
    """Run a program to its end; return it and its error."""

    async def work():
        program = Program(events, **kind)
        return program, await program.run()

    with stand_ins(), asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work())


def check_end(program, error):
    """Every answer was read once and all engines serve, or failures are reason enough to end."""
    scene, world = program.scene, program.scene.world
    if error is not None:
        all_failed = len(world.failures) == NUM_ENGINES and "no engine is left" in str(error)
        too_many = "broadcasts" in str(error) and world.failures.total() > MAX_ABANDONED
        assert all_failed or too_many or max(world.failures.values()) > MAX_RESTARTS, error
        return
    assert all(world.read[number] == 1 for number in range(program.asked))
    assert scene.engines.members.serving == [*range(NUM_ENGINES)]
    for address in scene.engines.addresses:
        server = world.servers[address.url]
        assert server.works and not server.is_paused and server.weights == scene.version
    lost = [
        engine for event, one in world.events if event == "engine_lost" for engine in one["engines"]
    ]
    back = [
        engine
        for event, one in world.events
        if event == "recovered" and one["role"] == "engine"
        for engine in one["engines"]
    ]
    assert sorted(lost) == sorted(back), "every loss in the ledger has its return"


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck])
@given(
    events=st.lists(EVENT, max_size=8),
    colocate=st.booleans(),
    over_nccl=st.booleans(),
)
def test_in_no_order_of_failures_an_engine_serves_other_weights(events, colocate, over_nccl):
    check_end(*run(events, colocate=colocate, over_nccl=over_nccl))


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck])
@given(
    events=st.lists(
        st.tuples(
            st.integers(4 * 4, 24 * 4).map(lambda quarter: quarter / 4),
            st.sampled_from(("start_badly", "lose_node")),
            st.integers(0, NUM_ENGINES - 1),
        ),
        min_size=3,
        max_size=7,
    ),
    starts_s=st.lists(st.sampled_from((0.5, 2.0, 10.0, 40.0)), min_size=1, max_size=4),
)
@example(  # a start fails while a node is lost, and others take longer
    events=[
        (8.75, "lose_node", 2),
        (10.5, "start_badly", 2),
        (11.0, "lose_node", 0),
        (20.0, "start_badly", 1),
    ],
    starts_s=[40.0, 0.5, 10.0, 10.0],
)
def test_a_start_that_fails_leaves_none_of_the_others_behind(events, starts_s):
    check_end(*run(events, colocate=False, over_nccl=True, starts_s=starts_s))


@pytest.mark.parametrize("quarter", SECOND_UPDATE)
def test_a_node_lost_during_an_update_over_nccl_leaves_no_engine_in_the_broadcast(quarter):
    """Those that answer are blocked until they are restarted."""
    check_end(*run([(quarter / 4, "lose_node", 2)], colocate=False, over_nccl=True))


def test_an_engine_that_never_starts_again_ends_the_run_after_a_bounded_number_of_starts():
    program, error = run(
        [(1.0, "die", 1), *[(1.0, "start_badly", 1)] * 20], colocate=False, over_nccl=False
    )
    assert isinstance(error, EngineDied) and program.scene.world.starts[1] == MAX_RESTARTS
