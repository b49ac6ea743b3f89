"""Sync, the trainer's half: full weights in flat buckets, broadcast to the engines.

In: the exporter of this rank. Out: for each bucket one broadcast of bytes in a group of its own. Its members are the
trainer's global rank 0 (as rank 0) and every engine rank (from 1 on). The engines are told what comes over HTTP by
somebody else, who calls ``connect`` and ``send`` while that request is under way: both sides block on each other.

The bytes of a bucket are its tensors, each flattened, one after another without gaps: SGLang's load format
"flattened_bucket". The group is formed as SGLang does it (rendezvous over TCP, keys under the group's name), with
torch's private helper because torch has no public way to form a group with processes outside the world.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world, rendezvous

from rlpost.errors import SyncError
from rlpost.types import Bucket
from rlpost.weights.exporter import Exporter, describe


class SyncSender:
    """Sends the weights of the trainer; one on every rank, all called alike."""

    def __init__(self, exporter: Exporter, *, bucket_bytes: int, gathers: bool, backend: str, timeout_s: float) -> None:
        """Args: ``bucket_bytes`` bounds a bucket; ``gathers``: whether this rank and global rank 0 hold parts of the
        same copy of the model; ``timeout_s`` is the deadline of connecting and of each broadcast."""
        self.exporter = exporter
        self.buckets = exporter.plan(bucket_bytes)
        self.gathers = gathers
        self.is_source = dist.get_rank() == 0
        self.backend = backend
        self.timeout = timedelta(seconds=timeout_s)
        self.group: dist.ProcessGroup | None = None

    def plan(self) -> tuple[Bucket, ...]:
        """What ``send`` sends, by index: names, shapes and dtypes. The same on every rank."""
        return tuple(describe(bucket) for bucket in self.buckets)

    def connect(self, master_addr: str, master_port: int, *, num_engine_ranks: int, group_name: str) -> None:
        """Form the group with the engines; rank 0 listens on the address, all other trainer ranks do nothing.

        Raises SyncError when the engines have not come within the timeout.
        """
        if not self.is_source:
            return
        if self.group is not None:
            raise SyncError(f"a group with engines exists already; disconnect before connecting {group_name!r}")
        world_size = 1 + num_engine_ranks
        host = f"[{master_addr}]" if ":" in master_addr else master_addr
        try:
            store, _, _ = next(rendezvous(f"tcp://{host}:{master_port}", 0, world_size, timeout=self.timeout))
            store.set_timeout(self.timeout)
            self.group, _ = _new_process_group_helper(
                world_size,
                0,
                [],
                Backend(self.backend),
                PrefixStore(group_name, store),
                group_name=group_name,
                backend_options=None,
                timeout=self.timeout,
            )
        except (dist.DistError, RuntimeError) as error:
            raise SyncError(
                f"group {group_name!r} with {num_engine_ranks} engine ranks could not be formed at "
                f"{master_addr}:{master_port} within {self.timeout.total_seconds():.0f} s: {error}"
            ) from error
        _world.pg_group_ranks[self.group] = {rank: rank for rank in range(world_size)}

    def send(self, bucket_index: int) -> None:
        """Gather bucket ``bucket_index`` and broadcast it. Every trainer rank calls this.

        Raises SyncError when an engine does not take part in time.
        """
        if not self.gathers:
            return
        tensors = self.exporter.gather(self.buckets[bucket_index])
        if not self.is_source:
            return
        if self.group is None:
            raise SyncError("no engine is connected; call connect before send")
        flat = torch.cat([tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors.values()])
        try:
            dist.broadcast(flat, group=self.group, group_src=0)
        except (dist.DistError, RuntimeError) as error:
            raise SyncError(
                f"bucket {bucket_index + 1} of {len(self.buckets)} ({flat.numel()} bytes) did not reach all engines "
                f"within {self.timeout.total_seconds():.0f} s: {error}"
            ) from error

    def disconnect(self) -> None:
        """Leave the group, so that another can be formed; harmless when there is none."""
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None
