"""Typed calls to groups of Ray workers: trainer ranks, and the processes of an engine.

Input: a ``WorkerGroup``, and calls that name a method by the method itself, with its arguments:
``remote(Actor.load, folder)``. A type checker compares the arguments with the method's. Output: one
result per worker, of the method's type, unless the docstring says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

from rlpost.columns import FloatColumn
from rlpost.driver.workers import Stored, WorkerGroup
from rlpost.observe.spans import ProcessSpans
from rlpost.types import TrainBatch

T = TypeVar("T")
P = ParamSpec("P")
Target = TypeVar("Target")
Result = TypeVar("Result")
Receiver = TypeVar("Receiver", contravariant=True)
Answer = TypeVar("Answer", covariant=True)

RankLogprobs = list[list[FloatColumn]]
"""Log-probs of one rank's batch, by micro-batch and sample."""
StoredBatches = Sequence[Stored[TrainBatch]]
"""The batch of each rank; equal on the model-parallel ranks of a data-parallel rank."""
StoredLogprobs = Sequence[Stored[RankLogprobs] | None]
"""The log-probs computed by each rank; None on all pipeline stages but the last."""
StoredValues = StoredLogprobs
"""The values computed by each rank's critic; None on all pipeline stages but the last."""


class RemoteName:
    """The name of a method, or of a part and its method: ``old_policy.skip``."""

    def __init__(self, path: str) -> None:
        self._path = path  # any other attribute is a name of the worker's

    def __getattr__(self, name: str) -> RemoteName:
        if name.startswith("_"):
            raise AttributeError(name)
        return RemoteName(f"{self._path}.{name}")


class RemoteNames(type):
    """The type of a class of which the driver knows the names alone."""

    def __getattr__(cls, name: str) -> RemoteName:
        if name.startswith("_"):
            raise AttributeError(name)
        return RemoteName(name)


if TYPE_CHECKING:
    from rlpost.engines.engine import Engine as Engine
    from rlpost.trainer.actor import Actor as Actor
else:  # the driver loads neither torch nor Megatron

    class Actor(metaclass=RemoteNames):
        """Names of ``rlpost.trainer.actor.Actor``."""

    class Engine(metaclass=RemoteNames):
        """Names of ``rlpost.engines.engine.Engine``."""


@dataclass(frozen=True, slots=True)
class RemoteCall(Generic[Receiver, Answer]):
    """A call of one worker: the path of the method in its object, and the arguments.

    Arguments may be ``Stored``; keywords are equal for all workers, for ``all`` and ``each`` alone.
    """

    path: str
    arguments: Sequence[object]
    keywords: Mapping[str, object]


@overload
def remote(
    method: Callable[Concatenate[Target, P], Result], *arguments: P.args, **keywords: P.kwargs
) -> RemoteCall[Target, Result]: ...
@overload
def remote(
    method: Callable[P, Result], *arguments: P.args, **keywords: P.kwargs
) -> RemoteCall[Any, Result]: ...
def remote(method: object, *arguments: object, **keywords: object) -> RemoteCall[Any, Any]:
    """Return a call of a method, a property (``Actor.has_gpu``) or a part's method.

    Raises:
        TypeError: ``method`` is no name of ``Actor`` or ``Engine``; or a keyword is ``Stored``,
            which Ray resolves among positional arguments alone.
    """
    if not isinstance(method, RemoteName):
        raise TypeError(f"{method!r} is not the method of a worker")
    path = method._path
    if stored := [name for name, value in keywords.items() if isinstance(value, Stored)]:
        raise TypeError(f"{path}: pass {', '.join(stored)} as a positional argument")
    return RemoteCall(path, arguments, keywords)


@overload
def received(stored: Stored[T]) -> T: ...
@overload
def received(stored: Stored[T] | None) -> T | None: ...
def received(stored: Stored[T] | None) -> T | None:
    """Return a stored value as an argument: it has the type of what the worker receives."""
    return cast("T | None", stored)


class Workers(Generic[Target]):
    """Workers that hold a ``Target`` each, in order.

    ``aside`` and ``answers`` run concurrently with other calls; all others run in order.
    """

    def __init__(self, workers: WorkerGroup) -> None:
        self.workers = workers

    async def all(self, call: RemoteCall[Target, Result]) -> list[Result]:
        """Make the same call of every worker."""
        if call.keywords:
            return await self.each([call] * len(self.workers))
        return await self.workers.call(call.path, *call.arguments)

    async def first(self, call: RemoteCall[Target, Result]) -> Result:
        """Make the same call of every worker; return the result of the first."""
        return (await self.all(call))[0]

    async def each(self, calls: Sequence[RemoteCall[Target, Result]]) -> list[Result]:
        """Call one method of every worker, with individual arguments and common keywords."""
        path, keywords = _common(calls)
        arguments = [call.arguments for call in calls]
        return await self.workers.call_each(path, arguments, **keywords)

    async def each_stored(
        self, calls: Sequence[RemoteCall[Target, Result]]
    ) -> list[Stored[Result] | None]:
        """Like ``each``, but leave results in the object store; None for an empty result."""
        path, _ = _common(calls)
        arguments = [_positional(call) for call in calls]
        return await self.workers.call_each_stored(path, arguments)

    async def aside(self, call: RemoteCall[Target, Result]) -> list[Result]:
        """Call every worker, also while it computes."""
        arguments = _positional(call)
        return await self.workers.call_aside(call.path, *arguments)

    async def answers(
        self, call: RemoteCall[Target, Result], *, within_s: float
    ) -> list[Result | None]:
        """Like ``aside``, with None for each worker that fails or does not answer in time."""
        arguments = _positional(call)
        return await self.workers.answers_aside(call.path, *arguments, within_s=within_s)


def _common(calls: Sequence[RemoteCall[Any, Any]]) -> tuple[str, Mapping[str, object]]:
    """Return the path and keywords of all calls. Raises TypeError if they differ."""
    first = calls[0]
    if any(call.path != first.path or call.keywords != first.keywords for call in calls):
        raise TypeError(f"{first.path}: workers get different methods or keywords")
    return first.path, first.keywords


def _positional(call: RemoteCall[Any, Any]) -> Sequence[object]:
    if call.keywords:
        raise TypeError(f"{call.path}: keywords are for ``all`` and ``each``")
    return call.arguments


class ActorGroup(Workers[Actor]):
    """The ranks that train, in order."""

    def __len__(self) -> int:
        return len(self.workers)

    def replace(self, fresh: ActorGroup) -> None:
        """Use the workers of ``fresh`` from now on: calls through this group reach them."""
        self.workers = fresh.workers

    async def send(self, values: Sequence[T], data_ranks: Sequence[int]) -> list[Stored[T]]:
        """Store one value per data-parallel rank; return that of each rank, by ``data_ranks``."""
        stored = [await self.workers.put(value) for value in values]
        return [stored[data_rank] for data_rank in data_ranks]

    async def fetch_columns(
        self, stored: StoredLogprobs, data_ranks: Sequence[int], data_rank: int
    ) -> list[FloatColumn] | None:
        """Return the columns that a data-parallel rank computed, by sample; None without any.

        They are equal on all model-parallel ranks that have them, so one rank's are fetched.
        """
        for rank, found in zip(data_ranks, stored, strict=True):
            if rank == data_rank and found is not None:
                by_micro_batch = await self.workers.get(found)
                return [column for micro_batch in by_micro_batch for column in micro_batch]
        return None

    async def write_engine_folder(self, folder: str, version: int) -> int | None:
        """Write the files that engines read; return the bytes of adapters, else None."""
        written = await self.all(remote(Actor.write_engine_folder, folder, version))
        return next((size for size in written if size is not None), None)


class EngineWorkers(Workers[Engine]):
    """The processes of one engine, one per node."""

    async def start(
        self, places: Sequence[tuple[str, int]], *, deadline_s: float, gpus_per_node: int | None
    ) -> None:
        """Start the server; ``places`` has host and port for each node."""
        await self.each(
            [
                remote(Engine.start, *place, deadline_s=deadline_s, gpus_per_node=gpus_per_node)
                for place in places
            ]
        )

    async def stop(self) -> None:
        """End the server and everything that it started."""
        await self.all(remote(Engine.stop))

    async def abandon(self, left: Sequence[int], *, within_s: float) -> None:
        """End the engine; ``left``: its parts whose nodes are not lost."""
        await self.workers.abandon(remote(Engine.stop).path, left, within_s=within_s)

    async def check_alive(self) -> None:
        """Raise EngineDied, with the end of the log, when a process has ended."""
        await self.aside(remote(Engine.check_alive))

    async def running(self, within_s: float) -> list[tuple[str, dict[str, object]] | None]:
        """Return URL and settings of the server on each node, also while one starts.

        None for a server that has ended, and for a worker that does not answer in time.
        """
        return await self.answers(remote(Engine.running), within_s=within_s)

    async def kill(self) -> None:
        """Kill the workers; their servers end with them. Returns before they have ended."""
        await self.workers.kill()

    async def memory_use(self) -> list[dict[str, float]]:
        """Return the memory use of each node's part, by metric name."""
        return await self.aside(remote(Engine.memory_use))

    async def spans(self, since: float) -> list[ProcessSpans]:
        """Return the spans of each worker after ``since`` on this process's clock."""
        return await self.workers.spans(since)
