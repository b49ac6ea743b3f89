"""Weight updates from shard to shard, beside gather and broadcast, on CPUs over gloo.

    python -m benchmarks.weight_slices [--ranks 2 4 8] [--engine-ranks 2 4] [--repeat 3] [--write]

The trainer's ranks hold tensor-parallel shards of one model, in as many replicas as are left; the
ranks of one engine hold the shards of another size. Both ways move the same weights between the
same processes: the one gathers and broadcasts every tensor to every engine rank, the other sends
each engine rank what it holds. No rank loads anything into a model. Bytes are counted on each rank;
memory is the largest sum of the buffers of one rank. --write puts the table into docs/benchmarks.md.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.queues import Queue
from types import SimpleNamespace

import torch
import torch.distributed as dist

from benchmarks.page import machine, make_parser, show, table
from rlpost.config.plan.shard_plan import SentTensor, ShardPlan, Unit, plan_shards
from rlpost.config.plan.shard_roles import rank_plans, receiver_plans
from rlpost.models.layout_rows import Shard, shard_regions
from rlpost.models.names import Dimensions
from rlpost.models.regions import Box, Region, contiguous, grouped, whole_box
from rlpost.trainer.weights.engine_group import EngineGroup, TrainerRank
from rlpost.trainer.weights.shard_transport import ShardTransport
from tests.ports import free_port

HEADING = "## Weight updates in slices"
HIDDEN, FFN, HEADS, HEAD_DIM, LAYERS, VOCAB = 512, 2048, 8, 64, 8, 16_000
TENSOR_PARALLEL = 2
"""Of the trainer; the other ranks are replicas."""
BUCKET_BYTES = 32 * 2**20
DIMS = Dimensions(num_query_groups=HEADS, head_dim=HEAD_DIM, vocab_size=VOCAB)
SECRET, TIMEOUT_S = "benchmark", 600.0
SLICES, GATHERED = "slices", "gathered"
HEADER = (
    "trainer ranks", "engine ranks", "way", "MiB sent, busiest", "over ideal", "MiB received, busiest",
    "MiB of buffers, trainer", "engine", "s",
)  # fmt: skip


@dataclass(frozen=True)
class Weight:
    """A weight of the model: its Hugging Face tensors, and how the trainer shards it."""

    name: str
    tensors: tuple[SentTensor, ...]
    layout: str
    shape: tuple[int, ...]
    dim: int | None


def weights() -> list[Weight]:
    """The weights of a dense model with fused qkv and gate/up."""
    made = [weight("embed", "vocabulary", {"embed": (VOCAB, HIDDEN)}, 0)]
    for layer in range(LAYERS):
        heads = (HEADS * HEAD_DIM, HIDDEN)
        names = {f"{layer}.{part}": heads for part in "qkv"}
        made.append(weight(f"{layer}.qkv", "qkv", names, 0))
        made.append(weight(f"{layer}.o", "plain", {f"{layer}.o": (HIDDEN, heads[0])}, 1))
        gated = {f"{layer}.gate": (FFN, HIDDEN), f"{layer}.up": (FFN, HIDDEN)}
        made.append(weight(f"{layer}.fc1", "gated", gated, 0))
        made.append(weight(f"{layer}.down", "plain", {f"{layer}.down": (HIDDEN, FFN)}, 1))
        made.append(weight(f"{layer}.norm", "plain", {f"{layer}.norm": (HIDDEN,)}, None))
    return made


def weight(name: str, layout: str, shapes: dict[str, tuple[int, ...]], dim: int | None) -> Weight:
    """One weight; its Megatron tensor has the rows of all its tensors."""
    tensors = tuple(SentTensor(each, shape, "float32") for each, shape in shapes.items())
    rows = sum(one.shape[0] for one in tensors)
    return Weight(name, tensors, layout, (rows, *tensors[0].shape[1:]), dim)


MODEL = weights()
UNITS = [Unit(0, one.tensors) for one in MODEL]
TOTAL = sum(tensor.num_bytes for unit in UNITS for tensor in unit.tensors)


class Shards:
    """The shards of a trainer rank, with the interface of ``ShardSources``."""

    gathered: frozenset[str] = frozenset()
    inventory = SimpleNamespace(device=torch.device("cpu"))
    units = UNITS

    def __init__(self, rank: int) -> None:
        shard = rank % TENSOR_PARALLEL
        self.flat: dict[str, torch.Tensor] = {}
        self.regions: list[Region] = []
        self.by_tensor: dict[str, list[Region]] = {}
        for one in MODEL:
            shape = list(one.shape)
            if one.dim is not None:
                shape[one.dim] //= TENSOR_PARALLEL
            self.flat[one.name] = torch.randn(torch.Size(shape).numel())
            names = tuple(tensor.name for tensor in one.tensors)
            about = Shard(
                one.name, tuple(shape), one.layout, names, one.dim, shard, TENSOR_PARALLEL
            )
            self.regions += shard_regions(about, DIMS)
        for region in self.regions:
            self.by_tensor.setdefault(region.tensor, []).append(region)

    def prepare(self, names: Sequence[str]) -> None:
        """Nothing has to be computed."""

    def release(self) -> None:
        """Nothing was computed."""

    def read(self, box: Box) -> torch.Tensor:
        """The elements of a box."""
        for region in self.by_tensor[box.tensor]:
            if region.box.intersect(box) == box:
                at = region.narrow(box)
                return self.flat[region.parameter].as_strided(at.size, at.strides, at.offset)
        raise KeyError(box)


def needs(num_engine_ranks: int) -> list[list[Region]]:
    """What the ranks of one engine hold: rows of all matrices, columns of two of them."""
    of_ranks: list[list[Region]] = [[] for _ in range(num_engine_ranks)]
    for one in MODEL:
        for tensor in one.tensors:
            for rank in range(num_engine_ranks):
                box = whole_box(tensor.name, tensor.shape)
                if one.dim is not None:
                    shape, start = list(tensor.shape), [0] * len(tensor.shape)
                    shape[one.dim] //= num_engine_ranks
                    start[one.dim] = rank * shape[one.dim]
                    box = Box(tensor.name, tuple(start), tuple(shape))
                of_ranks[rank].append(contiguous(box, "p"))
    return of_ranks


def plan_of(num_ranks: int, num_engine_ranks: int) -> ShardPlan:
    """The plan that every process makes."""
    sources = [grouped(Shards(rank).regions) for rank in range(min(num_ranks, TENSOR_PARALLEL))]
    of_all = [sources[rank % TENSOR_PARALLEL] for rank in range(num_ranks)]
    return plan_shards(
        UNITS, of_all, list(map(grouped, needs(num_engine_ranks))), max_bytes=BUCKET_BYTES
    )


@dataclass(frozen=True)
class Case:
    """Where a process is: its rank among all, the trainer's first."""

    rank: int
    num_ranks: int
    num_engine_ranks: int
    ports: tuple[int, int]
    repeat: int

    @property
    def is_trainer(self) -> bool:
        """Whether it is a rank of the trainer."""
        return self.rank < self.num_ranks

    def group(self, name: str, port: int, place: TrainerRank) -> EngineGroup:
        """A group with all engine ranks."""
        return EngineGroup.form(
            ("127.0.0.1", port),
            name=name,
            num_engine_ranks=self.num_engine_ranks,
            backend="gloo",
            timeout=timedelta(seconds=TIMEOUT_S),
            join=timedelta(seconds=TIMEOUT_S),
            secret=SECRET,
            cancelled=threading.Event(),
            trainer=place,
        )


CPU = torch.device("cpu")


def run(case: Case, results: Queue) -> None:
    """Move all weights both ways, several times; put the seconds and the largest buffers."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    everyone = case.group("all", case.ports[0], TrainerRank(case.rank, case.num_ranks))
    everyone.meet(CPU, within=timedelta(seconds=TIMEOUT_S))
    ways = {SLICES: Slices(case, everyone), GATHERED: Gathered(case, everyone)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(case.repeat + 1):
        for name, way in ways.items():
            everyone.meet(CPU, within=timedelta(seconds=TIMEOUT_S))
            started = time.perf_counter()
            way.move()
            everyone.meet(CPU, within=timedelta(seconds=TIMEOUT_S))
            if number:  # the first makes buffers and connections
                seconds[name].append(time.perf_counter() - started)
    results.put((case.rank, seconds, {name: way.buffer_bytes for name, way in ways.items()}))
    everyone.leave()


def exchange(operations: list[dist.P2POp]) -> None:
    """Complete operations between ranks."""
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()


class Slices:
    """From shard to shard."""

    def __init__(self, case: Case, group: EngineGroup) -> None:
        self.case, self.group, self.buffer_bytes = case, group, 0
        self.plan = plan_of(case.num_ranks, case.num_engine_ranks)
        if not case.is_trainer:
            self.incoming = receiver_plans(self.plan, case.num_engine_ranks)[
                case.rank - case.num_ranks
            ]
            return
        self.transport = ShardTransport(
            Shards(case.rank),
            rank=TrainerRank(case.rank, case.num_ranks),
            backend="gloo",
            timeout_s=TIMEOUT_S,
            secret=SECRET,
        )
        self.transport.use(rank_plans(self.plan, [frozenset()] * case.num_ranks)[case.rank])
        self.transport.group = group

    def move(self) -> None:
        """Send or receive all buckets."""
        if self.case.is_trainer:
            for index in range(len(self.plan.buckets)):
                self.transport.pack(index)
                packed = sum(flat.numel() for flat in self.transport._packed.values())
                self.transport.send(index)
                self.buffer_bytes = max(self.buffer_bytes, packed)
            return
        for messages in self.incoming:
            flats = []
            for _, boxes in messages:
                size = sum(4 * box.num_elements for box in boxes)
                flats.append(torch.empty(size, dtype=torch.uint8))
            self.buffer_bytes = max(self.buffer_bytes, sum(map(len, flats)))
            exchange(
                [
                    dist.P2POp(dist.irecv, flat, group=self.group._group, group_peer=sender)
                    for (sender, _), flat in zip(messages, flats, strict=True)
                ]
            )


class Gathered:
    """The first rank gathers every tensor and broadcasts it to all engine ranks."""

    def __init__(self, case: Case, everyone: EngineGroup) -> None:
        self.case, self.everyone, self.buffer_bytes = case, everyone, 0
        self.shards = Shards(case.rank) if case.rank < TENSOR_PARALLEL else None
        self.group: EngineGroup | None = None
        if case.rank == 0 or not case.is_trainer:
            place = TrainerRank(max(0, case.rank - case.num_ranks + 1), 1)
            self.group = case.group("gathered", case.ports[1], place)

    def move(self) -> None:
        """Gather and broadcast, or receive, all buckets."""
        for bucket in buckets():
            full = sum(tensor.num_bytes for one in bucket for tensor in one.tensors)
            flat = torch.empty(full, dtype=torch.uint8) if self.group is not None else None
            held = 1
            if self.shards is not None:
                parts = [self.shards.flat[one.name] for one in bucket]
                mine = torch.cat(parts).view(torch.uint8)
                self._gather(mine)
                held = 2 if self.case.rank == 0 else 0
            if flat is not None:
                self.buffer_bytes = max(self.buffer_bytes, held * len(flat))
                self.group.broadcast(flat)

    def _gather(self, mine: torch.Tensor) -> None:
        """Send the first rank the shards of the other tensor-parallel ranks."""
        group = self.everyone._group
        if self.case.rank:
            exchange([dist.P2POp(dist.isend, mine, group=group, group_peer=0)])
            return
        shards = [torch.empty_like(mine) for _ in range(1, TENSOR_PARALLEL)]
        exchange(
            [
                dist.P2POp(dist.irecv, shard, group=group, group_peer=rank)
                for rank, shard in enumerate(shards, start=1)
            ]
        )


def buckets() -> list[list[Weight]]:
    """The weights in buckets of at most ``BUCKET_BYTES``."""
    made: list[list[Weight]] = []
    remaining = 0
    for one in MODEL:
        size = sum(tensor.num_bytes for tensor in one.tensors)
        if size > remaining:
            made.append([])
            remaining = BUCKET_BYTES
        made[-1].append(one)
        remaining -= size
    return made


def measure(num_ranks: int, num_engine_ranks: int, repeat: int) -> list[list[str]]:
    """The rows of one number of ranks on either side."""
    context = multiprocessing.get_context("fork")  # torch is imported once
    results, ports = context.Queue(), (free_port(), free_port())
    world = num_ranks + num_engine_ranks
    cases = [Case(rank, num_ranks, num_engine_ranks, ports, repeat) for rank in range(world)]
    processes = [context.Process(target=run, args=(case, results)) for case in cases]
    for process in processes:
        process.start()
    answers = {rank: rest for rank, *rest in (results.get(timeout=TIMEOUT_S) for _ in cases)}
    for process in processes:
        process.join()
    plan = plan_of(num_ranks, num_engine_ranks)
    # every engine rank gets all weights, and the first rank also its peers' shards
    sharded = sum(t.num_bytes for one in MODEL if one.dim is not None for t in one.tensors)
    gathered_received = sharded * (TENSOR_PARALLEL - 1) // TENSOR_PARALLEL
    sent = {SLICES: max(plan.sent.values()), GATHERED: TOTAL * num_engine_ranks}
    ideal = plan.sent.total() / num_ranks
    received = {SLICES: max(plan.received.values()), GATHERED: max(TOTAL, gathered_received)}
    rows = []
    for name in (SLICES, GATHERED):
        seconds = max(statistics.median(seconds[name]) for seconds, _ in answers.values())
        buffers = {rank: sizes[name] for rank, (_, sizes) in answers.items()}
        trainer = max(buffers[rank] for rank in range(num_ranks))
        engine = max(buffers[rank] for rank in range(num_ranks, world))
        cells = [str(num_ranks), str(num_engine_ranks), name, mib(sent[name])]
        cells += [f"{sent[name] / ideal:.2f}", mib(received[name]), mib(trainer), mib(engine)]
        rows.append([*cells, f"{seconds:.2f}"])
        print(" | ".join(rows[-1]), flush=True)
    return rows


def mib(size: float) -> str:
    """Bytes as MiB."""
    return f"{size / 2**20:.0f}"


def main() -> int:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8], help="of the trainer")
    parser.add_argument("--engine-ranks", nargs="+", type=int, default=[2, 4], help="of the engine")
    parser.add_argument("--repeat", type=int, default=3, help="rounds (default: 3)")
    options = parser.parse_args()
    torch.set_num_threads(1)  # threads do not survive a fork
    where, rows = machine(), []
    for num_ranks in options.ranks:
        for num_engine_ranks in options.engine_ranks:
            rows += measure(num_ranks, num_engine_ranks, options.repeat)
    introduction = [
        "`python -m benchmarks.weight_slices --write`: the weights of a dense model in float32",
        f"({mib(TOTAL)} MiB, buckets of {mib(BUCKET_BYTES)} MiB) go to one engine over gloo. The trainer has",
        f"{TENSOR_PARALLEL} tensor-parallel ranks, and as many replicas as its ranks allow. *slices*: each",
        "engine rank receives what it holds from the trainer ranks that hold it. *gathered*: the first rank gathers",
        "all tensors and broadcasts them to every engine rank; what it sends is counted once for each. The ideal is",
        f"what an average trainer rank sends in slices. {where}; more processes than cores, so seconds compare the",
        "two ways and predict nothing.",
    ]
    show(HEADING, [*introduction, "", *table(HEADER, rows)], write=options.write)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
