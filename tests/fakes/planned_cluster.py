"""Ranks and engines that hold the bytes of ``rlpost plan`` in a ledger, in place of processes.

Input: an estimate. Output: stand-ins for Ray workers, SGLang servers and their clients. Each GPU
has a rank that trains, an engine of one GPU, or several of them; a rank is the
fullest one of the plan. An engine sizes its KV cache as SGLang does: ``mem_fraction_static`` of the
memory that is free when its process starts, less its weights. A standby holds nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rlpost.config.plan.cards import RESERVE
from rlpost.config.plan.shard_plan import Unit
from rlpost.config.plan.weight_update import SHARED_BUFFERS
from rlpost.driver.placement import Placement, Ports, Slot
from rlpost.errors import EngineDied
from rlpost.extensions.planning.engine_memory import default_fraction
from rlpost.extensions.planning.estimate import Estimate
from rlpost.trainer.memory import GRADS, OPTIMIZER, WEIGHTS, wait_until_free
from rlpost.types import Bucket
from tests.fakes.memory_ledger import MemoryLedger

NUM_ENGINES = 2
BUCKETS = [Bucket((f"w{index}",), ((2, 2),), ("bfloat16",)) for index in range(3)]
PORTS = Ports((11, 12), (21, 22), 33, (41,))
RELEASE_S = 0.02  # until the last rank of an engine has released its memory, after its answer


class PlannedCluster:
    """The processes of a run, their memory, and the failures that a test asks for."""

    current: ClassVar[PlannedCluster]
    free_of: ClassVar[str]
    """The GPU of the rank that waits for memory."""

    def __init__(self, made: Estimate) -> None:
        PlannedCluster.current = self
        config = made.config
        self.made, self.colocated = made, config.cluster.colocate
        self.fraction = float(
            config.sglang.server_args.get("mem_fraction_static")
            or default_fraction(config, made.shape, made.gpu_bytes)
        )
        phases = {phase.name: dict(phase.parts) for phase in made.phases}
        self.trainer_context = made.fullest.context
        self.engine_context = phases["generate"]["engine's CUDA"]
        num_gpus = NUM_ENGINES * (1 if self.colocated else 2)
        gpus = range(num_gpus)
        host = made.host_bytes_per_node // config.cluster.actor_num_gpus_per_node
        self.ledger = MemoryLedger(
            {f"GPU {gpu}": int(made.gpu_bytes * RESERVE) for gpu in gpus}
            | {f"host of rank {rank}": host for rank in range(NUM_ENGINES)}
        )
        self.engines = [PlannedEngine(self, index) for index in range(NUM_ENGINES)]
        self.log: list[str] = []
        self.keywords: list[tuple[str, dict[str, object]]] = []
        self.releases_late = False
        self._failures: dict[str, tuple[int, Callable[[], None]]] = {}

    @property
    def placement(self) -> Placement:
        """Two ranks; engines share their GPUs, or have one each."""
        slot = Slot("n0", "10.0.0.1", 1)
        shared = tuple(Slot("n0", "10.0.0.1", 1, (index,)) for index in range(NUM_ENGINES))
        alone = (slot,) * NUM_ENGINES
        return Placement(alone, tuple((own,) for own in (shared if self.colocated else alone)))

    def fail_at(self, event: str, act: Callable[[], None], *, number: int = 1) -> None:
        """Call ``act`` when ``event`` happens the ``number``-th time from now on."""
        self._failures[event] = (number, act)

    def happens(self, event: str) -> None:
        """Record an event, and let a test's failure happen."""
        self.log.append(event)
        number, act = self._failures.get(event, (0, _nothing))
        if number:
            self._failures[event] = (number - 1, act)
            if number == 1:
                act()


class PlannedEngine:
    """An SGLang server of one GPU."""

    def __init__(self, cluster: PlannedCluster, index: int) -> None:
        self.cluster, self.name = cluster, f"engine-{index}"
        self.place = f"GPU {index if cluster.colocated else NUM_ENGINES + index}"
        self.is_alive = self.is_reading = self.refuses = False
        self.version, self.kv_cache, self.caches = "0", 0, list[int]()

    def start(self) -> None:
        """Take the memory of a new process."""
        cluster, planned = self.cluster, self.cluster.made.engine
        assert planned is not None
        cluster.happens(f"{self.name} starts")
        cluster.ledger.hold(self.place, self.name, "CUDA", cluster.engine_context)
        is_free = cluster.made.gpu_bytes - cluster.ledger.total(self.place)
        self.kv_cache = int(cluster.fraction * is_free) - planned.weights
        self.caches.append(self.kv_cache)
        self.is_alive, self.is_reading, self.refuses, self.version = True, False, False, "0"
        self.restore("weights", "kv_cache")

    def kill(self) -> None:
        """End the process."""
        self.is_alive = self.is_reading = False
        self.cluster.ledger.free(self.name)

    def check(self, *, updates: bool = False) -> None:
        """Raise EngineDied if the process has ended, or refuses updates."""
        if not self.is_alive or (updates and self.refuses):
            raise EngineDied(f"{self.name} is gone")

    async def release(self, tags: Sequence[str]) -> None:
        """Free memory, and perhaps answer before it is free."""
        self.cluster.happens(f"{self.name} releases")
        self.check()
        late = RELEASE_S if self.cluster.releases_late else 0.0
        asyncio.get_running_loop().call_later(late, self.cluster.ledger.free, self.name, *tags)
        if not late:
            await asyncio.sleep(0)
            self.cluster.ledger.free(self.name, *tags)

    def restore(self, *tags: str) -> None:
        """Take released memory again."""
        planned = self.cluster.made.engine
        assert planned is not None
        sizes = {
            "weights": planned.weights,
            "kv_cache": self.kv_cache,
            "cuda_graph": planned.graphs,
        }
        for tag in tags:
            self.cluster.ledger.hold(self.place, self.name, tag, sizes[tag])

    async def read(self) -> None:
        """Read a shared bucket; the trainer may not free it meanwhile."""
        self.is_reading = True
        self.cluster.happens(f"{self.name} reads")
        if not self.cluster.releases_late:
            assert not self.cluster.ledger.held(self.name, "kv_cache"), "a cache beside the buckets"
        await asyncio.sleep(0.001)
        self.check(updates=True)
        self.is_reading = False

    async def receive(self) -> None:
        """Receive a broadcast bucket, in tensors of its own and one flat copy."""
        self.cluster.happens(f"{self.name} reads")
        update = self.cluster.made.update
        assert update is not None
        self.cluster.ledger.hold(self.place, self.name, "buckets", 2 * update.largest_bytes)
        await asyncio.sleep(0.001)
        self.check(updates=True)
        self.cluster.ledger.free(self.name, "buckets")


@dataclass(frozen=True)
class Client:
    """The client of an engine, in place of ``EngineClient``."""

    url: str
    api_key: str
    timeout_s: float = 0.0
    selector: str = "all"

    @property
    def _engine(self) -> PlannedEngine:
        return PlannedCluster.current.engines[PORTS.engines.index(int(self.url.split(":")[-1]))]

    async def failure(self, *_: object) -> str | None:
        """Answer a health check."""
        return None if self._engine.is_alive else f"{self._engine.name} is dead"

    async def server_info(self) -> dict[str, str]:
        return {"version": "0.5.21"}

    async def has_shard_loader(self) -> bool:
        self._engine.check()
        return False

    async def release_memory(self, tags: Sequence[str]) -> None:
        await self._engine.release(tags)

    async def restore_memory(self, tags: Sequence[str]) -> None:
        self._engine.cluster.happens(f"{self._engine.name} restores")
        self._engine.check()
        self._engine.restore(*tags)

    async def update_weights_from_handles(
        self, handles: Sequence[str], *, version: int | None
    ) -> None:
        await self._engine.read()
        self._set(version)

    async def update_weights(self, bucket: Bucket, *, group_name: str, version: int | None) -> None:
        await self._engine.receive()
        self._set(version)

    def _set(self, version: int | None) -> None:
        if version is not None:
            self._engine.version = str(version)

    async def weight_version(self) -> str:
        self._engine.check()
        return self._engine.version

    def __getattr__(self, name: str) -> Any:
        """Return a method that needs an engine that lives: pausing, flushing, resuming and so on."""
        if name.startswith("__"):
            raise AttributeError(name)

        async def succeed(*_: object, **__: object) -> bool:
            self._engine.check()
            return True

        return succeed


class EngineProcesses:
    """The worker of an engine, in place of ``WorkerGroup``."""

    def __init__(self, makes: object, slots: object, *, names: Sequence[str], **_: object) -> None:
        self._engine = PlannedCluster.current.engines[int(names[0].removeprefix("engine-"))]

    async def call_each(self, method: str, arguments: object, **_: object) -> None:
        """Start the server."""
        await asyncio.sleep(0)
        self._engine.start()

    async def call(self, method: str) -> None:
        """Stop the server."""
        self._engine.kill()

    async def call_aside(self, method: str) -> None:
        """Raise EngineDied if the server has ended."""
        self._engine.check()


class RankProcesses:
    """The ranks that train, or their standbys, in place of ``WorkerGroup``."""

    def __init__(
        self,
        makes: object,
        slots: Sequence[Slot],
        *,
        names: Sequence[str],
        died: Callable[[str, Sequence[int]], Exception],
        standbys: object = None,
        **_: object,
    ) -> None:
        self.names, self._died = names, died
        self._cluster = PlannedCluster.current
        self._dead = False
        self._role = names[0].partition("-")[0]
        self._steps = [0] * len(names)
        if standbys:
            self._cluster.log.append(f"{len(standbys)} standbys take over")

    def __len__(self) -> int:
        return len(self.names)

    def die(self) -> None:
        """End all processes."""
        self._dead = True
        for name in self.names:
            self._cluster.ledger.free(name)

    async def kill(self, indices: Sequence[int] | None = None) -> None:
        self.die()

    async def dead(self, within_s: float) -> list[int]:
        return list(range(len(self))) if self._dead else []

    async def processes(self) -> list[Any]:
        return []

    async def until_ended(self, earlier: object, *, within_s: float) -> list[str]:
        return []

    async def reorder(self, order: object) -> None:
        """Do nothing: the ranks are in order."""

    def standby(self, index: int) -> object:
        return object()

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of each rank."""
        assert self._role != "standby", f"a standby computes {method}"
        self._cluster.happens(method)
        if self._dead:
            raise self._died(f"{self.names[0]} died", [0])
        await asyncio.sleep(0)
        act = getattr(self, "_" + method.replace(".", "_"), None)
        found = []
        for rank in range(len(self)):
            result = None if act is None else act(rank, *arguments)
            found.append(await result if asyncio.iscoroutine(result) else result)
        return found

    async def call_each(
        self, method: str, arguments: Sequence[Sequence[Any]], **keywords: object
    ) -> list[Any]:
        self._cluster.keywords.append((method, keywords))
        return await self.call(method, *(arguments[0] if method == "load" else ()))

    call_aside = call

    def _gpu(self, rank: int) -> str:
        return f"GPU {rank}"

    def _hold(self, rank: int, kind: str, num_bytes: int) -> None:
        self._cluster.ledger.hold(self._gpu(rank), self.names[rank], kind, num_bytes)

    def _hold_on_host(self, rank: int, kind: str, num_bytes: int) -> None:
        self._cluster.ledger.hold(f"host of rank {rank}", self.names[rank], kind, num_bytes)

    @property
    def _sizes(self) -> dict[str, int]:
        """Bytes of each part; a critic counts as in ``DeviceMemory``."""
        policy, critic = self._cluster.made.fullest.held, self._cluster.made.fullest.critic
        return {
            WEIGHTS: policy.weights,
            GRADS: policy.gradients + critic.gradients,
            OPTIMIZER: policy.optimizer + critic.optimizer + critic.weights,
        }

    def _require(self, rank: int, *parts: str) -> None:
        """Check that a rank has these parts on its GPU."""
        for part in parts:
            held = self._cluster.ledger.held(self.names[rank], part)
            assert held >= self._sizes[part], f"{self.names[rank]} computes without its {part}"

    def _setup(self, rank: int) -> None:
        self._hold(rank, "CUDA, NCCL", self._cluster.trainer_context)
        for part, size in self._sizes.items():
            self._hold(rank, part, size)
        self._hold_on_host(rank, "Adam", self._cluster.made.fullest.optimizer_host)

    def _import_weights(self, rank: int) -> None:
        self._require(rank, WEIGHTS)

    def _load(self, rank: int, folder: str) -> None:
        """Read a checkpoint through a buffer into the tensors on the GPU."""
        self._require(rank, WEIGHTS, OPTIMIZER)
        self._hold_on_host(rank, "save buffer", self._cluster.made.save_buffer_bytes)
        self._cluster.ledger.free(self.names[rank], "save buffer")

    def _memory_offload(self, rank: int, *parts: str) -> None:
        self._cluster.ledger.free(self.names[rank], *parts)
        for part in set(parts) - {GRADS}:  # torch's cache keeps the pinned memory from now on
            self._hold_on_host(rank, f"copy of {part}", self._sizes[part])

    async def _memory_restore(self, rank: int, *parts: str) -> None:
        missing = [part for part in parts if not self._cluster.ledger.held(self.names[rank], part)]
        reserve = self._steps[rank] and GRADS in missing and self._cluster.made.fullest.passing.peak
        await self._wait(rank, sum(self._sizes[part] for part in missing), int(reserve))
        for part in missing:
            self._hold(rank, part, self._sizes[part])

    def _bucket(self) -> int:
        assert self._cluster.made.update is not None
        return self._cluster.made.update.largest_bytes

    async def _wait(self, rank: int, num_bytes: int, reserve: int = 0) -> None:
        """Wait for free memory as ranks do."""
        PlannedCluster.free_of = self._gpu(rank)
        await asyncio.to_thread(wait_until_free, num_bytes, "parts", reserve=reserve)

    async def _share_bucket(self, rank: int, index: int) -> str:
        self._require(rank, WEIGHTS)
        if not self._cluster.ledger.held(self.names[rank], "shared bucket 0"):
            await self._wait(rank, SHARED_BUFFERS * self._bucket())
        self._hold(rank, f"shared bucket {index % 2}", self._bucket())
        self._hold(rank, "gathered bucket", self._bucket())
        self._cluster.ledger.free(self.names[rank], "gathered bucket")
        return f"handle of {rank}"

    def _sharing_release(self, rank: int) -> None:
        assert not any(one.is_reading for one in self._cluster.engines), "freed while it is read"
        self._cluster.ledger.free(self.names[rank], "shared bucket 0", "shared bucket 1")

    def _send_bucket(self, rank: int, index: int) -> None:
        self._require(rank, WEIGHTS)
        self._hold(rank, "buckets", 2 * self._bucket())
        self._cluster.ledger.free(self.names[rank], "buckets")

    async def _train_step(self, rank: int) -> None:
        if self._cluster.releases_late and not self._steps[rank]:
            await asyncio.sleep(2 * RELEASE_S)  # longer than this takes to onload a rank
        self._steps[rank] += 1
        self._require(rank, WEIGHTS, GRADS, OPTIMIZER)
        self._hold(rank, "activations", self._cluster.made.fullest.passing.peak)
        self._cluster.ledger.free(self.names[rank], "activations")

    def _train_critic(self, rank: int) -> None:
        cluster = self._cluster
        self._require(rank, WEIGHTS, GRADS, OPTIMIZER)
        self._hold(rank, "activations", cluster.made.fullest.activations)
        cluster.ledger.free(self.names[rank], "activations")

    def _save(self, rank: int) -> None:
        self._require(rank, WEIGHTS, OPTIMIZER)
        self._hold_on_host(rank, "save buffer", self._cluster.made.save_buffer_bytes)

    def _save_is_done(self, rank: int) -> bool:
        return True

    def _versions(self, rank: int) -> tuple[int, None]:
        return 0, None

    def _visible_gpu(self, rank: int) -> str:
        return str(rank)

    def _has_gpu(self, rank: int) -> bool:
        return True

    def _gpu_position(self, rank: int) -> int:
        return rank

    def _data_parallel_rank(self, rank: int) -> int:
        return rank

    def _bucket_plan(self, rank: int) -> list[Bucket]:
        return BUCKETS

    def _shards_list_units(self, rank: int) -> tuple[Unit, ...]:
        return ()

    def _sync_stage(self, rank: int) -> int | None:
        return None if rank else 0

    def _broadcast_backend(self, rank: int) -> str:
        return "gloo"


def free_memory() -> int:
    """Free memory of the rank that waits for it, in place of ``device.free_memory``."""
    cluster = PlannedCluster.current
    return cluster.ledger.available(PlannedCluster.free_of)


def _nothing() -> None:
    pass
