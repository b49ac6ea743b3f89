"""Typed groups of Ray workers: trainer ranks, engine processes, copies of weights on hosts.

Input: a ``WorkerGroup``. Output: one typed method per remote method, with one result per worker
unless the docstring says otherwise. Only this module names remote methods by string; a test checks
each name and its number of arguments against the remote class.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from common.process_end import ProcessId
from rlpost.algorithm.advantage import Advantage
from rlpost.columns import FloatColumn
from rlpost.driver.workers import Stored, WorkerGroup
from rlpost.observe.progress.position import Position
from rlpost.observe.spans import ProcessSpans
from rlpost.trainer.stop_points import StopPoint
from rlpost.types import Bucket, StepPlace, StepResult, TrainBatch

T = TypeVar("T")

RankLogprobs = list[list[FloatColumn]]
"""Log-probs of one rank's batch, by micro-batch and sample."""
StoredBatches = Sequence[Stored[TrainBatch]]
"""The batch of each rank; equal on the model-parallel ranks of a data-parallel rank."""
StoredLogprobs = Sequence[Stored[RankLogprobs] | None]
"""The log-probs computed by each rank; None on all pipeline stages but the last."""
StoredValues = StoredLogprobs
"""The values computed by each rank's critic; None on all pipeline stages but the last."""
BroadcastPlace = tuple[str, int, int, str]
"""Master address and port, number of engine ranks, name of the group."""


class ActorGroup:
    """The ranks that train, in order; each runs a ``rlpost.trainer.actor.Actor``.

    ``save_is_done``, ``memory_use``, ``positions``,
    ``write_flight_records``, ``hold``, ``release`` and ``abort_broadcast`` run concurrently with
    other calls; all others run in order.
    """

    def __init__(self, workers: WorkerGroup) -> None:
        self.workers = workers

    def __len__(self) -> int:
        return len(self.workers)

    @property
    def names(self) -> Sequence[str]:
        """The name of each rank with the address of its node."""
        return self.workers.names

    def replace(self, fresh: ActorGroup) -> None:
        """Use the workers of ``fresh`` from now on: calls through this group reach them."""
        self.workers = fresh.workers

    async def reorder(self, order: Sequence[int]) -> None:
        """Make worker ``order[i]`` rank ``i``; see ``WorkerGroup.reorder``."""
        await self.workers.reorder(order)

    # -- processes ---------------------------------------------------------------------------------

    async def dead(self, within_s: float) -> list[int]:
        """Return the ranks whose process has ended."""
        return await self.workers.dead(within_s)

    async def processes(self) -> list[tuple[str, ProcessId]]:
        """Return Ray's id of the node and the process of each rank."""
        return await self.workers.processes()

    async def kill(self) -> None:
        """Kill the processes of all ranks."""
        await self.workers.kill()

    async def until_ended(
        self, earlier: Sequence[tuple[str, ProcessId]], *, within_s: float
    ) -> list[str]:
        """Wait for the end of earlier processes on the nodes of these ranks; return those left."""
        return await self.workers.until_ended(earlier, within_s=within_s)

    # -- start -------------------------------------------------------------------------------------

    async def gpu_positions(self) -> list[int | None]:
        """Return the position of each rank's GPU on its node."""
        return await self.workers.call("gpu_position")

    async def visible_gpus(self) -> list[str]:
        """Return the GPU of each rank, for an engine that shares it."""
        return await self.workers.call("visible_gpu")

    async def have_gpus(self) -> list[bool]:
        """Return whether each rank computes on a GPU."""
        return await self.workers.call("has_gpu")

    async def setup(self, master_addr: str, master_port: int) -> None:
        """Initialize the process groups and build model and optimizer on all ranks."""
        world = len(self)
        await self.workers.call_each(
            "setup", [(rank, world, master_addr, master_port) for rank in range(world)]
        )

    async def data_parallel_ranks(self) -> list[int]:
        """Return the data-parallel rank of each rank."""
        return await self.workers.call("data_parallel_rank")

    async def import_weights(self) -> None:
        """Fill the model with the weights that training starts from."""
        await self.workers.call("import_weights")

    async def load(self, folder: Path) -> None:
        """Restore a checkpoint."""
        await self.workers.call("load", str(folder))

    async def versions(self) -> tuple[int, int | None]:
        """Return the version of the loaded policy, and an older one that ranks have as well."""
        return (await self.workers.call("versions"))[0]

    # -- train -------------------------------------------------------------------------------------

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

    async def _compute(self, method: str, batches: StoredBatches, *more: int) -> StoredLogprobs:
        """Make a forward pass; its results stay in the object store."""
        arguments = [(batch, *more) for batch in batches]
        return await self.workers.call_each_stored(method, arguments)

    async def compute_logprobs(self, batches: StoredBatches) -> StoredLogprobs:
        """Compute log-probs of response tokens under the current weights."""
        return await self._compute("compute_logprobs", batches)

    async def compute_old_logprobs(self, batches: StoredBatches, version: int) -> StoredLogprobs:
        """Like ``compute_logprobs``, under the policy's weights of ``version``."""
        return await self._compute("compute_old_logprobs", batches, version)

    async def compute_ref_logprobs(self, batches: StoredBatches) -> StoredLogprobs:
        """Like ``compute_logprobs``, under the reference weights."""
        return await self._compute("compute_ref_logprobs", batches)

    async def compute_values(self, batches: StoredBatches) -> StoredValues:
        """Compute the critic's value before each response token."""
        return await self._compute("compute_values", batches)

    async def train_step(
        self,
        batches: StoredBatches,
        old_logprobs: StoredLogprobs,
        advantages: Sequence[Stored[Sequence[Advantage]] | None],
        place: StepPlace,
    ) -> list[StepResult]:
        """Run one optimizer step; all arguments but ``place`` have one entry per rank."""
        places = [place] * len(batches)
        arguments = list(zip(batches, old_logprobs, advantages, places, strict=True))
        return await self.workers.call_each("train_step", arguments)

    async def train_critic(
        self,
        batches: StoredBatches,
        values: StoredValues,
        returns: Sequence[Stored[tuple[FloatColumn, ...]]],
    ) -> list[StepResult]:
        """Run one optimizer step of the critic; all arguments have one entry per rank."""
        arguments = list(zip(batches, values, returns, strict=True))
        return await self.workers.call_each("train_critic", arguments)

    async def skip_rollout(self, rollout: int) -> None:
        """Record that a rollout has not changed the policy's weights."""
        await self.workers.call("old_policy.skip", rollout)

    async def hold(self) -> list[StopPoint]:
        """Stop every rank at the next stop point that it reaches; return these points."""
        return await self.workers.call_aside("stop_points.hold")

    async def release(self, stop_at: StopPoint | None) -> None:
        """Let held ranks continue: to ``stop_at``, where each raises Interrupted, or to the end."""
        await self.workers.call_aside("stop_points.release", stop_at)

    # -- save --------------------------------------------------------------------------------------

    async def save(self, folder: Path, step: int, *, in_background: bool) -> None:
        """Let each rank write its part of a checkpoint."""
        arguments = [(str(folder), step)] * len(self)
        await self.workers.call_each("save", arguments, in_background=in_background)

    async def save_is_done(self) -> list[bool]:
        """Return whether each rank has written all of the last save."""
        return await self.workers.call_aside("save_is_done")

    async def export(self, folder: str) -> None:
        """Write the weights as a Hugging Face folder."""
        await self.workers.call("export", folder)

    async def write_engine_folder(self, folder: str, version: int) -> int | None:
        """Write the files that engines read; return the bytes of adapters, else None."""
        written: list[int | None] = await self.workers.call("write_engine_folder", folder, version)
        return next((size for size in written if size is not None), None)

    async def export_critic(self, folder: str) -> None:
        """Write the critic as a Hugging Face folder."""
        await self.workers.call("export_critic", folder)

    async def weights_hash(self) -> str:
        """Return a hash of the full weights, independent of the parallel layout."""
        return (await self.workers.call("weights_hash"))[0]

    # -- memory of shared GPUs ---------------------------------------------------------------------

    async def restore_memory(self, *parts: str) -> None:
        """Bring parts (``rlpost.trainer.memory``) back to the device."""
        await self.workers.call("memory.restore", *parts)

    async def offload_memory(self, *parts: str) -> None:
        """Move parts to host memory."""
        await self.workers.call("memory.offload", *parts)

    async def release_shared_buckets(self) -> None:
        """Free the memory of buckets that engines have read."""
        await self.workers.call("sharing.release")

    # -- weights to the engines --------------------------------------------------------------------

    async def bucket_plan(self) -> Sequence[Bucket]:
        """Names, shapes and dtypes of the buckets, equal on every rank."""
        return (await self.workers.call("buckets.plan"))[0]

    async def sync_stages(self) -> list[int | None]:
        """The pipeline stage whose weights each rank sends; None for ranks that send none."""
        return await self.workers.call("sync_stage")

    async def broadcast_backend(self) -> str:
        """``nccl`` or ``gloo``."""
        return (await self.workers.call("broadcast.backend"))[0]

    async def connect_broadcast(self, places: Sequence[BroadcastPlace]) -> None:
        """Form the groups with the engines; ``places[rank]``."""
        await self.workers.call_each("broadcast.connect", places)

    async def disconnect_broadcast(self) -> None:
        """Leave the process groups of the broadcast."""
        await self.workers.call("broadcast.disconnect")

    async def send_bucket(self, index: int) -> None:
        """Broadcast a bucket."""
        await self.workers.call("send_bucket", index)

    async def abort_broadcast(self) -> None:
        """Abort the current broadcast on all ranks."""
        await self.workers.call_aside("broadcast.abort")

    async def use_weights(self, version: int) -> None:
        """Give the model the weights of ``version`` until ``use_own_weights``.

        Raises SyncError when the ranks do not have that version.
        """
        await self.workers.call("old_policy.swap_in", version)

    async def use_own_weights(self) -> None:
        """Give the model its own weights back."""
        await self.workers.call("old_policy.swap_out")

    async def share_bucket(self, index: int) -> list[str]:
        """Share a bucket with engines on the same GPUs; return a memory handle per rank."""
        return await self.workers.call("share_bucket", index)

    # -- observation -------------------------------------------------------------------------------

    async def peak_flops(self) -> float | None:
        """Return the peak FLOP/s of the first rank's device; None if unknown."""
        return (await self.workers.call("peak_flops"))[0]

    async def memory_use(self) -> list[dict[str, float]]:
        """Return the memory use of each rank, by metric name."""
        return await self.workers.call_aside("memory_use")

    async def positions(self, within_s: float) -> list[Position | None]:
        """Return where each rank is, even while it computes; None for ranks that do not answer."""
        return await self.workers.answers_aside("position", within_s=within_s)

    async def write_flight_records(self, folder: Path, within_s: float) -> list[str | None]:
        """Let each rank write torch's record of its newest collectives; return the paths."""
        return await self.workers.answers_aside(
            "write_flight_record", str(folder), within_s=within_s
        )

    async def begin_profile(self, ranks: Sequence[int], *, operators: bool, memory: bool) -> None:
        """Start profiling operators or memory allocations on these ranks."""
        arguments = [(list(ranks),)] * len(self)
        await self.workers.call_each(
            "profiling.begin", arguments, operators=operators, memory=memory
        )

    async def end_profile(self, folder: Path, steps: str) -> list[str]:
        """Stop profiling and write the profiles; return their paths."""
        written: list[list[str]] = await self.workers.call("profiling.end", str(folder), steps)
        return [path for of_rank in written for path in of_rank]

    async def spans(self, since: float) -> list[ProcessSpans]:
        """Return the spans of each rank after ``since`` on this process's clock."""
        return await self.workers.spans(since)


class EngineWorkers:
    """The processes of one engine, one per node; each runs a ``rlpost.engines.engine.Engine``."""

    def __init__(self, workers: WorkerGroup) -> None:
        self._workers = workers

    async def start(
        self, places: Sequence[tuple[str, int]], *, deadline_s: float, gpus_per_node: int | None
    ) -> None:
        """Start the server; ``places`` has host and port for each node."""
        await self._workers.call_each(
            "start", places, deadline_s=deadline_s, gpus_per_node=gpus_per_node
        )

    async def stop(self) -> None:
        """End the server and everything that it started."""
        await self._workers.call("stop")

    async def abandon(self, left: Sequence[int], *, within_s: float) -> None:
        """End the engine; ``left``: its parts whose nodes are not lost."""
        await self._workers.abandon("stop", left, within_s=within_s)

    async def check_alive(self) -> None:
        """Raise EngineDied, with the end of the log, when a process has ended."""
        await self._workers.call_aside("check_alive")

    async def running(self, within_s: float) -> list[tuple[str, dict[str, object]] | None]:
        """Return URL and settings of the server on each node, also while one starts.

        None for a server that has ended, and for a worker that does not answer in time.
        """
        return await self._workers.answers_aside("running", within_s=within_s)

    async def kill(self) -> None:
        """Kill the workers; their servers end with them. Returns before they have ended."""
        await self._workers.kill()

    async def memory_use(self) -> list[dict[str, float]]:
        """Return the memory use of each node's part, by metric name."""
        return await self._workers.call_aside("memory_use")

    async def spans(self, since: float) -> list[ProcessSpans]:
        """Return the spans of each worker after ``since`` on this process's clock."""
        return await self._workers.spans(since)
