"""All event orders of two engines up to a depth: no engine serves with the wrong weights.

The test's world keeps the state that the decisions cannot see: the weights in each server, and the
addresses in the router. It carries out actions as the driver does.
"""

import pickle
from dataclasses import dataclass, field

from rlpost.extensions.fleet.membership import Admit, Dismiss, FleetLimits, Membership, Update
from rlpost.extensions.fleet.records import EngineRecord, EngineState
from tests.unit.engines.phases_seen import FLEET, phases_seen

LIMITS = FleetLimits(lost_after_s=30, pulls_at_once=1, max_failures=2, retry_s=1)
DEPTH = 7


@dataclass
class World:
    fleet: Membership
    records: dict[str, EngineRecord]
    weights: dict[str, int] = field(default_factory=dict)
    """Incarnation of a server -> version of its weights."""
    router: dict[str, str] = field(default_factory=dict)
    """Address in the router -> incarnation that was admitted."""
    running: dict[str, Update | Admit | Dismiss] = field(default_factory=dict)
    version: int | None = 1
    now: float = 0.0

    def key(self):
        return pickle.dumps(self)

    def step(self):
        for action in self.fleet.step(self.records.values(), self.now):
            engine = action.record.engine
            assert engine not in self.running, "two actions for one engine"
            self.running[engine] = action
            if isinstance(action, Admit):
                assert action.version == self.version
                assert self.weights.get(action.record.incarnation) == self.version
                assert action.record.url not in self.router
                self.router[action.record.url] = action.record.incarnation
            if isinstance(action, Update):
                assert action.record.url not in self.router
                self.weights.pop(action.record.incarnation, None)
        updates = [one for one in self.running.values() if isinstance(one, Update)]
        assert len(updates) <= LIMITS.pulls_at_once
        assert {one.url for one in self.fleet.serving()} <= set(self.router)

    def end(self, engine, problem):
        action = self.running.pop(engine)
        if problem is None and isinstance(action, Update):
            self.weights[action.record.incarnation] = action.version
        if problem is None and isinstance(action, Dismiss):
            self.router.pop(action.record.url, None)
        self.fleet.end_action(action, self.now, problem)

    def set_version(self, version):
        self.version = version
        if version is None:
            self.fleet.withdraw_version()
        else:
            self.fleet.set_version(version)

    def write(self, engine, **changed):
        self.records[engine] = self.records[engine].next(**changed)

    def restart(self, engine):
        one = self.records[engine]
        self.write(engine, incarnation=one.incarnation + "'", state=EngineState.READY)

    def silence(self):
        self.now += 31
        self.write("0")  # engine 1 sends no heartbeat

    def check(self):
        if self.fleet.is_settled:
            versions = {self.weights.get(incarnation) for incarnation in self.router.values()}
            assert versions <= {self.version}, "settled, but requests reach other weights"


def events(world):
    """Yield name and effect of each event that may happen next."""
    yield "step", lambda made: made.step()
    for engine in world.running:
        yield f"{engine} ends", lambda made, name=engine: made.end(name, None)
        yield f"{engine} fails", lambda made, name=engine: made.end(name, "problem")
    if world.version is None:
        yield "version 2", lambda made: made.set_version(2)
    elif world.version == 1:
        yield "no version", lambda made: made.set_version(None)
        yield "version 2 at once", lambda made: made.set_version(2)
    for engine, one in world.records.items():
        if one.incarnation.count("'") < 1:
            yield f"{engine} restarts", lambda made, name=engine: made.restart(name)
        if one.state is EngineState.READY and engine == "0":
            yield "0 drains", lambda made: made.write("0", state=EngineState.DRAINING)
            yield "0 is gone", lambda made: made.write("0", state=EngineState.GONE)
    if world.now == 0:
        yield "1 is silent", lambda made: made.silence()


def test_in_no_order_of_events_an_engine_serves_with_weights_that_it_lacks():
    with phases_seen() as changes:
        _explore()
    assert changes == FLEET


def _explore():
    records = {
        name: EngineRecord(name, "a" + name, EngineState.READY, 1, url=f"http://n:{name}")
        for name in ("0", "1")
    }
    fleet = Membership(LIMITS)
    fleet.set_version(1)
    first = pickle.dumps(World(fleet, records))
    seen, frontier, served = {first}, [first], 0
    for _ in range(DEPTH):
        following = []
        for text in frontier:
            for name, _ in list(events(pickle.loads(text))):
                world = pickle.loads(text)
                dict(events(world))[name](world)
                world.check()
                served += bool(world.fleet.serving())
                if (key := world.key()) not in seen:
                    seen.add(key)
                    following.append(key)
        frontier = following
    assert len(seen) > 10_000 and served > 100
