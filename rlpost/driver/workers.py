"""Ray adapter: runs plain classes in Ray workers, one per slot. The only file that imports ray.

Input: factories of objects and the slots to create them in. Output: a group that is called like one
object and returns one result per worker. A worker that dies, or a call that raises, fails the whole
call at once; the error names the worker and shows the end of its log. A value that several workers
or calls need is put into Ray's object store once: each node fetches it once, and its workers read
the arrays in it from the same memory.
"""

from __future__ import annotations

import asyncio
import logging
import math
import operator
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from common.bounded import cancel_all
from common.cluster import Cluster, Node
from common.files import tail
from common.garbage import paused_for_imports
from common.log_format import VARIABLE, configure_logging
from common.process_end import ProcessId, this_process, wait_for_end
from rlpost.driver.placement import Offer, Slot
from rlpost.errors import PlacementError, RlpostError, WorkerDied, WorkerFailed
from rlpost.observe.progress.position import RECORDER
from rlpost.observe.spans import SPANS, ProcessSpans, Span, clock_and_spans, clock_offset, span

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOG_TAIL_LINES = 15
JOIN_S = 10.0  # until Ray knows a node that has joined
ASIDE = "aside"
"""Concurrency group of a worker for queries during a computation; one may wait for a save."""
NUM_ASIDE = 2
NUMBER = "#"
"""Separates name and time in nanoseconds in the name of a worker that outlives its driver; names
must be unique, because Ray releases the name of a worker only when it has ended.
"""
CALLS_AT_ONCE = 64
"""Calls submitted before yielding to the event loop; one takes about 0.1 ms."""
_NO_MEMORY = re.compile(r"Memory on the node .*? was (\S+) used / (\S+) limit")
_PROCESS = re.compile(r"^(\d+)\s+([\d.]+)\s+(\S.*)$", re.MULTILINE)
"""A row of Ray's table of the largest processes: pid, GB and command."""
NUM_PROCESSES = 3


def death_reason(said: str) -> str:
    """Return what Ray says of the death of a worker, or one line if the node had no memory left.

    Ray says that in fifty lines, of which the end of a log would not have the first.
    """
    memory = _NO_MEMORY.search(said)
    if memory is None:
        return said
    largest = [f"{command} (pid {pid}) {size} GB" for pid, size, command in _PROCESS.findall(said)]
    return (
        f"the node had no memory left ({memory[1]} of {memory[2]} were used), so Ray killed it; the largest "
        f"processes: {', '.join(largest[:NUM_PROCESSES])}"
    )


def connect(cluster: Cluster) -> list[Offer]:
    """Join the cluster as its driver; return the GPUs of each node in rendezvous order, head first.

    Raises PlacementError when Ray does not know a node that the rendezvous saw.
    """
    ray.init(
        address=cluster.ray_address,
        namespace="rlpost",
        log_to_driver=False,
        logging_level=logging.WARNING,
        # The address that the agent chose; by default Ray uses that of the default route.
        _node_ip_address=cluster.nodes[0].ip,
    )
    alive = {node["NodeManagerAddress"]: node for node in ray.nodes() if node["Alive"]}
    missing = [f"{node.host} ({node.ip})" for node in cluster.nodes if node.ip not in alive]
    if missing:
        raise PlacementError(
            f"Ray does not know {', '.join(missing)}; it has {', '.join(sorted(alive))}"
        )
    return [
        Offer(alive[node.ip]["NodeID"], node.ip, int(alive[node.ip]["Resources"].get("GPU", 0)))
        for node in cluster.nodes
    ]


async def offer_of(node: Node) -> Offer:
    """Return the GPUs of a node that has joined the cluster later.

    Raises PlacementError when Ray does not know it in time.
    """
    deadline = asyncio.get_running_loop().time() + JOIN_S
    while True:
        for known in await asyncio.to_thread(ray.nodes):
            if known["Alive"] and known["NodeManagerAddress"] == node.ip:
                return Offer(known["NodeID"], node.ip, int(known["Resources"].get("GPU", 0)))
        if asyncio.get_running_loop().time() > deadline:
            raise PlacementError(f"Ray does not know {node.host} ({node.ip}) after {JOIN_S:.0f} s")
        await asyncio.sleep(0.1)


@dataclass(frozen=True, slots=True)
class Stored(Generic[T]):
    """A value in Ray's object store; as an argument of a call, the worker receives the value.

    The store frees the value when no ``Stored`` of it is left and no call that received it is
    running.
    """

    reference: ray.ObjectRef


@dataclass(frozen=True, slots=True)
class StandbyWorker:
    """A worker that has created its object and waits for a group that uses it."""

    handle: ray.actor.ActorHandle


def left_workers() -> dict[str, StandbyWorker]:
    """Return the workers that an earlier driver of this attempt has left, by name.

    Of several with one name, the newest; the others are killed. Blocks for a few milliseconds.
    """
    newest: dict[str, tuple[int, StandbyWorker]] = {}
    for full_name in ray.util.list_named_actors():
        name, _, number = full_name.partition(NUMBER)
        try:
            worker = int(number), StandbyWorker(ray.get_actor(full_name))
        except ValueError:  # no worker of a group, or it has just ended
            continue
        older, newest[name] = sorted((newest.get(name, worker), worker), key=operator.itemgetter(0))
        if older is not newest[name]:
            ray.kill(older[1].handle)
    return {name: worker for name, (_, worker) in newest.items()}


def kill_workers(workers: Iterable[StandbyWorker]) -> None:
    """Kill workers that no group uses. Returns before they have ended."""
    for worker in workers:
        ray.kill(worker.handle)


class _Worker:
    """Holds one plain object in a separate process with a separate log file."""

    def __init__(self, make: Callable[[], object], log_path: str, env: dict[str, str]) -> None:
        os.environ.update(env)  # before anything heavy is imported here
        self.log_to(log_path)
        configure_logging(with_logger=True, force=True)
        with paused_for_imports():
            self._target = make()

    def log_to(self, path: str) -> None:
        """Append all further output of this process to a file."""
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)

    def call(self, method: str, keywords: Mapping[str, object], *arguments: object) -> object:
        # Ray resolves references only as top-level arguments, not inside containers.
        with RECORDER.call(method):
            return self._call(method, keywords, *arguments)

    def _call(self, method: str, keywords: Mapping[str, object], *arguments: object) -> object:
        with span(method):
            found = operator.attrgetter(method)(self._target)
            return found(*arguments, **keywords) if callable(found) else found

    @ray.method(num_returns=2)
    def call_stored(self, method: str, *arguments: object) -> tuple[bool, object]:
        found = self.call(method, {}, *arguments)
        return bool(found), found

    @ray.method(concurrency_group=ASIDE)
    def call_aside(self, method: str, *arguments: object) -> object:
        return self._call(method, {}, *arguments)

    @ray.method(concurrency_group=ASIDE)
    def spans_since(self, since: float) -> tuple[float, list[Span]]:
        return clock_and_spans(since)

    @ray.method(concurrency_group=ASIDE)
    def process(self) -> ProcessId:
        return this_process()

    def until_ended(self, processes: list[ProcessId], within_s: float) -> list[ProcessId]:
        return wait_for_end(processes, within_s)


class WorkerGroup:
    """One worker per slot; worker ``i`` holds the object that ``makes[i]`` creates there."""

    def __init__(
        self,
        makes: Sequence[Callable[[], object]],
        slots: Sequence[Slot],
        *,
        names: Sequence[str],
        log_dir: Path,
        envs: Sequence[Mapping[str, str]],
        died: Callable[[str, Sequence[int]], WorkerDied] = WorkerDied,
        standbys: Mapping[int, StandbyWorker] | None = None,
        outlive_driver: bool = False,
    ) -> None:
        """
        Args:
            makes: factory of the object of each worker.
            names: name of each worker in errors and of its log.
            envs: environment of each worker, set before imports.
            died: makes the error of calls when the process of a worker has ended.
            standbys: workers that exist already, by index; the others are created.
            outlive_driver: workers stay when this process dies; a later driver of the attempt finds
                them with ``left_workers``. They end with Ray.
        """
        self._names = [f"{name} on {slot.ip}" for name, slot in zip(names, slots, strict=True)]
        self._logs = [log_dir / f"{name}.log" for name in names]
        self._nodes = [slot.node_id for slot in slots]
        self._died = died
        ready = standbys or {}
        # Create the remote class once: Ray exports every remote class to all workers.
        worker_class = ray.remote(concurrency_groups={ASIDE: NUM_ASIDE})(_Worker)
        self._submitting = asyncio.Lock()

        def create(index: int) -> ray.actor.ActorHandle:
            slot, log = slots[index], str(self._logs[index])
            if index in ready:
                ready[index].handle.log_to.remote(log)
                return ready[index].handle
            outliving = {
                "name": f"{names[index]}{NUMBER}{time.time_ns()}",
                "lifetime": "detached",
            }
            options = worker_class.options(
                num_cpus=0,
                num_gpus=0 if slot.shared_with else slot.num_gpus,
                scheduling_strategy=NodeAffinitySchedulingStrategy(slot.node_id, soft=False),
                max_concurrency=1,  # calls run in the order of submission: collectives need that
                **(outliving if outlive_driver else {}),
            )
            log_format = {VARIABLE: os.environ[VARIABLE]} if VARIABLE in os.environ else {}
            return options.remote(makes[index], log, {**log_format, **envs[index]})

        self._workers = [create(index) for index in range(len(slots))]

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def names(self) -> Sequence[str]:
        """The name of each worker and the address of its node, as errors show them."""
        return self._names

    async def reorder(self, order: Sequence[int]) -> None:
        """Make worker ``order[i]`` the i-th, within the same node.

        Names, slots and logs belong to the index: a worker continues in the log of its new index.
        """
        self._workers = [self._workers[index] for index in order]
        moved = [place for place, index in enumerate(order) if place != index]
        await asyncio.gather(
            *(
                self._one(place, self._workers[place].log_to.remote(str(self._logs[place])))
                for place in moved
            )
        )

    async def call(self, method: str, *arguments: object) -> list[Any]:
        """Call ``method`` on every worker with the same arguments; return results in order.

        ``method`` is a name, dotted names or the name of an attribute to read.
        """
        return await self.call_each(method, [arguments] * len(self))

    async def call_each(
        self, method: str, arguments: Sequence[Sequence[object]], **keywords: object
    ) -> list[Any]:
        """Call ``method`` on every worker with individual arguments and common keywords.

        Arguments may be ``Stored``. Returns results in order.
        """
        pairs = list(zip(self._workers, arguments, strict=True))

        def submit(index: int) -> ray.ObjectRef:
            worker, own = pairs[index]
            return worker.call.remote(method, keywords, *_references(own))

        return await self._results(await self._submit_to_all(submit))

    async def call_each_stored(
        self, method: str, arguments: Sequence[Sequence[object]]
    ) -> list[Stored[Any] | None]:
        """Like ``call_each``, but leave results in the object store; None for an empty result."""
        pairs = list(zip(self._workers, arguments, strict=True))

        def submit(index: int) -> tuple[ray.ObjectRef, ray.ObjectRef]:
            worker, worker_arguments = pairs[index]
            return worker.call_stored.remote(method, *_references(worker_arguments))

        submitted = await self._submit_to_all(submit)
        has_result = await self._results([has for has, _ in submitted])
        return [
            Stored(value) if has else None
            for has, (_, value) in zip(has_result, submitted, strict=True)
        ]

    async def abandon(self, method: str, indices: Sequence[int], *, within_s: float) -> None:
        """End all workers; those of ``indices``, whose nodes are alive, first run ``method``."""
        references = [self._workers[index].call.remote(method, {}) for index in indices]
        pairs = zip(indices, references, strict=True)
        if calls := [asyncio.ensure_future(self._one(*pair)) for pair in pairs]:
            await asyncio.wait(calls, timeout=within_s)
            await cancel_all(calls)
        await self.kill()

    async def put(self, value: T) -> Stored[T]:
        """Put a value into the object store, in a thread to keep the event loop responsive."""
        return Stored(await asyncio.to_thread(ray.put, value))

    async def get(self, stored: Stored[T]) -> T:
        """Return a value from the object store. Raises RlpostError when its node was lost."""
        try:
            return await stored.reference
        except ray.exceptions.RayError as error:
            raise RlpostError(f"a result in Ray's object store is lost: {error}") from None

    async def call_aside(self, method: str, *arguments: object) -> list[Any]:
        """Like ``call``, but concurrently with a running call, whose state must not be changed."""
        return await self._results(await self._ask_aside(method, arguments))

    async def answers_aside(
        self, method: str, *arguments: object, within_s: float
    ) -> list[Any | None]:
        """Like ``call_aside``, with None for each worker that fails or does not answer in time."""

        async def of_worker(index: int, reference: ray.ObjectRef) -> object | None:
            try:
                return await asyncio.wait_for(self._one(index, reference), within_s)
            except (RlpostError, TimeoutError) as error:
                logger.warning("%s does not answer: %s", self._names[index], error or "too late")
                return None

        references = await self._ask_aside(method, arguments)
        return await asyncio.gather(*map(of_worker, range(len(self)), references))

    async def _ask_aside(self, method: str, arguments: Sequence[object]) -> list[ray.ObjectRef]:
        return await self._submit_to_all(
            lambda index: self._workers[index].call_aside.remote(method, *arguments)
        )

    def standby(self, index: int) -> StandbyWorker:
        """Return a worker of this group, for another group to use."""
        return StandbyWorker(self._workers[index])

    async def dead(self, within_s: float) -> list[int]:
        """Return the workers whose process has ended; silence alone does not count as an end."""

        async def is_dead(index: int) -> bool:
            try:
                await asyncio.wait_for(
                    self._one(index, self._workers[index].process.remote()), within_s
                )
            except WorkerDied:
                return True
            except (RlpostError, TimeoutError):
                return False
            return False

        have_ended = await asyncio.gather(*map(is_dead, range(len(self))))
        return [index for index, ended in enumerate(have_ended) if ended]

    async def processes(self) -> list[tuple[str, ProcessId]]:
        """Return node and process of each worker."""
        found = await self._results(
            await self._submit_to_all(lambda index: self._workers[index].process.remote())
        )
        return list(zip(self._nodes, found, strict=True))

    async def kill(self, indices: Sequence[int] | None = None) -> None:
        """Kill these processes (default: all), also if they hang. Does not wait for their end."""
        for index in range(len(self)) if indices is None else indices:
            await asyncio.to_thread(ray.kill, self._workers[index], no_restart=True)

    async def until_ended(
        self, earlier: Sequence[tuple[str, ProcessId]], *, within_s: float
    ) -> list[str]:
        """Wait until ``earlier`` processes on the nodes of these workers have ended.

        Returns node and number of each that has not. Processes on other nodes are not checked.
        """
        askers = {node: index for index, node in enumerate(self._nodes)}
        processes: dict[str, list[ProcessId]] = {node: [] for node in askers}
        for node, process in earlier:
            if node in processes:
                processes[node].append(process)
        waiting = [
            self._one(index, self._workers[index].until_ended.remote(processes[node], within_s))
            for node, index in askers.items()
        ]
        left = await asyncio.gather(*waiting)
        hosts = [self._names[index].rpartition(" on ")[2] for index in askers.values()]
        return [
            f"process {process.pid} on {host}"
            for host, unended in zip(hosts, left, strict=True)
            for process in unended
        ]

    async def spans(self, since: float) -> list[ProcessSpans]:
        """Return the spans of each worker after ``since`` on this process's clock."""

        async def of_worker(index: int) -> ProcessSpans:
            worker = self._workers[index]
            sent = SPANS.now()
            theirs, _ = await self._one(index, worker.spans_since.remote(math.inf))
            ahead = clock_offset(sent, theirs, SPANS.now())
            _, found = await self._one(index, worker.spans_since.remote(since + ahead))
            return ProcessSpans(self._logs[index].stem, found, ahead)

        return await asyncio.gather(*map(of_worker, range(len(self))))

    async def _submit_to_all(self, submit: Callable[[int], T]) -> list[T]:
        """Submit a call to every worker.

        All workers receive it even if the caller is cancelled, and all receive calls in the same
        order: they wait for each other in collectives.
        """

        async def submit_all() -> list[T]:
            references = []
            async with self._submitting:
                for index in range(len(self)):
                    if index and index % CALLS_AT_ONCE == 0:
                        await asyncio.sleep(0)
                    references.append(submit(index))
            return references

        return await asyncio.shield(submit_all())

    async def _results(self, references: Sequence[ray.ObjectRef]) -> list[Any]:
        tasks: list[asyncio.Task[object]] = []
        try:
            for index, reference in enumerate(references):
                if index and index % CALLS_AT_ONCE == 0:
                    await asyncio.sleep(0)
                tasks.append(asyncio.ensure_future(self._one(index, reference)))
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _one(self, index: int, reference: ray.ObjectRef) -> Any:
        try:
            return await reference
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, RlpostError):
                raise error.cause from None
            raise WorkerFailed(f"{self._names[index]} failed:\n{error}") from None
        except ray.exceptions.RayError as error:
            raise self._died(
                f"{self._names[index]} died: {death_reason(str(error))}\n{self._log_tail(index)}",
                [index],
            ) from None

    def _log_tail(self, index: int) -> str:
        path = self._logs[index]
        lines = tail(path, LOG_TAIL_LINES).splitlines()
        return "\n".join([f"end of {path}:", *(f"  {line}" for line in lines)])


def _references(arguments: Sequence[object]) -> list[object]:
    return [each.reference if isinstance(each, Stored) else each for each in arguments]
