"""All event orders of two own engines up to a depth: what is decided keeps the weights right.

The test's world keeps what the decisions cannot see: which engine has a process, and with which
weights. It carries out actions as ``rlpost.driver.engines.engine_health`` does.
"""

import pickle
from dataclasses import dataclass, field

import pytest

from rlpost.engines.own_membership import (
    MAX_ABANDONED,
    MAX_RESTARTS,
    Admit,
    GiveUp,
    OwnMembership,
    SendWeights,
    Start,
    Stop,
)
from tests.unit.engines.phases_seen import OWN, phases_seen

NUM_ENGINES, DEPTH = 2, 6
SETTLES_WITHIN = 5  # stop, start, send, admit, nothing


@dataclass
class World:
    members: OwnMembership
    weights: dict[int, int | None] = field(default_factory=lambda: {0: None, 1: None})
    """Version of each engine with a process; None: those of its model folder."""
    connected: set[int] = field(default_factory=lambda: {0, 1})
    sent: int | None = None
    version: int = 0

    def act(self, *, bad_start=None, lost_in_send=None):
        """Carry out the next action; return it."""
        action = self.members.next_action()
        match action:
            case Stop(engines):
                for one in engines:
                    self.members.stopped(one)
                    self.end(one)
            case Start(engines):
                for one in engines:
                    assert one not in self.weights, "it has a process"
                    self.weights[one] = None
                    self.members.started(one, "bad" if one == bad_start else None)
            case SendWeights(version, connect):
                receivers = self.members.receivers
                assert {*receivers} <= self.weights.keys(), "a receiver has no process"
                if connect:
                    self.connected = {*receivers}
                    self.members.connected()
                assert {*receivers} == self.connected, "a process is no member"
                if lost_in_send in receivers:
                    self.members.failed([lost_in_send])
                else:
                    self.weights |= dict.fromkeys(receivers, version)
                    self.sent = version
                    self.members.sent(version)
            case Admit(engines, restarted):
                assert {*restarted} <= {*engines}
                self.members.admitted(engines)
        return action

    def end(self, one):
        self.weights.pop(one, None)
        self.connected.discard(one)

    def lose(self, one):
        self.members.lost([one])
        self.end(one)

    def request(self):
        self.members.request_weights(self.version)

    def train(self):
        self.version += 1
        self.members.set_version(self.version)

    def lend(self):
        for one in self.members.lend(1):
            self.weights[one] = None

    def evaluate(self):
        for one in self.members.lent:
            self.weights[one] = self.version
            self.members.evaluates([one], self.version)

    def give_back(self):
        self.members.give_back(lent := self.members.lent, self.weights[lent[0]])

    def check(self):
        for one in self.members.serving:
            assert self.weights[one] == self.sent, "an engine serves other weights"
        assert not {*self.members.down} & self.weights.keys()
        assert {*self.members.checked} <= self.weights.keys()


def events(world):
    """Yield name and effect of each event that may happen next."""
    yield "act", World.act
    yield "request", World.request
    for one in range(NUM_ENGINES):
        yield f"{one} fails", lambda made, one=one: made.members.failed([one])
        yield f"{one} is lost", lambda made, one=one: made.lose(one)
        yield f"{one} starts badly", lambda made, one=one: made.act(bad_start=one)
        yield f"{one} fails in an update", lambda made, one=one: made.act(lost_in_send=one)
    if world.version < 2:
        yield "train", World.train
    if world.members.lent:
        yield "evaluate", World.evaluate
        yield "give back", World.give_back
    else:
        yield "lend", World.lend


def settle(world):
    """Carry out what is decided, without further failures, until nothing is left."""
    for _ in range(SETTLES_WITHIN):
        action = world.act()
        if action is None or isinstance(action, GiveUp):
            return action
    raise AssertionError("it does not settle")


def test_in_no_order_of_events_an_engine_serves_weights_that_it_lacks_and_all_serve_again():
    with phases_seen() as changes:
        _explore()
    assert changes == OWN


def _explore():
    first = pickle.dumps(World(OwnMembership(NUM_ENGINES)))
    seen, frontier = {first}, [first]
    for _ in range(DEPTH):
        following = []
        for text in frontier:
            for name, _ in list(events(pickle.loads(text))):
                world = pickle.loads(text)
                dict(events(world))[name](world)
                world.check()
                if (key := pickle.dumps(world)) in seen:
                    continue
                seen.add(key)
                following.append(key)
                if settle(world) is None:
                    assert {*world.members.serving, *world.members.lent} == {*range(NUM_ENGINES)}
        frontier = following
    assert len(seen) > 2_000


def test_an_engine_that_never_starts_is_given_up_after_the_limit_unless_a_batch_is_trained():
    world, starts = World(OwnMembership(NUM_ENGINES)), 0
    world.members.failed([1])
    while not isinstance(action := world.act(bad_start=1), GiveUp):
        starts += isinstance(action, Start)
        assert starts <= MAX_RESTARTS
    assert (action, starts) == (GiveUp(1, "bad"), MAX_RESTARTS)
    world.train()
    assert isinstance(world.act(bad_start=1), Stop)


def test_an_engine_is_not_given_up_because_others_leave_its_broadcasts():
    world = World(OwnMembership(NUM_ENGINES))
    for _ in range(MAX_ABANDONED):
        world.members.blocked([0, 1])
        assert settle(world) is None


@pytest.mark.parametrize("num_engines", [2, 3, 64])
@pytest.mark.parametrize("is_trained", [False, True])
def test_broadcasts_that_another_engine_leaves_each_time_end_the_run_at_any_number_of_engines(
    num_engines, is_trained
):
    members, broadcasts = OwnMembership(num_engines), 0
    members.request_weights(1)
    while not isinstance(action := members.next_action(), GiveUp):
        match action:
            case Stop(engines):
                for one in engines:
                    members.stopped(one)
            case Start(engines):
                for one in engines:
                    members.started(one)
            case SendWeights():
                members.connected()
                members.failed([broadcasts % num_engines])
                members.blocked(members.connections)
                broadcasts += 1
                if is_trained and broadcasts == MAX_ABANDONED:
                    members.forget_restarts()
        assert broadcasts <= 2 * MAX_ABANDONED + 1
    assert broadcasts == MAX_ABANDONED + 1 + is_trained * MAX_ABANDONED
    assert num_engines == 2 or "broadcasts" in action.problem
