"""Slices on a backend like NCCL: a trainer rank with dead peers and reconnects, and an engine rank.

Each function of torch that both sides call is reached here with the semantics of NCCL; with a CUDA
device the same calls run on its streams.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from common.torch_store import join_ranks, open_store, replace_rendezvous
from rlpost.config.plan.shard_roles import RankPlan
from rlpost.engines.shards import loader, messages
from rlpost.errors import SyncError
from rlpost.models.regions import Box, Boxes
from rlpost.trainer.weights.engine_group import TrainerRank
from rlpost.trainer.weights.shard_transport import ShardTransport
from tests.contract.actor_ranks import start_context, stop
from tests.contract.cuda.nccl_like import NAME, NcclLike, Operation, register
from tests.contract.cuda.test_weight_update_on_nccl import join
from tests.ports import free_port

pytestmark = pytest.mark.timeout(600)

NUM_BYTES = 3 << 20
"""Of a message: more than sockets buffer, so that a send completes only if the peer reads."""
NUM_BUCKETS = 3
DEADLINE_S = 6.0
SOON_S = 5.0
FAR_S = 600.0
JOIN_S = 60.0
SECRET = "of the run"


class Sources:
    """A tensor for each bucket, filled with its number."""

    gathered: frozenset[str] = frozenset()
    units: tuple[Any, ...] = ()
    regions: tuple[Any, ...] = ()

    class inventory:
        device = torch.device("cpu")

    def __init__(self) -> None:
        self.prepared: list[tuple[str, ...]] = []

    def prepare(self, names: tuple[str, ...]) -> None:
        self.prepared.append(names)

    def release(self) -> None:
        pass

    def read(self, box: Box) -> torch.Tensor:
        return torch.full(box.size, int(box.tensor), dtype=torch.uint8)


def plan() -> RankPlan:
    boxes = [Box(str(number), (0,), (NUM_BYTES,)) for number in range(NUM_BUCKETS)]
    return RankPlan(
        outgoing=tuple(((0, Boxes.of([box])),) for box in boxes),
        incoming=((),) * NUM_BUCKETS,
        prepared=tuple((box.tensor,) for box in boxes),
        element_bytes={box.tensor: 1 for box in boxes},
    )


def engine(port: int, name: str, num_buckets: int, then: str, results: Any, ready: Any) -> None:
    """Join, receive some buckets, put their first bytes; then leave, exit or hang."""
    register()
    ready.set()
    group = join(port, name, NAME)
    dist.all_reduce(torch.zeros(1), group=group)
    seen = []
    for _ in range(num_buckets):
        flat = torch.empty(NUM_BYTES, dtype=torch.uint8)
        (work,) = dist.batch_isend_irecv([dist.P2POp(dist.irecv, flat, group=group, group_peer=0)])
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


class Engines:
    """Engine processes that end with the test."""

    def __init__(self) -> None:
        self.context = start_context()
        self.processes: list[Any] = []
        self.results: Any = None

    def connect(self, one: ShardTransport, name: str, count: int, then: str = "leave") -> None:
        """Start an engine that takes ``count`` buckets, and connect to it."""
        port, ready = free_port(), self.context.Event()
        self.results = self.context.Queue()
        arguments = (port, name, count, then, self.results, ready)
        self.processes.append(self.context.Process(target=engine, args=arguments, daemon=True))
        self.processes[-1].start()
        assert ready.wait(60.0)
        one.connect("127.0.0.1", port, 1, name, JOIN_S)
        one.meet(JOIN_S)


@pytest.fixture
def engines() -> Iterator[Engines]:
    register()
    started = Engines()
    yield started
    for process in started.processes:
        stop(process)
    NcclLike.made.clear()  # their sockets


def transport(timeout_s: float) -> ShardTransport:
    one = ShardTransport(
        Sources(),
        rank=TrainerRank(0, 1),
        backend=NAME,
        timeout_s=timeout_s,
        secret=None,  # the engine here joins with torch's own store
    )
    one.use(plan())
    return one


def send(one: ShardTransport, *buckets: int) -> None:
    for index in buckets:
        one.pack(index)
        one.send(index)


def assert_a_second_group_takes_everything(
    one: ShardTransport, engines: Engines, name: str
) -> None:
    """Do what a repair does: leave, connect to a restarted engine, send all buckets."""
    one.disconnect()
    one.timeout = dist.default_pg_timeout
    engines.connect(one, name, NUM_BUCKETS)
    send(one, *range(NUM_BUCKETS))
    assert engines.results.get(timeout=30) == list(range(NUM_BUCKETS))
    one.disconnect()
    assert NcclLike.made[-1].aborted.is_set()


def test_a_dead_engine_fails_the_bucket_at_the_deadline_and_the_trainer_reconnects(engines):
    one = transport(DEADLINE_S)
    engines.connect(one, "dead", 1, "die")
    send(one, 0)
    engines.processes[-1].join()
    with pytest.raises(
        SyncError,
        match=rf"bucket 2 of 3 \({NUM_BYTES} bytes of rank 0\).*not completed within {DEADLINE_S:.0f} s",
    ):
        send(one, 1)
    assert NcclLike.made[-1].aborted.is_set(), "else the kernel spins on the GPU for good"
    assert_a_second_group_takes_everything(one, engines, "dead-again")


def test_the_driver_ends_a_send_long_before_its_deadline(engines):
    one = transport(FAR_S)
    engines.connect(one, "cancelled", 1, "hang")
    send(one, 0)
    threading.Timer(0.5, one.abort).start()
    started = time.monotonic()
    with pytest.raises(SyncError, match=r"bucket 2 of 3 .*an engine failed"):
        send(one, 1)
    assert time.monotonic() - started < SOON_S
    with pytest.raises(SyncError, match="connect again"):
        send(one, 2)
    assert_a_second_group_takes_everything(one, engines, "cancelled-again")


def test_joining_ends_at_its_deadline_or_when_an_engine_failed_and_frees_the_port():
    """Both long before the deadline of a bucket; the error names the rank that is missing."""
    register()
    one, port = transport(FAR_S), free_port()
    one.secret = SECRET
    assert_a_late_rank_of_another_group_does_not_count(one, port)
    with pytest.raises(SyncError, match=r"these of 2 ranks did not join within 0:00:01: \[1\]"):
        one.connect("127.0.0.1", port, 1, "late", 1.0)
    for name, secret in (("refused", SECRET), ("again", None), ("again-without-secret", None)):
        one.secret = secret
        threading.Timer(0.5, one.abort).start()
        started = time.monotonic()
        for _ in ("an abort while it waits", "an abort before it begins"):
            with pytest.raises(SyncError, match="an engine failed"):
                one.connect("127.0.0.1", port, 1, name, FAR_S)
        assert time.monotonic() - started < SOON_S
        one.disconnect()


def assert_a_late_rank_of_another_group_does_not_count(one: ShardTransport, port: int) -> None:
    """The address is that of all groups, one after another."""
    place = {"rank": 1, "world_size": 2}
    store = open_store("127.0.0.1", port, **place, secret=SECRET, timeout=timedelta(seconds=FAR_S))

    def join_another_group() -> None:
        with contextlib.suppress(dist.DistError):  # the store closes before the group is complete
            join_ranks(store, **place, group="before")

    late = threading.Thread(target=join_another_group, daemon=True)
    late.start()
    with pytest.raises(SyncError, match=r"did not join within 0:00:02: \[1\]"):
        one.connect("127.0.0.1", port, 1, "present", 2.0)
    late.join(FAR_S)


class OnCpu(TorchFunctionMode):
    """Reports every tensor to be on CUDA, and creates on the CPU what is created there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.is_cuda.__get__:
            return True
        if func == torch.Tensor.device.__get__:
            return torch.device("cuda")
        given = {key: on_cpu(value) for key, value in (kwargs or {}).items()}
        return func(*map(on_cpu, args), **given)


def on_cpu(value: Any) -> Any:
    is_cuda = isinstance(value, torch.device) and value.type == "cuda"
    return torch.device("cpu") if is_cuda else value


class Model(torch.nn.Module):
    """Holds the tensors of all buckets."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(NUM_BUCKETS):
            values = torch.zeros(NUM_BYTES, dtype=torch.uint8)
            self.register_parameter(f"p{number}", torch.nn.Parameter(values, requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.get_parameter(f"p{name}").data.copy_(tensor)

    def firsts(self) -> list[int]:
        """The value of each parameter, which is the same everywhere."""
        values = [self.get_parameter(f"p{number}") for number in range(NUM_BUCKETS)]
        assert all((one == one[0]).all() for one in values)
        return [int(one[0]) for one in values]


def loading_engine(port: int, name: str, folder: Path, results: Any, ready: Any) -> None:
    """Let rlpost's loader receive all buckets on a faked GPU, and one from the trainer's memory."""
    register()
    replace_rendezvous(SECRET)
    # a stream orders what follows after the message; this CPU has none
    Operation.wait = lambda self, timeout=None: self.ended.wait(FAR_S)  # type: ignore[method-assign]
    synchronised: list[bool] = []
    stream = SimpleNamespace(synchronize=lambda: synchronised.append(True))
    torch.cuda.current_stream = lambda device=None: stream  # type: ignore[assignment]
    model, rank, numbers = Model(), loader.ShardedRank(), itertools.count()
    boxes = [[(0, [Box(str(one), (0,), (NUM_BYTES,))])] for one in range(NUM_BUCKETS)]
    names = [str(one) for one in range(NUM_BUCKETS)]
    types = {one: ((NUM_BYTES,), "uint8") for one in names}
    (folder / "tensors").write_text(json.dumps(types))
    planned = [[(sender, Boxes.of(part)) for sender, part in bucket] for bucket in boxes]
    (folder / "plan").write_text(json.dumps(messages.plan_to_json(names, planned)))

    def send(do: str, data: torch.Tensor, **fields: object) -> None:
        rank.handle(model, {"do": do, "id": next(numbers), **fields}, data)

    with OnCpu():
        empty = torch.empty(0, dtype=torch.uint8)
        send("record", empty, tensors=folder / "tensors", answer=folder / "answer")
        send("plan", empty, file=folder / "plan")
        ready.set()
        place = {"host": "127.0.0.1", "port": port, "name": name, "backend": NAME}
        times = {"join_s": JOIN_S, "timeout_s": FAR_S, "folder": folder}
        send("connect", empty, rank=1, world_size=2, **place, **times)
        for bucket in range(NUM_BUCKETS):
            send("receive", empty, bucket=bucket)
    results.put((model.firsts(), len(synchronised)))
    with OnCpu():
        send("apply", torch.full((NUM_BYTES,), 7, dtype=torch.uint8), bucket=0)
        send("disconnect", empty)
    results.put((model.firsts(), len(synchronised)))


def test_an_engine_rank_receives_over_nccl_and_copies_from_memory_before_it_answers(
    tmp_path: Path,
) -> None:
    register()
    context, port = start_context(), free_port()
    results, ready = context.Queue(), context.Event()
    arguments = (port, "loaded", tmp_path, results, ready)
    process = context.Process(target=loading_engine, args=arguments, daemon=True)
    process.start()
    try:
        assert ready.wait(FAR_S)
        one = transport(FAR_S)
        one.secret = SECRET
        one.connect("127.0.0.1", port, 1, "loaded", FAR_S)
        one.meet(FAR_S)
        send(one, *range(NUM_BUCKETS))
        assert results.get(timeout=FAR_S) == ([0, 1, 2], 0)
        assert results.get(timeout=FAR_S) == ([7, 1, 2], 1)
        one.disconnect()
    finally:
        stop(process)


def test_an_unconnected_rank_sends_nothing():
    with pytest.raises(SyncError, match="call connect before send"):
        send(transport(DEADLINE_S), 0)
