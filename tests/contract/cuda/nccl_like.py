"""A process group over gloo that blocks, completes and aborts like NCCL.

It copies the following from NCCL (ProcessGroupNCCL.cpp of torch 2.13):

- Nothing is connected when the group is made. The first collective blocks its thread until all
  ranks have called it, and cannot be aborted before that (ncclCommInitRank).
- A collective returns a Work immediately. With a dead peer it never completes: nothing detects
  that the peer exited.
- ``wait`` only orders streams, and returns whether or not the collective has completed. Use
  ``is_completed`` to find out.
- An operation between some ranks connects no others: it must not be the first.
- ``shutdown`` waits for collectives in flight; ``abort`` ends them. Here ``shutdown`` fails the
  test when it would hang.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any, ClassVar

import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo

NAME = "nccl_like"
HOURS = timedelta(hours=1)


class WouldHang(AssertionError):
    """A call that would never return on NCCL."""


class Operation(dist._Work):
    """A collective in flight."""

    def __init__(self, real: Any) -> None:
        super().__init__()
        self.real = real
        self.ended = threading.Event()
        threading.Thread(target=self._finish, daemon=True).start()

    def _finish(self) -> None:
        try:
            self.real.wait()
        except RuntimeError:
            return  # gloo notices that the peer is dead; NCCL does not
        self.ended.set()

    def is_completed(self) -> bool:
        return self.ended.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


class Unnoticed:
    """What gloo refused to start."""

    def wait(self) -> None:
        raise RuntimeError("the peer is dead")


class NcclLike(dist.ProcessGroup):
    """One rank of the group."""

    made: ClassVar[list[NcclLike]] = []

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.store = store
        self.gloo: Any = None
        self.operations: list[Operation] = []
        self.aborted = threading.Event()
        self.connecting = threading.Event()
        self.made.append(self)

    def broadcast(self, tensors: Any, options: Any) -> Operation:
        return self._start(lambda: self.gloo.broadcast(tensors, options))

    def allreduce(self, tensors: Any, options: Any) -> Operation:
        return self._start(lambda: self.gloo.allreduce(tensors, options))

    def send(self, tensors: Any, peer: int, tag: int) -> Operation:
        assert self.gloo is not None, "a first operation between some ranks connects no others"
        return self._start(lambda: self.gloo.send(tensors, peer, tag))

    def recv(self, tensors: Any, peer: int, tag: int) -> Operation:
        assert self.gloo is not None, "a first operation between some ranks connects no others"
        return self._start(lambda: self.gloo.recv(tensors, peer, tag))

    def _start(self, start: Any) -> Operation:
        if self.aborted.is_set():
            raise RuntimeError("NCCL communicator was aborted")
        if self.gloo is None:
            self.connecting.set()
            self.gloo = ProcessGroupGloo(self.store, self.rank(), self.size(), HOURS)
        try:
            real = start()
        except RuntimeError:  # gloo notices that the peer is dead; NCCL does not
            real = Unnoticed()
        self.operations.append(Operation(real))
        return self.operations[-1]

    def abort(self) -> None:
        self.aborted.set()

    def shutdown(self) -> None:
        if not self.aborted.is_set() and not all(one.is_completed() for one in self.operations):
            raise WouldHang("shutdown waits for an operation whose peer is dead")

    def getBackendName(self) -> str:
        return NAME

    def _set_group_name(self, name: str) -> None:
        self.given_name = name

    @property
    def group_name(self) -> str:
        return self.given_name


def register() -> None:
    """Register ``backend="nccl_like"`` with torch in this process."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, NcclLike, devices=["cpu"])
