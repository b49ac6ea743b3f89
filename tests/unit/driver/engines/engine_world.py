"""A run's own engines in virtual time: what happens to them, and what must hold at every token.

Real: ``OwnEngines``, ``EngineHealth``, ``SpareEngines``, ``LostNodes``, the places and the retries of
requests. Fakes: the processes, which hold weights and answer, and the transport of the weights.
The world knows what the decisions cannot see: which weights each process has.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import orjson

from common.cluster import Cluster, Node
from common.lost_nodes import LostNode
from rlpost.columns import FloatColumn, IntColumn
from rlpost.config.load import load
from rlpost.config.tree import Config
from rlpost.driver import lost_nodes
from rlpost.driver.engines import own_engines
from rlpost.driver.engines.engine_events import EngineEvents
from rlpost.driver.engines.engine_health import EngineHealth
from rlpost.driver.engines.own_engines import OwnEngines
from rlpost.driver.lost_nodes import LostNodes
from rlpost.driver.placement import Offer, Placement, Ports, Slot
from rlpost.driver.preemption import StopRequest
from rlpost.driver.spare_engines import SpareEngines
from rlpost.engines.answer import Answer
from rlpost.engines.connection import Connection, Failure, RunEngines
from rlpost.engines.own_membership import MAX_ABANDONED, MAX_RESTARTS
from rlpost.engines.places import Place, Places
from rlpost.errors import EngineDied, SyncError

NUM_ENGINES = 3
START_S, STOP_S, BUCKET_S, TOKEN_S, DEADLINE_S = 2.0, 0.5, 0.5, 0.5, 10.0
NUM_BUCKETS = 3
CACHE = "kv_cache"


class _Selector(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        """Advance the clock instead of waiting."""
        assert timeout is not None, "every task waits for another, forever"
        assert self.now < 3600, "the run makes no progress"
        self.now += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that never sleeps."""

    def __init__(self) -> None:
        self._jumping = _Selector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Return virtual seconds."""
        return self._jumping.now


@dataclass(eq=False)
class Server:
    """The process of an engine."""

    index: int
    weights: int | None = None  # those of its model folder, or of an update that did not end
    is_paused: bool = False
    answers: bool = True
    is_blocked: bool = False  # in a broadcast that lost a peer
    was_stopped: bool = False  # by the run
    aborts: int = 0
    released: set[str] = field(default_factory=set)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def lives(self) -> bool:
        """Whether the process runs."""
        return not self.ended.is_set()

    @property
    def works(self) -> bool:
        """Whether it runs and answers."""
        return self.lives and self.answers

    def pause(self, mode: str) -> None:
        """Pause, as SGLang does; "abort" ends the requests in flight."""
        self.is_paused = True
        self.aborts += mode == "abort"


class World:
    """The processes of the engines and the invariants. One at a time is ``current``."""

    current: ClassVar[World]

    def __init__(self, starts_s: Sequence[float] = (START_S,)) -> None:
        """``starts_s``: seconds of the starts of processes, in order and again from the first."""
        self.starts_s = cycle(starts_s)
        self.servers: dict[str, Server] = {}
        self.sent: int | None = None
        """The version of the last update that ended: all that serve have it."""
        self.evaluated: int | None = None
        self.bad_starts: Counter[int] = Counter()
        self.failures: Counter[int] = Counter()
        self.starts: Counter[int] = Counter()
        """By engine, since the last trained batch, without those on another node."""
        self.running: dict[int, set[Server]] = {}
        self.read: Counter[int] = Counter()
        self.lost: tuple[LostNode, ...] = ()
        self.events: list[tuple[str, dict[str, Any]]] = []
        World.current = self

    async def ask(self, url: str, within_s: float) -> Server | None:
        """Return the process if it answers within the time."""
        await asyncio.sleep(0.1)
        server = self.servers.get(url)
        if server is None or not server.lives:
            return None
        if not server.answers:
            await asyncio.sleep(within_s)
            return None
        return server

    async def answer(self, url: str, number: int, *, is_evaluation: bool) -> Answer | Failure:
        """Generate the tokens of a request, each with the weights that must be there."""
        server = self.servers.get(url)
        if server is None or not server.lives:
            return Failure("does not answer", is_fault=False)
        runs_on = self.running.setdefault(number, set())
        twice = [other.index for other in runs_on if other.works]
        assert not twice, f"request {number} runs on engine {twice} and on {server.index}"
        self._check(server, is_evaluation)
        runs_on.add(server)
        aborts, num_tokens = server.aborts, 2 + number % 5
        try:
            for _ in range(num_tokens):
                await asyncio.sleep(TOKEN_S)
                while server.is_paused and server.works and server.aborts == aborts:
                    await asyncio.sleep(TOKEN_S)
                if not server.answers:
                    await server.ended.wait()
                if not server.lives:
                    return Failure("does not answer: disconnected", is_fault=False)
                if server.aborts != aborts:
                    return Failure("answered 499", is_fault=False, is_abort=True)
                self._check(server, is_evaluation)
        finally:
            runs_on.discard(server)
        ids = IntColumn([1] * num_tokens)
        return Answer(ids, FloatColumn([0.0] * num_tokens), "", {"type": "stop"}, (), {})

    def _check(self, server: Server, is_evaluation: bool) -> None:
        """Check that an engine may generate now."""
        wanted = self.evaluated if is_evaluation else self.sent
        if not server.is_paused:
            assert server.weights == wanted, (
                f"engine {server.index} generates with {server.weights}, not {wanted}"
            )
            assert not server.released, f"engine {server.index} has released its memory"


class Requests(Connection):
    """Real places and retries; ``generate`` with one input id asks for the answer of that number."""

    is_evaluation = False

    async def _try(
        self, place: Place, body: bytes, num_input: int, watch: object
    ) -> Answer | Failure:
        (number,) = orjson.loads(body)["input_ids"]
        return await World.current.answer(place.url, number, is_evaluation=self.is_evaluation)


class Processes:
    """The workers of one engine (``WorkerGroup``)."""

    def __init__(
        self, makes: Any, parts: Sequence[Slot], *, names: Sequence[str], **_: Any
    ) -> None:
        self._index, self._server = int(names[0].rpartition("-")[2]), None

    async def call_each(self, method: str, arguments: Any, **_: Any) -> None:
        """Start the server."""
        assert method == "start"
        ((host, port),) = arguments
        World.current.starts[self._index] += 1
        # those that it causes, others in a broadcast, and one for a node that is lost
        most = MAX_RESTARTS + MAX_ABANDONED + 1
        assert World.current.starts[self._index] <= most, "restarted again and again"
        if self._server is not None:  # from a start that was cancelled
            self._server.ended.set()
        is_bad = World.current.bad_starts[self._index] > 0
        World.current.bad_starts[self._index] -= is_bad
        start_s = next(World.current.starts_s)
        await asyncio.sleep(min(start_s, START_S) if is_bad else start_s)
        if is_bad:
            World.current.failures[self._index] += 1
            raise EngineDied(f"engine-{self._index} ended by itself (exit code 1)")
        self._server = World.current.servers[f"http://{host}:{port}"] = Server(self._index)

    async def call(self, method: str) -> None:
        """Stop it."""
        assert method == "stop"
        if self._server is not None:
            self._server.was_stopped = True
        await asyncio.sleep(STOP_S)
        if self._server is not None:
            self._server.ended.set()

    async def call_aside(self, method: str) -> None:
        """Raise if it has ended."""
        assert method == "check_alive"
        if self._server is None or not self._server.lives:
            raise EngineDied(f"engine-{self._index} ended by itself")

    async def abandon(self, method: str, left: Sequence[int], *, within_s: float) -> None:
        """Forget it: its node is lost."""


@dataclass(frozen=True)
class Client:
    """Control requests to one engine (``EngineClient``)."""

    url: str
    api_key: str
    timeout_s: float = 60.0
    selector: str = "all"

    async def _server(self) -> Server:
        server = await World.current.ask(self.url, self.timeout_s)
        if server is None:
            raise EngineDied(f"engine {self.url} does not answer")
        return server

    async def server_info(self) -> dict[str, str]:
        """Return SGLang's version."""
        await self._server()
        return {"version": "0.5.21"}

    async def release_memory(self, tags: Sequence[str]) -> None:
        """Pause and release."""
        server = await self._server()
        server.pause("abort")
        server.released |= {*tags}

    async def restore_memory(self, tags: Sequence[str]) -> None:
        """Restore."""
        (await self._server()).released -= {*tags}


async def problem(client: Client, *_: object) -> str | None:
    """A health check."""
    server = await World.current.ask(client.url, client.timeout_s)
    return f"engine {client.url} does not answer" if server is None else None


class Weights:
    """The trainer's weights over one process group (``WeightCoordinator``)."""

    def __init__(self, engines: OwnEngines, *, over_nccl: bool) -> None:
        self._engines, self._over_nccl = engines, over_nccl
        self._is_abandoned = False
        self._members: dict[str, Server] = {}

    @property
    def engines_are_stuck(self) -> bool:
        """As with NCCL, whose kernels never end."""
        return self._is_abandoned and self._over_nccl

    def move(self, placement: Placement) -> None:
        """Do nothing."""

    async def connect(self) -> None:
        """Form the group, which needs every member."""
        self._is_abandoned = False
        self._members = {}
        for url in self._urls():
            self._members[url] = await self._member(url)

    async def update(
        self, version: int, *, pause: str, ready: Callable[[], Awaitable[None]]
    ) -> None:
        """Send the weights to all receivers."""
        urls = self._urls()
        stopped = [url for url in urls if (one := self._now(url)) and one.was_stopped]
        assert not stopped, f"an update waits for {stopped}, which the run has stopped"
        if [*self._members] != urls:
            await self.connect()
        assert self._members == {url: self._now(url) for url in urls}, "a process is no member"
        for url in urls:
            (await self._member(url)).pause(pause)
        try:
            for number in range(NUM_BUCKETS):
                await asyncio.sleep(BUCKET_S)
                await self._all_take_part(number)
                for one in self._members.values():
                    one.weights = None
        except (SyncError, asyncio.CancelledError):
            self._is_abandoned = True
            for one in self._members.values():
                one.is_blocked = self._over_nccl
            raise
        for one in self._members.values():
            one.weights = version
        await ready()
        for url in urls:
            await self._member(url)
        World.current.sent = version
        for one in self._members.values():
            one.is_paused = False

    async def _all_take_part(self, number: int) -> None:
        """Wait for the members of a broadcast, as NCCL does, which does not notice a silent peer."""
        if all(one.works for one in self._members.values()):
            return
        is_silent = all(one.lives for one in self._members.values())
        await asyncio.sleep(DEADLINE_S if self._over_nccl and is_silent else BUCKET_S)
        raise SyncError(f"bucket {number}: an engine did not take part")

    def _urls(self) -> list[str]:
        return [address.url for address in self._engines.receivers]

    def _now(self, url: str) -> Server | None:
        return World.current.servers.get(url)

    async def _member(self, url: str) -> Server:
        server = await World.current.ask(url, DEADLINE_S)
        if server is None or server.is_blocked:
            raise SyncError(f"engine {url} does not answer")
        return server


class Snapshots:
    """The weights of an evaluation, which lent engines read from a folder (``SnapshotWeights``)."""

    def __init__(self, spare: SpareEngines) -> None:
        self._spare = spare

    async def update(self, version: int) -> None:
        """Let the lent engines read a version."""
        servers = []
        for address in self._spare.addresses:
            server = await World.current.ask(address.url, DEADLINE_S)
            if server is None:
                raise SyncError(f"engine {address.url} does not answer")
            server.pause("abort")
            server.weights = None
            servers.append(server)
        await asyncio.sleep(BUCKET_S)
        if not all(server.works for server in servers):
            raise SyncError("an engine did not read its weights")
        for server in servers:
            server.weights, server.is_paused = version, False
        World.current.evaluated = version


class Stop(StopRequest):
    """A stop request without a file."""

    def __init__(self) -> None:
        super().__init__(Path("/nowhere"))

    def requested(self) -> bool:
        """No stop is requested."""
        return False


class Scene:
    """A run: its engines, their health, its requests; and the failures that happen to it."""

    def __init__(
        self, *, colocate: bool, over_nccl: bool, starts_s: Sequence[float] = (START_S,)
    ) -> None:
        self.world, self.colocate = World(starts_s), colocate
        loop = asyncio.get_running_loop()
        config = _config(colocate)
        slots = [(Slot(f"id{one}", f"10.0.0.{one + 1}", 1),) for one in range(NUM_ENGINES)]
        placement = Placement((Slot("head", "10.0.0.100", 1),), tuple(slots))
        ports = Ports((1,) * NUM_ENGINES, (2,) * NUM_ENGINES, 3, (4,))
        nodes = [Node("n100", "10.0.0.100", "lo", 1)]
        nodes += [Node(f"n{one}", f"10.0.0.{one + 1}", "lo", 1) for one in range(NUM_ENGINES)]
        cluster = Cluster("10.0.0.100:1", "/nowhere", tuple(nodes), 20000, 100)
        self.engines = OwnEngines(
            config,
            SimpleNamespace(attempt_dir="/nowhere", secret="key", incarnation=0),  # type: ignore[arg-type]
            placement,
            ports,
            serving=RunEngines(places=Places(clock=loop.time)),
        )
        self.nodes = LostNodes(cluster, offer=_offer, record=self._record)
        self._placement, self._nodes = placement, nodes
        self.health = EngineHealth(
            config,
            self.engines,
            Weights(self.engines, over_nccl=over_nccl),
            stop=Stop(),
            nodes=self.nodes,
            events=EngineEvents(self._record, clock=loop.time),
        )
        self.spare = SpareEngines(self.engines, self.health, 1, load_adapters=False, timeout_s=1.0)
        self.spare.weights = Snapshots(self.spare)  # type: ignore[assignment]
        self.spare.serving = RunEngines(places=Places(clock=loop.time))
        self.requests = Requests(self.engines.serving)
        self.evaluation = Requests(self.spare.serving)
        self.evaluation.is_evaluation = True
        self.version = 0

    def _record(self, event: str, **details: Any) -> None:
        self.world.events.append((event, details))

    async def start(self) -> None:
        """Start the engines and send the first weights."""
        await self.engines.start([""])
        if not self.colocate:
            await self.nodes.begin(self._placement, ranks_recover=False)
        await self.sync()

    async def sync(self) -> None:
        """Send the next version."""
        pause = "abort" if self.colocate else "retract"
        await self.health.update(self.version, pause=pause, before=self._before, ready=self._ready)

    async def _before(self) -> None:
        if self.colocate:
            await self.engines.release_memory(CACHE)

    async def _ready(self) -> None:
        if self.colocate:
            await self.engines.restore_memory(CACHE)

    async def train(self) -> None:
        """Train a batch: a new version, and restarts are counted again."""
        if self.colocate:
            await self.engines.release_memory(CACHE)
        self.version += 1
        self.health.note_version(self.version)
        self.world.starts.clear()

    async def get(self, number: int, requests: Requests) -> None:
        """Get the answer of a number."""
        await requests.generate(f"request {number}", [number], {"max_new_tokens": 8})
        self.world.read[number] += 1

    async def evaluate(self) -> None:
        """Evaluate the version on an engine that is lent."""
        numbers = [1000 * (self.version + 1) + one for one in range(3)]

        async def work() -> None:
            await asyncio.gather(*(self.get(number, self.evaluation) for number in numbers))

        try:
            await self.spare.update(self.version, pause="abort", before=_nothing, ready=_nothing)
        except SyncError:
            return
        await self.spare.over(work())

    # -- what happens ----------------------------------------------------------------------------

    def die(self, index: int) -> None:
        """End the process of an engine."""
        if (server := self._server(index)) is not None:
            self.world.failures[index] += 1
            server.ended.set()

    def hang(self, index: int) -> None:
        """Let an engine answer nothing from now on."""
        if (server := self._server(index)) is not None:
            self.world.failures[index] += 1
            server.answers = False

    def start_badly(self, index: int) -> None:
        """Let the next start of an engine fail."""
        self.world.bad_starts[index] += 1

    async def lose_node(self, index: int) -> None:
        """Lose the node of an engine; another one takes its place."""
        if self.colocate or any(one.host == f"n{index}" for one in self.world.lost):
            return
        self.world.failures[index] += 1
        if (server := self._server(index)) is not None:
            server.answers = False
        node = LostNode(f"n{index}", f"10.0.0.{index + 1}", "gone", 0.0)
        await asyncio.sleep(1.0)
        self.world.lost = (*self.world.lost, node)
        await asyncio.sleep(5.0)
        new = Node(f"n{index + 10}", f"10.0.0.{index + 11}", "lo", 1)
        replaced = LostNode(node.host, node.ip, "gone", 0.0, "replaced", new)
        self.world.lost = tuple(replaced if one is node else one for one in self.world.lost)

    def _server(self, index: int) -> Server | None:
        server = self.world.servers.get(self.engines.addresses[index].url)
        return server if server is not None and server.works else None


@cache
def _config(colocate: bool) -> Config:
    return load([], {"cluster": {"colocate": colocate}}).config


async def _nothing() -> None:
    pass


async def _offer(node: Node) -> Offer:
    return Offer(f"id-{node.host}", node.ip, node.num_gpus)


async def _inline(work: Callable[[], Any]) -> Any:
    return work()


@contextmanager
def stand_ins() -> Iterator[None]:
    """Replace the processes and their clients."""
    with ExitStack() as undo:
        for module, replaced in {
            own_engines: {
                "WorkerGroup": Processes,
                "EngineClient": Client,
                "check_engine": problem,
                "failure": problem,
            },
            lost_nodes: {
                "in_daemon": _inline,
                "read_lost_nodes": lambda _: World.current.lost,
                "write_replaceable": lambda *_: None,
            },
        }.items():
            for name, stand_in in replaced.items():  # type: ignore[attr-defined]
                undo.enter_context(mock.patch.object(module, name, stand_in))
        yield
