"""A simulation of a thousand preemptible engines: each prompt is answered once.

Each answer comes from admitted engines with the admitted weights. Lifetimes have the bathtub shape
that was measured on preemptible machines with a limit of 24 hours (Kadupitiya et al.,
arXiv 1911.05160): many end early, few in the middle, the rest at the limit. The fractions and
durations below are ours, with 24 hours scaled to 900 s. Preemptions also come in bulk, as when a
job of higher priority starts. ``test_spot_trace`` follows a measured trace.
"""

import random
from collections import Counter, deque
from dataclasses import dataclass, field

import pytest

from rlpost.extensions.fleet.membership import Admit, Dismiss, FleetLimits, Membership, Update
from rlpost.extensions.fleet.records import EngineRecord, EngineState

LIMITS = FleetLimits(lost_after_s=15, pulls_at_once=8, max_failures=4, retry_s=2)
NUM_ENGINES, NUM_SLOTS, REQUESTS_EACH = 1000, 40, 4
LIMIT_S, EARLY, EARLY_S, LATE_S = 900.0, 0.45, 40.0, 30.0
STEP_S, NOTICE_S = 60, 10


def lifetime(chance):
    if chance.random() < EARLY:
        return min(LIMIT_S, 5 + chance.expovariate(1 / EARLY_S))
    return max(5.0, LIMIT_S - chance.expovariate(1 / LATE_S))


@dataclass
class Prompt:
    number: int
    num_tokens: int
    versions: list = field(default_factory=list)
    """Weight version of each token that the driver has received."""


@dataclass
class Server:
    """One incarnation of an engine, with the events of its job."""

    record: EngineRecord
    ready_at: float
    ends_at: float
    has_notice: bool
    is_cut_off: bool = False
    """Its node is lost: the server still runs, but none of its output arrives."""
    version: int | None = None
    is_paused: bool = True
    requests: dict = field(default_factory=dict)
    """Prompt number -> (prompt, tokens generated since it was sent)."""


class World:
    def __init__(self, seed):
        self.chance = random.Random(seed)
        self.fleet = Membership(LIMITS)
        self.now, self.version, self.is_syncing = 0.0, None, False
        self.servers, self.born = {}, 0
        self.beats = Counter()
        self.files = {}
        self.router = {}
        self.running = []
        self.queue, self.answered, self.made = deque(), Counter(), 0
        self.serving_s = self.admissions = 0

    # -- engine jobs

    def start_engine(self, slot):
        self.born += 1
        name, life = f"1_{slot}", lifetime(self.chance)
        record = EngineRecord(
            name,
            f"i{self.born}",
            EngineState.STARTING,
            self.beats[name] + 1,
            url=f"http://n{slot}:{9000 + self.chance.randrange(3)}",  # ports are reused
        )
        ready_at = self.now + self.chance.uniform(2, 12)
        self.servers[slot] = Server(
            record, ready_at, ready_at + life, has_notice=self.chance.random() < 0.6
        )

    def run_jobs(self):
        for slot in range(NUM_SLOTS):
            one = self.servers.get(slot)
            if one is None:
                if self.born < NUM_ENGINES and self.chance.random() < 0.1:
                    self.start_engine(slot)
                continue
            state = EngineState.STARTING if self.now < one.ready_at else EngineState.READY
            if one.has_notice and self.now >= one.ends_at - NOTICE_S:
                state = EngineState.DRAINING
            if self.now >= one.ends_at:
                self.end(slot, one)
                continue
            if not one.is_cut_off:
                name = one.record.engine
                self.beats[name] += 1
                one.record = one.record.next(state=state)
                self.files[name] = one.record
        if self.chance.random() < 0.004:  # a bulk preemption
            for one in list(self.servers.values()):
                if self.chance.random() < 0.5:
                    one.ends_at = min(one.ends_at, self.now + NOTICE_S)

    def end(self, slot, one):
        if not one.is_cut_off and not one.has_notice and self.chance.random() < 0.2:
            one.is_cut_off, one.ends_at = True, self.now + 40
            return
        for prompt, _ in one.requests.values():
            self.queue.append(
                prompt
            )  # the connection breaks, so the driver never received its tokens
        one.requests.clear()
        del self.servers[slot]

    # -- the driver

    def server(self, record):
        """Return the server of a record, or None if it has ended or does not answer."""
        for one in self.servers.values():
            if one.record.incarnation == record.incarnation and not one.is_cut_off:
                return one
        return None

    def drive(self):
        for end_at, action in list(self.running):
            if end_at <= self.now:
                self.running.remove((end_at, action))
                self.fleet.end_action(action, self.now, self.carry_out(action))
        records = list(self.files.values())
        for action in self.fleet.step(records, self.now):
            is_there = self.server(action.record) is not None
            # a call to a server that is gone ends only at its deadline
            takes = self.chance.uniform(1, 4) if is_there else 6
            self.running.append((self.now + takes, action))
        if self.is_syncing:
            self.fleet.withdraw_version()
            if self.fleet.is_settled:
                assert not any(self.admitted().values())
                self.version = (self.version or 0) + 1
                self.fleet.set_version(self.version)
                self.is_syncing = False
        elif self.now % STEP_S == 0:
            self.is_syncing = True

    def carry_out(self, action):
        """Carry out an action as the driver would; return the problem or None."""
        one = self.server(action.record)
        match action:
            case Update(version=version):
                if one is None or self.chance.random() < 0.03:
                    return "the engine does not answer"
                assert not one.requests and one.is_paused
                one.version = version
            case Admit(version=version):
                if one is None:
                    return "the engine does not answer"
                assert one.version == version
                one.is_paused = False
                self.router[action.record.url] = one
                self.admissions += 1
            case Dismiss():
                if self.chance.random() < 0.03:
                    return "the router does not answer"
                self.leave(action.record, one)
        return None

    def leave(self, record, one):
        gone = self.router.pop(record.url, None)
        if gone is None:
            return
        assert gone.record.incarnation == record.incarnation
        for prompt, tokens in gone.requests.values():
            if one is not None:
                prompt.versions += tokens  # an aborted request returns its tokens so far
            self.queue.append(prompt)
        gone.requests.clear()
        gone.is_paused = True

    def admitted(self):
        return {url: one.version for url, one in self.router.items()}

    def generate(self):
        settled = self.fleet.is_settled
        live = {id(one) for one in self.servers.values()}
        for url, one in self.router.items():
            if id(one) not in live or one.is_cut_off:
                continue
            self.serving_s += 1
            while self.queue and len(one.requests) < REQUESTS_EACH:
                prompt = self.queue.popleft()
                one.requests[prompt.number] = (prompt, [])
            for number, (prompt, tokens) in list(one.requests.items()):
                assert not one.is_paused and one.version is not None
                assert not settled or one.version == self.version, url
                tokens.append(one.version)
                if len(prompt.versions) + len(tokens) == prompt.num_tokens:
                    prompt.versions += tokens
                    self.answered[number] += 1
                    del one.requests[number]

    def refill(self):
        while len(self.queue) < 40:
            self.made += 1
            self.queue.append(Prompt(self.made, self.chance.randint(5, 60)))

    def run(self):
        prompts = {}
        while self.born < NUM_ENGINES or self.servers:
            self.now += 1
            self.run_jobs()
            self.drive()
            if self.born < NUM_ENGINES:
                self.refill()
            prompts.update((prompt.number, prompt) for prompt in self.queue)
            self.generate()
        return prompts


@pytest.mark.parametrize("seed", [1, 2])
def test_a_thousand_engines_come_and_go_and_each_prompt_is_answered_once(seed):
    world = World(seed)
    prompts = world.run()
    assert world.born == NUM_ENGINES and world.admissions > NUM_ENGINES
    waiting = Counter(prompt.number for prompt in world.queue)
    for one in world.router.values():
        waiting.update(one.requests)
    assert set(waiting.values()) <= {1}, "a prompt waits twice"
    assert not set(waiting) & set(world.answered)
    assert set(world.answered.values()) == {1}, "a prompt was answered twice"
    assert set(waiting) | set(world.answered) == set(range(1, world.made + 1)), "a prompt is lost"
    for number in world.answered:
        versions = prompts[number].versions
        assert len(versions) == prompts[number].num_tokens
        assert versions == sorted(versions)
    assert len(world.answered) > 10_000
    used = sum(usage.engine_s for usage in world.fleet.usage(world.now).values())
    assert used >= world.serving_s * 0.98  # the accounting covers the time spent generating
