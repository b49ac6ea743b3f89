"""A simulation of engines that follow a trace of spot instances, in virtual time.

The number of engines follows a published trace, ``spot_availability.csv``: two zones of 16
instances. Real: the driver's decisions (``rlpost.extensions.fleet.membership``) and its placement of requests
(``rlpost.engines.places``). Simulated: engines, their jobs and all durations (constants below).
Checked: each prompt is answered once, and every token has a version with which its engine was
admitted.
"""

from __future__ import annotations

import asyncio
import csv
import random
import selectors
from collections import Counter, defaultdict
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path

from rlpost.engines.connection import FIRST_PAUSE_S, LONGEST_PAUSE_S
from rlpost.engines.places import GivenUp, Place, Places, Request
from rlpost.extensions.fleet.membership import (
    Action,
    Admit,
    Dismiss,
    FleetLimits,
    Membership,
    Update,
)
from rlpost.extensions.fleet.records import EngineRecord, EngineState

TRACE = Path(__file__).parents[2] / "data/spot_availability.csv"
STEP_S = 300.0
SLOTS = 4  # requests at once on an engine
NUM_OWN = 2  # engines of the run's own job
START_S = (60.0, 180.0)  # of a server
NOTICE_S = 30.0  # between signal and end of a job
WITHOUT_NOTICE = 0.5  # share of the jobs that are killed at once
# reading weights; a request; a request to a dead server
PULL_S, CONTROL_S, DEADLINE_S = 40.0, 0.2, 10.0
UPDATE_EVERY_S, TRAINER_S = 600.0, 5.0  # between updates; in which no engine generates
TOKENS, TOKENS_A_S = (500, 16_000), 40.0  # of an answer; of each of an engine's requests
POLL_S = 10.0
LIMITS = FleetLimits(lost_after_s=45.0)


def trace() -> dict[str, list[int]]:
    """Return the number of available instances by zone, one number for each STEP_S."""
    zones: dict[str, list[int]] = defaultdict(list)
    with TRACE.open() as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            zones[row["zone"]] += [int(row["instances"])] * int(row["steps"])
    return dict(zones)


class _Jump(selectors.SelectSelector):
    """A selector that advances the time to the next timer instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Advance the time by ``timeout`` seconds."""
        assert timeout is not None, "the loop waits for an event that never comes"
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with the time of its selector."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        """Virtual seconds."""
        return self._jump.now


def run_virtually(main: Coroutine[object, object, None]) -> None:
    """Run ``main`` to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main)


def virtual_time() -> float:
    """Time of the simulation in seconds; 0 before it runs."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return 0.0


class Killed(Exception):
    """The connection broke."""


@dataclass(slots=True)
class Prompt:
    """A prompt, and (version, number) of each run of tokens that the driver has."""

    number: int
    num_tokens: int
    runs: list[tuple[int, int]] = field(default_factory=list)

    @property
    def remaining(self) -> int:
        return self.num_tokens - sum(count for _, count in self.runs)


@dataclass(slots=True)
class Server:
    """One start of an engine, or the run's own engines."""

    record: EngineRecord
    version: int = -1
    is_paused: bool = True
    is_dead: bool = False
    requests: dict[asyncio.Future[str], float] = field(default_factory=dict)

    def end_requests(self, how: str) -> None:
        """Abort them, or break their connections."""
        for one in self.requests:
            if not one.done():
                one.set_result(how)

    async def generate(self, prompt: Prompt, now: float) -> None:
        """Generate until the end or an abort. Raises Killed, and the tokens are lost."""
        if self.is_dead:
            raise Killed
        assert not self.is_paused, "a request reached an engine that is not admitted"
        loop, version = asyncio.get_running_loop(), self.version
        done: asyncio.Future[str] = loop.create_future()
        seconds = prompt.remaining / TOKENS_A_S
        timer = loop.call_later(seconds, lambda: done.done() or done.set_result("done"))
        self.requests[done] = now
        how = await done
        timer.cancel()
        del self.requests[done]
        if how == "killed":
            raise Killed
        written = int((loop.time() - now) * TOKENS_A_S + 0.5)
        assert version == self.version, "the weights changed under a request"
        prompt.runs.append((version, prompt.remaining if how == "done" else written))


@dataclass
class Totals:
    """What the test asserts; ``longest_hold_s``: the longest wait of an update until no engine generates."""

    started: int = 0
    with_notice: int = 0
    killed: int = 0
    resumed_after_leaving: int = 0
    sent_again: int = 0
    lost_tokens: float = 0.0
    written_tokens: int = 0
    longest_hold_s: float = 0.0


class Simulation:
    """A run, its fleet and the cluster."""

    def __init__(self, seed: int, num_engines: int, zones: dict[str, list[int]]) -> None:
        self.chance = random.Random(seed)
        self.num_engines, self.zones = num_engines, zones
        self.fleet = Membership(LIMITS)
        own = Place("http://own:1", "k", SLOTS * NUM_OWN)
        self.places = Places(clock=virtual_time)
        self.places.set_own([own])
        self.own = Server(EngineRecord("own", "own", EngineState.READY, 0, url=own.url))
        self.servers: dict[str, list[Server]] = {zone: [] for zone in zones}
        self.by_url = {own.url: self.own}
        self.beats: Counter[str] = Counter()
        self.files: dict[str, EngineRecord] = {}
        self.totals, self.answered = Totals(), Counter[int]()
        self.prompts: list[Prompt] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.version: int | None = None
        self.has_ended = False
        self.problem: BaseException | None = None
        self.free_slots: dict[str, list[int]] = {
            zone: list(range(max(steps))) for zone, steps in zones.items()
        }

    # -- the cluster

    async def cluster(self) -> None:
        """Start and end engine jobs according to the trace, until enough were started."""
        for wanted in zip(*self.zones.values(), strict=False):
            for zone, number in zip(self.zones, wanted, strict=True):
                self.change(zone, number)
            await asyncio.sleep(STEP_S)
            if self.totals.started >= self.num_engines:
                break
        self.has_ended = True

    def change(self, zone: str, wanted: int) -> None:
        there = self.servers[zone]
        while len(there) > wanted:
            one = there.pop(self.chance.randrange(len(there)))
            self.spawn(self.leave(one, zone))
        while len(there) < wanted and self.free_slots[zone]:
            slot = self.free_slots[zone].pop(0)
            name = f"{zone}_{slot}"
            self.totals.started += 1
            record = EngineRecord(
                name, f"i{self.totals.started}", EngineState.STARTING, self.next_beat(name)
            )
            one = Server(record)
            there.append(one)
            self.spawn(self.serve(one))

    async def serve(self, one: Server) -> None:
        """The agent: start the server, then report that it is ready."""
        self.write(one)
        await asyncio.sleep(self.chance.uniform(*START_S))
        if one.is_dead or one.record.state is not EngineState.STARTING:
            return
        url = f"http://{one.record.engine}:{self.totals.started}"
        one.record = one.record.next(state=EngineState.READY, url=url)
        self.by_url[url] = one
        self.write(one)

    async def leave(self, one: Server, zone: str) -> None:
        """A preemption: with a notice, or at once."""
        if self.chance.random() >= WITHOUT_NOTICE:
            self.totals.with_notice += 1
            one.record = one.record.next(state=EngineState.DRAINING)
            self.write(one)
            await asyncio.sleep(NOTICE_S)
            one.record = one.record.next(state=EngineState.GONE)
            self.write(one)
        else:
            self.totals.killed += 1
        one.is_dead = True
        one.end_requests("killed")
        slot = int(one.record.engine.rpartition("_")[2])
        self.free_slots[zone].append(slot)

    def write(self, one: Server) -> None:
        name = one.record.engine
        self.files[name] = one.record = EngineRecord(
            name, one.record.incarnation, one.record.state, self.next_beat(name), one.record.url
        )

    def next_beat(self, name: str) -> int:
        self.beats[name] += 1
        return self.beats[name]

    def beat(self) -> None:
        """Renew the records of all living agents."""
        for there in self.servers.values():
            for one in there:
                self.write(one)

    # -- the driver

    async def poll(self) -> None:
        while not self.has_ended:
            self.beat()
            self.step()
            await asyncio.sleep(POLL_S)

    def step(self) -> None:
        now = asyncio.get_running_loop().time()
        for action in self.fleet.step(list(self.files.values()), now):
            self.spawn(self.carry_out(action))
        serving = self.fleet.serving()
        if [one.url for one in serving] != [place.url for place in self.places.joined]:
            self.places.set_joined([Place(one.url, "f", SLOTS, is_own=False) for one in serving])

    async def carry_out(self, action: Action) -> None:
        one = self.server(action.record)
        problem = None
        if one is None and not (isinstance(action, Dismiss) and not action.answers):
            await asyncio.sleep(DEADLINE_S)
            problem = None if isinstance(action, Dismiss) else "no answer"
        elif one is not None:
            problem = await self.act(action, one)
        self.fleet.end_action(action, asyncio.get_running_loop().time(), problem)
        if isinstance(action, Dismiss) and one is None:
            self.places.give_up(action.record.url)
        self.step()

    async def act(self, action: Action, one: Server) -> str | None:
        match action:
            case Update(version=version):
                assert not one.requests and one.is_paused
                await asyncio.sleep(self.chance.uniform(0.5, 1.5) * PULL_S)
                one.version = version
            case Admit(version=version):
                await asyncio.sleep(CONTROL_S)
                assert one.version == version
                one.is_paused = False
            case Dismiss():
                await asyncio.sleep(CONTROL_S)
                one.is_paused = True
                one.end_requests("aborted")
                await asyncio.sleep(0)
        return "it died" if one.is_dead and not isinstance(action, Dismiss) else None

    def server(self, record: EngineRecord) -> Server | None:
        one = self.by_url.get(record.url)
        return None if one is None or one.is_dead else one

    async def train(self) -> None:
        """Change the weights every UPDATE_EVERY_S seconds."""
        version = 0
        while not self.has_ended:
            began = asyncio.get_running_loop().time()
            self.version = None
            self.fleet.withdraw_version()
            self.step()
            self.own.is_paused = True
            self.own.end_requests("aborted")
            while not self.fleet.is_settled:
                await asyncio.sleep(CONTROL_S)
            held_s = asyncio.get_running_loop().time() - began
            self.totals.longest_hold_s = max(self.totals.longest_hold_s, held_s)
            await asyncio.sleep(TRAINER_S)
            self.own.version, self.own.is_paused, self.version = version, False, version
            self.fleet.set_version(version)
            self.step()
            version += 1
            await asyncio.sleep(UPDATE_EVERY_S)

    # -- requests

    async def ask(self) -> None:
        """Request one prompt after another, each until it is complete."""
        while not self.has_ended:
            prompt = Prompt(len(self.prompts), self.chance.randint(*TOKENS))
            self.prompts.append(prompt)
            pause_s = FIRST_PAUSE_S
            while prompt.remaining and not self.has_ended:
                if await self.request(prompt):
                    pause_s = FIRST_PAUSE_S
                else:
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            if not prompt.remaining:
                self.answered[prompt.number] += 1
                self.totals.written_tokens += prompt.num_tokens

    async def request(self, prompt: Prompt) -> bool:
        """Send a prompt once and count the outcome; return False if the server has died."""
        try:
            async with self.places.take(Request()) as place:
                return await self.send(prompt, place)
        except GivenUp:
            self.totals.sent_again += 1
            return True

    async def send(self, prompt: Prompt, place: Place) -> bool:
        loop, totals = asyncio.get_running_loop(), self.totals
        one = self.by_url[place.url]
        while one is self.own and one.is_paused:  # a server that pauses keeps its requests
            await asyncio.sleep(CONTROL_S)
        sent_at = loop.time()
        try:
            await one.generate(prompt, sent_at)
        except Killed:
            totals.sent_again += 1
            totals.lost_tokens += (loop.time() - sent_at) * TOKENS_A_S
            self.places.failed(place, "does not answer")
            return False
        if prompt.remaining and self.version is not None:
            totals.resumed_after_leaving += 1
        return True

    def request_failed(self, url: str, problem: str) -> None:
        """Check the engine, and dismiss it if it does not answer, as ``FleetMembers`` does."""
        record = self.fleet.request_failed(url)
        if record is not None:
            self.spawn(self.check_engine(record, problem))
        self.step()

    async def check_engine(self, record: EngineRecord, problem: str) -> None:
        await asyncio.sleep(CONTROL_S)
        if self.server(record) is None:
            self.fleet.failed(record.engine, record.incarnation, problem)
            self.step()

    # -- the whole simulation

    def spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.over)

    def over(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.has_ended = True
            self.problem = task.exception()

    async def run(self) -> None:
        self.places.listen(self.request_failed)
        most = SLOTS * (NUM_OWN + sum(map(max, self.zones.values())))
        for _ in range(most):
            self.spawn(self.ask())
        self.spawn(self.train())
        self.spawn(self.poll())
        await self.cluster()
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        if self.problem is not None:
            raise self.problem

    def check(self) -> None:
        """Check that each prompt is answered once, no token is lost or repeated, and versions ascend."""
        assert set(self.answered.values()) <= {1}, "a prompt was answered twice"
        for prompt in self.prompts:
            versions = [version for version, _ in prompt.runs]
            assert versions == sorted(versions), (
                f"prompt {prompt.number}: older tokens follow newer"
            )
            assert prompt.remaining >= 0, f"prompt {prompt.number} has too many tokens"
            assert bool(prompt.remaining) == (prompt.number not in self.answered)


def simulate(seed: int, num_engines: int, zones: dict[str, list[int]]) -> Simulation:
    """Return a finished and checked simulation."""
    one = Simulation(seed, num_engines, zones)
    run_virtually(one.run())
    one.check()
    return one
