"""Seconds of a weight update of a real engine, compared with a plain copy over the same medium.

    python -m benchmarks.weight_sync [--size small large] [--repeat 5] [--write]

One SGLang engine on this machine holds a random Qwen3; this process holds the same weights and
brings them over by each mover: a broadcast (gloo), memory of this machine, files. The plain copy
moves the same bytes once between two processes over the same medium and does nothing else: no
requests, no names, no loading into a model. The fixed cost of an update dominates for a small model
and hardly matters for a large one. Rounds are interleaved; the median counts. --write puts the
tables into docs/benchmarks.md.

With CUDA the weights are bfloat16 on the first GPU, and so is the engine: it takes them from the
trainer's memory (CUDA IPC) and from files. A broadcast (NCCL) needs a second GPU, which then runs
another engine.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.page import machine, make_parser, show, table
from rlpost.engines.engine import Engine
from rlpost.engines.engine_side_weights import (
    BroadcastMover,
    DiskMover,
    Mover,
    SharingMover,
    WeightUpdate,
    num_engine_ranks,
    stage_group,
)
from rlpost.trainer.weights.layouts import as_bytes
from rlpost.trainer.weights.trainer_side import Broadcast, Sharing
from rlpost.types import Bucket
from tests.ports import free_port

HEADING = "## Weight sync"
HAS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if HAS_CUDA else torch.device("cpu")
BACKEND = "nccl" if HAS_CUDA else "gloo"
DTYPE = torch.bfloat16 if HAS_CUDA else torch.float32
GROUP = "bench"
GOAL = 1.5
HEADER = (
    *("mover", "update s", "MiB/s", "plain copy s", "MiB/s"),
    f"ratio (goal: at most {GOAL})",
)


@dataclass(frozen=True)
class Size:
    """Size of a model, and of the largest bucket of its weights."""

    hidden: int
    layers: int
    bucket_mib: int


SIZES = {"small": Size(512, 8, 64), "large": Size(1024, 16, 512)}


def make_model(folder: Path, size: Size) -> dict[str, torch.Tensor]:
    """Write a random Qwen3 with the tiny model's tokenizer; return its weights on the device."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from rlpost.extensions.fetching.tiny_model import make_tokenizer

    make_tokenizer().save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=32_000,
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
        dtype=name_of(DTYPE),
    )
    model = Qwen3ForCausalLM(config).to(DTYPE)
    model.save_pretrained(folder)
    return {
        name: tensor.to(DEVICE)
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype as in a bucket."""
    return str(dtype).removeprefix("torch.")


class Trainer:
    """A trainer of one rank, with its weights in buckets; it needs no gathering."""

    def __init__(self, weights: dict[str, torch.Tensor], bucket_bytes: int) -> None:
        self.weights = weights
        parts: list[list[str]] = []
        remaining = 0
        for name, tensor in weights.items():
            if not parts or tensor.nbytes > remaining:
                parts.append([])
                remaining = bucket_bytes
            parts[-1].append(name)
            remaining -= tensor.nbytes
        self.buckets = []
        for part in parts:
            shapes = [tuple(weights[name].shape) for name in part]
            self.buckets.append(Bucket(tuple(part), tuple(shapes), (name_of(DTYPE),) * len(part)))

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.weights.values())

    def gather(self, index: int, *, on_all_stages: bool) -> dict[str, torch.Tensor]:
        return {name: self.weights[name] for name in self.buckets[index].names}

    def largest_bytes(self) -> int:
        return max(
            sum(self.weights[name].nbytes for name in bucket.names) for bucket in self.buckets
        )

    stage = 0

    def stage_of(self, index: int) -> int:
        return 0

    def __len__(self) -> int:
        return len(self.buckets)

    def flat(self, index: int) -> torch.Tensor:
        return torch.cat(
            [as_bytes(tensor) for tensor in self.gather(index, on_all_stages=True).values()]
        )

    def parts(self, index: int) -> list[torch.Tensor]:
        return list(self.gather(index, on_all_stages=True).values())


def reader(
    orders: Connection, memory: torch.Tensor, device: torch.device, port: int | None, path: str
) -> None:
    """Run the other process: read the bytes over the medium of each order, then confirm.

    Without a ``port`` nothing is broadcast.
    """
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if port is not None:
        dist.init_process_group(
            BACKEND, init_method=f"tcp://127.0.0.1:{port}", rank=1, world_size=2
        )
    buffer = torch.empty(len(memory), dtype=torch.uint8, device=device)
    from_disk = (
        buffer
        if device.type == "cpu"
        else torch.empty(len(memory), dtype=torch.uint8, pin_memory=True)
    )
    while (order := orders.recv()) is not None:
        medium, size = order
        if medium == "memory":
            buffer[:size].copy_(memory[:size])
        elif medium == "broadcast":
            dist.broadcast(buffer[:size], src=0)
        else:
            with open(path, "rb") as file:
                file.readinto(from_disk[:size].numpy())
            if from_disk is not buffer:
                buffer[:size].copy_(from_disk[:size])
        synchronise()
        orders.send(True)


def synchronise() -> None:
    """Wait for the device, whose work is asynchronous."""
    if HAS_CUDA:
        torch.cuda.synchronize()


class PlainCopy:
    """Moves tensors of bytes to another process, whose device is ``device``."""

    def __init__(
        self, flats: list[torch.Tensor], path: Path, *, device: torch.device, broadcasts: bool
    ) -> None:
        self.flats = flats
        self.path = path
        self.broadcasts = broadcasts
        torch.multiprocessing.set_sharing_strategy("file_system")
        self.memory = torch.empty(max(map(len, self.flats)), dtype=torch.uint8, device=DEVICE)
        if not HAS_CUDA:
            self.memory.share_memory_()
        self.orders, theirs = multiprocessing.Pipe()
        port = free_port() if broadcasts else None
        arguments = (theirs, self.memory, device, port, str(path))
        self.process = multiprocessing.get_context("spawn").Process(
            target=reader, args=arguments, daemon=True
        )
        self.process.start()
        if broadcasts:
            dist.init_process_group(
                BACKEND, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=2
            )

    def move(self, medium: str) -> None:
        for flat in self.flats:
            if medium == "memory":
                self.memory[: len(flat)].copy_(flat)
                synchronise()  # the other process's stream does not wait for this one
            elif medium == "disk":
                self.path.unlink(missing_ok=True)
                with self.path.open("wb") as file:
                    file.write(memoryview(flat.cpu().numpy()))
            self.orders.send((medium, len(flat)))
            if medium == "broadcast":
                dist.broadcast(flat, src=0)
            self.orders.recv()

    def close(self) -> None:
        self.orders.send(None)
        self.process.join()
        if self.broadcasts:
            dist.destroy_process_group()


async def broadcast_mover(trainer: Trainer, whole: WeightUpdate) -> Mover:
    """Return a mover whose process group has been joined by the engine."""
    sender = Broadcast(
        trainer, gathers=True, is_source=True, backend=BACKEND, timeout_s=120, secret=GROUP
    )

    async def send(index: int) -> None:
        await asyncio.to_thread(sender.send, index)

    mover, port = BroadcastMover(trainer.buckets, send, group_name=GROUP), free_port()
    name, ranks = stage_group(GROUP, 0), num_engine_ranks(whole.receivers)
    joining = asyncio.to_thread(sender.connect, "127.0.0.1", port, ranks, name, 120.0)
    await asyncio.gather(
        joining, mover.connect(whole.receivers, [("127.0.0.1", port)], backend=BACKEND)
    )
    return mover


def other_movers(trainer: Trainer, model: Path, folder: Path) -> dict[str, Mover]:
    """Return the movers through memory and through files."""
    from safetensors.torch import save_file

    sharing = Sharing(trainer)

    async def share(index: int) -> list[str]:
        return [await asyncio.to_thread(sharing.share, index)]

    async def write(version: int) -> str:
        # Remove the previous version: overwriting files is slower.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for file in model.glob("*.json"):
            (folder / file.name).write_bytes(file.read_bytes())
        await asyncio.to_thread(
            save_file, trainer.weights, folder / "model.safetensors", {"format": "pt"}
        )
        return str(folder)

    return {
        "memory": SharingMover(trainer.buckets, share, ranks_of=((0,),)),
        "disk": DiskMover(write),
    }


class Seconds(NamedTuple):
    """Seconds of each round over one medium."""

    updates: list[float]
    plain_copies: list[float]


async def measure(
    trainer: Trainer, whole: WeightUpdate, movers: dict[str, Mover], copy: PlainCopy, repeat: int
) -> dict[str, Seconds]:
    """Return the seconds of each round, by medium."""
    seconds = {medium: Seconds([], []) for medium in movers}
    version = 0
    for round_number in range(repeat + 1):
        for medium, mover in movers.items():
            version += 1
            started = time.perf_counter()
            await whole.update(version, mover)
            updated = time.perf_counter()
            await asyncio.to_thread(copy.move, medium)
            copied = time.perf_counter()
            if round_number:  # the first makes buffers and warms caches
                seconds[medium].updates.append(updated - started)
                seconds[medium].plain_copies.append(copied - updated)
    return seconds


@dataclass(frozen=True)
class Place:
    """An engine, by the number of its GPU, and the media by which it is reached there."""

    media: tuple[str, ...]
    gpu: int = 0

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.gpu) if HAS_CUDA else torch.device("cpu")

    @property
    def settings(self) -> dict[str, object]:
        """Of the engine."""
        settings: dict[str, object] = {"max_total_tokens": 2048, "max_running_requests": 8}
        if HAS_CUDA:
            settings |= {"mem_fraction_static": 0.4, "base_gpu_id": self.gpu}
        return settings


def places(num_gpus: int) -> list[Place]:
    """Return where engines run, one after another. NCCL refuses two ranks on one GPU."""
    if not num_gpus:
        return [Place(("broadcast", "memory", "disk"))]
    return [Place(("memory", "disk")), *([Place(("broadcast",), gpu=1)] if num_gpus > 1 else [])]


async def run(size: Size, folder: Path, *, repeat: int) -> list[str]:
    """Start an engine at each place, measure, and make the table."""
    trainer = Trainer(make_model(folder / "model", size), size.bucket_mib * 2**20)
    seconds: dict[str, Seconds] = {}
    for place_ in places(torch.cuda.device_count()):
        seconds |= await measure_at(place_, trainer, folder, repeat=repeat)
    mib = trainer.num_bytes / 2**20
    rows = []
    for medium, (updates, plains) in seconds.items():
        update, plain = statistics.median(updates), statistics.median(plains)
        cells = [f"{update:.3f}", f"{mib / update:.0f}", f"{plain:.3f}", f"{mib / plain:.0f}"]
        rows.append([medium, *cells, f"{update / plain:.2f}"])
    return [
        f"{mib:.0f} MiB in {len(trainer.buckets)} buckets of at most {size.bucket_mib} MiB:",
        "",
        *table(HEADER, rows),
    ]


async def measure_at(
    place_: Place, trainer: Trainer, folder: Path, *, repeat: int
) -> dict[str, Seconds]:
    """``measure`` with an engine at one place."""
    model, files = folder / "model", folder / "files"
    log = folder / f"engine-{place_.gpu}.log"
    engine = Engine(model_path=str(model), api_key=GROUP, server_args=place_.settings, log_path=log)
    try:
        address = await asyncio.to_thread(engine.start, "127.0.0.1", free_port(), deadline_s=600)
        whole = WeightUpdate([address], api_key=GROUP)
        broadcasts = "broadcast" in place_.media
        flats = [trainer.flat(index) for index in range(len(trainer.buckets))]
        copy = PlainCopy(flats, folder / "plain", device=place_.device, broadcasts=broadcasts)
        movers = {"broadcast": await broadcast_mover(trainer, whole)} if broadcasts else {}
        movers |= other_movers(trainer, model, files)
        seconds = await measure(
            trainer, whole, {name: movers[name] for name in place_.media}, copy, repeat
        )
        copy.close()
        return seconds
    finally:
        engine.stop()


def main() -> int:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--size", nargs="+", choices=SIZES, default=list(SIZES), help="of the model (default: both)"
    )
    parser.add_argument("--repeat", type=int, default=5, help="rounds (default: 5)")
    options = parser.parse_args()
    # as SGLang sets it for itself: both sides of a group must agree
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    torch.set_num_threads(1)
    where, device = machine(), torch.cuda.get_device_name(DEVICE) if HAS_CUDA else "CPU"
    tables = []
    for name in options.size:
        with tempfile.TemporaryDirectory() as folder:
            tables += ["", *asyncio.run(run(SIZES[name], Path(folder), repeat=options.repeat))]
    introduction = [
        "`python -m benchmarks.weight_sync --write`: a real SGLang engine loads new weights (pause, all buckets,",
        "cache flushed, version checked, resumed), beside a plain copy of the same bytes to another process over the",
        f"same medium: a {BACKEND} broadcast, memory of this machine, a file. {device}, {name_of(DTYPE)}.",
        f"{where}. Between updates a plain copy of large files is slower than one made alone, so the ratio of",
        "disk is too favourable.",
    ]
    show(HEADING, [*introduction, *tables], write=options.write)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
