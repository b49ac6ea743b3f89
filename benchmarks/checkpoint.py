"""Cost of a checkpoint: time that blocks training, total time, memory, and time of a resume.

    python -m benchmarks.checkpoint [--size 100M] [--rounds 3] [--buffer-gb 0.25] [--folder FOLDER]
    [--write]

One actor rank in this process, a random Qwen3, Adam with its moments, float32; the commit protocol
of a run with its checksums and fsyncs. Rounds are interleaved: a plain write of the same bytes to
as many files by as many threads, with fsync; a synchronous save; a background save through a bounded
buffer. "blocking" is the time for which training waits if the next optimizer step starts after the
state has been copied; "if a step comes at once" adds the wait of a step that starts immediately.
Memory is the peak of the process above its size before the first of these saves. A resume finds the
newest checkpoint, verifies its checksums and loads it. --folder selects the file system.
"""

from __future__ import annotations

import asyncio
import logging
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.page import machine, make_parser, show, table
from benchmarks.train_step import one_rank, save_random_qwen3, started_actor
from rlpost.config.groups.checkpoint import CheckpointConfig
from rlpost.driver.checkpoints import Checkpoints, Write
from rlpost.durable.state import RunState
from rlpost.trainer import device
from rlpost.trainer.actor import Actor
from rlpost.trainer.torch_dist.writer import NUM_THREADS
from rlpost.types import TrainBatch, TrainSample

HEADING = "## Checkpoints"
SIZES = {"1M": (64, 4, 1024), "100M": (768, 11, 16_384)}  # hidden, layers, vocabulary
GOAL = 0.05
CHUNK = 16 * 1024**2

Seconds = dict[str, list[float]]


def make_model(folder: Path, size: str) -> int:
    """Write a random Qwen3; return its number of parameters."""
    hidden, layers, vocabulary = SIZES[size]
    return save_random_qwen3(
        folder,
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        head_dim=64,
        max_position_embeddings=512,
    )


def started(folder: Path, *, buffer_gb: float) -> Actor:
    """Return an actor after one step, so that Adam has moments."""
    settings = one_rank(
        folder, actor_num_threads=os.cpu_count() or 1, bf16=False, save_buffer_gb=buffer_gb
    )
    actor = started_actor(settings, port=29_433)
    sample = TrainSample(tuple(range(3, 19)), 8, (1,) * 8, (-7.0,) * 8, 1.0)
    actor.train_step(TrainBatch(((sample,),), num_samples=1, num_tokens=8))
    return actor


class PeakMemory:
    """Context manager that measures ``num_bytes``: the peak of the process above its size before."""

    def __enter__(self) -> PeakMemory:
        self._before = self._peak = device.memory_in_use()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            self._peak = max(self._peak, device.memory_in_use())

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()
        self.num_bytes = self._peak - self._before


def plain_write(folder: Path, num_bytes: int) -> float:
    """Seconds to write the same bytes to as many files by as many threads, with fsync."""
    data = memoryview(bytearray(os.urandom(CHUNK)))

    def write(number: int) -> None:
        with open(folder / f"plain-{number}", "wb", buffering=0) as file:
            left = num_bytes // NUM_THREADS
            while left > 0:
                left -= file.write(data[: min(left, CHUNK)])
            os.fsync(file.fileno())

    begun = time.monotonic()
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(write, range(NUM_THREADS)))
    seconds = time.monotonic() - begun
    for path in folder.glob("plain-*"):
        path.unlink()
    return seconds


class Measured:
    """Saves and resumes of one actor, with their seconds by kind, memory, and bytes of a checkpoint."""

    def __init__(self, actor: Actor, folder: Path) -> None:
        self.seconds: Seconds = defaultdict(list)
        self.memory: dict[str, int] = {}
        self.num_bytes = 0
        self._actor = actor
        self._folder = folder
        self._step = 0
        self._checkpoints = Checkpoints(
            CheckpointConfig(keep_last=1), folder / "saved", committed=lambda *_: None
        )
        self._checkpoints.claim("bench")

    async def waited_for(self) -> None:
        """A synchronous save."""
        await self._checkpoints.commit(self._next(), self._write(in_background=False))
        assert self._checkpoints.last is not None
        self.seconds["waited for"].append(self._checkpoints.last.total_s)
        self.num_bytes = self._checkpoints.last.num_bytes

    async def in_background(self, *, step_at_once: bool) -> None:
        """A background save; with ``step_at_once`` an optimizer step follows immediately."""
        finish = lambda: asyncio.to_thread(self._actor.saves.finish)  # noqa: E731
        begun = time.monotonic()
        with PeakMemory() as peak:
            await self._checkpoints.start(self._next(), self._write(in_background=True), finish)
            if step_at_once:
                await asyncio.to_thread(self._actor.wait_copied)
                self.seconds["background, if a step comes at once"].append(time.monotonic() - begun)
            assert await self._checkpoints.wait_committed(), "the save in the background failed"
        assert self._checkpoints.last is not None
        self.memory.setdefault("background", peak.num_bytes)
        if not step_at_once:
            self.seconds["background, blocking"].append(self._checkpoints.last.blocking_s)
            self.seconds["background, in all"].append(self._checkpoints.last.total_s)

    def plain(self) -> None:
        """A plain write of the same bytes."""
        self.seconds["plain write"].append(plain_write(self._folder, self.num_bytes))

    def resume(self) -> None:
        """Find the newest checkpoint and load it."""
        begun = time.monotonic()
        path, _ = self._checkpoints.newest()
        self.seconds["resume, finding"].append(time.monotonic() - begun)
        assert path is not None
        with PeakMemory() as peak:
            self._actor.load(path)
        self.seconds["resume, in all"].append(time.monotonic() - begun)
        self.memory["resume"] = max(peak.num_bytes, self.memory.get("resume", 0))

    def _next(self) -> RunState:
        self._step += 1
        return RunState(step=self._step)

    def _write(self, *, in_background: bool) -> Write:
        async def write(into: Path) -> None:
            self._actor.save(into, self._step, in_background=in_background)

        return write


async def measure(actor: Actor, folder: Path, rounds: int) -> Measured:
    """Measure all kinds of saves in each round, one after another."""
    measured = Measured(actor, folder)
    for _ in range(rounds):
        await measured.in_background(step_at_once=False)
        await measured.in_background(step_at_once=True)
        await measured.waited_for()
        measured.plain()
        measured.resume()
    return measured


def rows(seconds: Seconds) -> list[list[str]]:
    """One row per kind: median, minimum, and the ratios to a plain write and to a synchronous
    save.
    """
    median = {kind: statistics.median(each) for kind, each in seconds.items()}
    return [
        [
            kind,
            f"{median[kind]:.2f}",
            f"{min(each):.2f}",
            f"{median[kind] / median['plain write']:.2f}",
            f"{100 * median[kind] / median['waited for']:.1f} %",
        ]
        for kind, each in seconds.items()
    ]


def main() -> int:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--size", choices=SIZES, default="100M")
    parser.add_argument("--rounds", type=int, default=3, help="of each kind (default: 3)")
    parser.add_argument(
        "--buffer-gb", type=float, default=0.25, help="the bounded buffer (default: 0.25)"
    )
    parser.add_argument(
        "--folder", type=Path, help="on the file system in question (default: a temporary one)"
    )
    options = parser.parse_args()
    logging.disable(logging.INFO)
    where = machine()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        num_parameters = make_model(folder / "model", options.size)
        actor = started(folder / "model", buffer_gb=options.buffer_gb)
        measurement = asyncio.run(measure(actor, folder, options.rounds))
        actor.close()
    median = {kind: statistics.median(each) for kind, each in measurement.seconds.items()}
    share = median["background, blocking"] / median["waited for"]
    lines = [
        f"One rank, {num_parameters / 1e6:.0f} million parameters in float32 with Adam's moments, "
        f"{measurement.num_bytes / 1e9:.2f} GB a checkpoint,",
        f"{options.rounds} interleaved rounds. A background save through a buffer of {options.buffer_gb:g} GB",
        f"held {measurement.memory['background'] / 1e9:.2f} GB more than before it, and training waited for "
        f"{100 * share:.1f} % of the",
        f"time of a synchronous save (goal: {100 * GOAL:.0f} %). A resume held",
        f"{measurement.memory['resume'] / 1e9:.2f} GB more than before it. torch {torch.__version__},",
        f"{where}:",
        "",
        "```bash",
        "python -m benchmarks.checkpoint --write",
        "```",
        "",
        *table(
            ["", "median s", "least s", "time, plain write = 1", "of a save that is waited for"],
            rows(measurement.seconds),
        ),
    ]
    show(HEADING, lines, write=options.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
