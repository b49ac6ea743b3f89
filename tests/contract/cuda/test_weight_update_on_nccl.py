"""A trainer's broadcasts to engines on a backend like NCCL: dead peers, deadlines, reconnects.

The engine is a separate process that joins as SGLang does, and exits or hangs as each test needs.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from rlpost.errors import SyncError
from rlpost.trainer.weights.trainer_side import Broadcast
from tests.contract.actor_ranks import start_context, stop
from tests.contract.cuda.nccl_like import NAME, NcclLike, register
from tests.ports import free_port

pytestmark = pytest.mark.timeout(120)

NUM_BYTES = 3 << 20
"""Size of a bucket: more than sockets buffer, so that a broadcast completes only if the peer reads.
"""
DEADLINE_S = 6.0  # of joining too, for which an engine is ready once it has imported torch
READY_S = 60.0
FAR_S = 600.0
SOON_S = 5.0


class Buckets:
    """Three buckets, each filled with its number."""

    stage = 0

    def __init__(self) -> None:
        self.gathers: list[int] = []

    def __len__(self) -> int:
        return 3

    def stage_of(self, index: int) -> int:
        return 0

    def gather(self, index: int, *, on_all_stages: bool) -> dict[str, torch.Tensor]:
        self.gathers.append(index)
        return {"weight": torch.full((NUM_BYTES,), index, dtype=torch.uint8)}


def engine(
    port: int, name: str, num_buckets: int, then: str, results: Any, backend: str, is_ready: Any
) -> None:
    """Join, receive some buckets, put their first bytes on the queue; then leave, exit or hang."""
    register()
    is_ready.set()
    group = join(port, name, backend)
    seen = []
    for _ in range(num_buckets):
        flat = torch.empty(NUM_BYTES, dtype=torch.uint8)
        # wait() would return before the data has arrived, as on NCCL
        work = torch.distributed.broadcast(flat, group=group, group_src=0, async_op=True)
        while not work.is_completed():
            time.sleep(0.001)
        assert (flat == flat[0]).all()
        seen.append(int(flat[0]))
    results.put(seen)
    if then == "die":
        time.sleep(0.2)  # the queue's feeder thread needs time to send the result
        os._exit(9)
    if then == "hang":
        time.sleep(FAR_S)


def join(port: int, name: str, backend: str) -> Any:
    from torch.distributed.distributed_c10d import (
        PrefixStore,
        _new_process_group_helper,
        _world,
        rendezvous,
    )

    store, _, _ = next(rendezvous(f"tcp://127.0.0.1:{port}", 1, 2))
    group, _ = _new_process_group_helper(
        2,
        1,
        [],
        backend,
        PrefixStore(name, store),
        group_name=name,
        timeout=torch.distributed.default_pg_timeout,
    )
    _world.pg_group_ranks[group] = {0: 0, 1: 1}
    return group


class Engines:
    """Engine processes that end with the test."""

    def __init__(self) -> None:
        self.context = start_context()
        self.results: list[Any] = []
        self.processes: list[Any] = []

    def start(self, port: int, name: str, num_buckets: int, then: str, backend: str) -> Any:
        self.results.append(self.context.Queue())
        is_ready = self.context.Event()
        arguments = (port, name, num_buckets, then, self.results[-1], backend, is_ready)
        process = self.context.Process(target=engine, args=arguments, daemon=True)
        process.start()
        self.processes.append(process)
        assert is_ready.wait(READY_S), f"engine {name} is not ready within {READY_S:.0f} s"
        return process

    def last_result(self) -> list[int]:
        """First byte of each bucket that the engine started last has received."""
        return self.results[-1].get(timeout=30)


@pytest.fixture
def engines() -> Iterator[Engines]:
    register()
    started = Engines()
    yield started
    for process in started.processes:
        stop(process)
    NcclLike.made.clear()  # their sockets


def trainer(timeout_s: float, backend: str = NAME) -> Broadcast:
    return Broadcast(
        Buckets(),
        gathers=True,
        is_source=True,
        backend=backend,
        timeout_s=timeout_s,
        secret=None,  # the engine here joins with torch's own store, as one outside of a run
    )


def connect(
    broadcast: Broadcast, engines: Engines, name: str, num_buckets: int, then: str = "leave"
) -> Any:
    port = free_port()
    process = engines.start(port, name, num_buckets, then, broadcast.backend)
    broadcast.connect("127.0.0.1", port, 1, name, READY_S)
    return process


def send_all(broadcast: Broadcast, indices: Sequence[int] = range(3)) -> None:
    for index in indices:
        broadcast.send(index)


def assert_a_second_group_takes_everything(
    broadcast: Broadcast, engines: Engines, name: str
) -> None:
    """Do what a repair does: leave, connect to restarted engines, send all buckets."""
    broadcast.disconnect()
    broadcast.timeout = torch.distributed.default_pg_timeout
    connect(broadcast, engines, name, 3)
    send_all(broadcast)
    assert engines.last_result() == [0, 1, 2]
    broadcast.disconnect()


def test_every_bucket_arrives_whole_although_collectives_return_immediately(engines):
    """The next bucket overwrites the memory of the last one only after the device has read it."""
    broadcast = trainer(FAR_S)
    connect(broadcast, engines, "good", 3)
    send_all(broadcast)
    assert engines.last_result() == [0, 1, 2]
    broadcast.disconnect()
    assert NcclLike.made[-1].aborted.is_set()


def test_a_dead_engine_fails_the_bucket_at_the_deadline_and_the_trainer_reconnects(engines):
    broadcast = trainer(DEADLINE_S)
    connect(broadcast, engines, "dead", 1, "die")
    broadcast.send(0)
    engines.processes[-1].join()
    started = time.monotonic()
    with pytest.raises(
        SyncError,
        match=rf"bucket 2 of 3 \({NUM_BYTES} bytes\).*not completed within {DEADLINE_S:.0f} s",
    ):
        broadcast.send(1)
    assert DEADLINE_S <= time.monotonic() - started < DEADLINE_S + SOON_S
    assert NcclLike.made[-1].aborted.is_set(), "else the kernel spins on the GPU for good"
    assert_a_second_group_takes_everything(broadcast, engines, "dead-again")


def test_a_failed_bucket_leaves_no_rank_of_the_trainer_alone_in_a_collective(engines):
    """After a failure, the source still takes part in gathering the next bucket.

    The other ranks of its stage do not know of the failure, and gathering is a collective.
    """
    broadcast = trainer(DEADLINE_S)
    connect(broadcast, engines, "alone", 0, "hang")
    with pytest.raises(SyncError):
        broadcast.send(0)
    assert broadcast.buckets.gathers == [0, 1]
    broadcast.disconnect()


@pytest.mark.parametrize("backend", [NAME, "gloo"])
def test_the_driver_ends_a_broadcast_long_before_its_deadline(engines, backend):
    """A second thread aborts while the first one waits, as with ``WorkerGroup.call_aside``."""
    broadcast = trainer(FAR_S, backend)
    connect(broadcast, engines, f"cancelled-{backend}", 1, "hang")
    broadcast.send(0)
    aside = threading.Timer(0.5, broadcast.abort)
    aside.start()
    started, cpu_before = time.monotonic(), time.thread_time()
    with pytest.raises(SyncError, match=r"bucket 2 of 3 .*an engine failed"):
        broadcast.send(1)
    waited_s, computed_s = time.monotonic() - started, time.thread_time() - cpu_before
    assert 0.4 < waited_s < SOON_S
    assert computed_s < 0.5 * waited_s, "a caller that waits takes no core"
    assert backend == "gloo" or NcclLike.made[-1].aborted.is_set()
    assert_a_second_group_takes_everything(broadcast, engines, f"cancelled-{backend}-again")


def test_an_engine_that_never_joins_the_first_broadcast_does_not_hold_the_trainer(engines):
    """NCCL creates its communicator in the first collective, which blocks its caller until then."""
    broadcast = trainer(DEADLINE_S)
    connect(broadcast, engines, "first", 0, "hang")
    with pytest.raises(SyncError, match="bucket 1 of 3"):
        broadcast.send(0)
    assert NcclLike.made[-1].connecting.is_set() and NcclLike.made[-1].gloo is None
    assert_a_second_group_takes_everything(broadcast, engines, "first-again")


def test_an_aborted_group_sends_nothing_more(engines):
    broadcast = trainer(FAR_S)
    connect(broadcast, engines, "given-up", 1, "hang")
    broadcast.abort()
    with pytest.raises(SyncError, match="bucket 1 of 3"):
        broadcast.send(0)
    with pytest.raises(SyncError, match=r"bucket 2 of 3 .*connect again"):
        broadcast.send(1)
    broadcast.disconnect()


def test_the_watchdog_of_torch_is_disabled_for_this_group_alone(engines, monkeypatch):
    """The watchdog would end the trainer's process when an engine dies.

    torch reads the variable when a group is made.
    """
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    seen = []
    made_before = NcclLike.__init__
    monkeypatch.setattr(
        NcclLike,
        "__init__",
        lambda *given: (
            seen.append(os.environ.get("TORCH_NCCL_BLOCKING_WAIT")),
            made_before(*given),
        )[1],
    )
    broadcast = trainer(FAR_S)
    connect(broadcast, engines, "watchdog", 0)
    assert seen == ["1"] and "TORCH_NCCL_BLOCKING_WAIT" not in os.environ
    broadcast.disconnect()
