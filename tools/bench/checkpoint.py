"""What a checkpoint costs: how long training stands still for it, how long it takes in all, how long a resume takes.

    python -m tools.bench.checkpoint [--size 100M] [--rounds 3] [--folder FOLDER] [--write]

One actor rank in this process, a random Qwen3, Adam with its moments, float32; the commit protocol of a run with its
checksums and fsyncs. Rounds are interleaved: a plain write of the same bytes to as many files by as many threads, with
fsync; a save that is waited for; a save in the background, of which the blocking part is what training waits for. A
resume finds the newest checkpoint, checksums included, and loads it. --folder says on which file system.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from rlpost.actor.actor import Actor
from rlpost.actor.megatron_checkpoint import NUM_WRITER_THREADS
from rlpost.actor.settings import ActorSettings
from rlpost.checkpoint.state import RunState
from rlpost.config.groups.checkpoint import CheckpointConfig
from rlpost.orchestration.checkpoints import Checkpoints
from rlpost.types import TrainBatch, TrainSample
from tools.bench.page import show
from tools.bench.tables import machine, table

HEADING = "## Checkpoints"
SIZES = {"1M": (64, 4, 1024), "100M": (768, 11, 16_384)}  # hidden, layers, vocabulary
GOAL = 0.05
CHUNK = 16 * 1024**2

Seconds = dict[str, list[float]]


def make_model(folder: Path, size: str) -> int:
    """Write a random Qwen3; how many parameters it has."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hidden, layers, vocabulary = SIZES[size]
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return model.num_parameters()


def started(folder: Path) -> Actor:
    """An actor after one step, so that Adam has moments."""
    actor = Actor(ActorSettings(str(folder), actor_num_threads=os.cpu_count() or 1))
    actor.setup(0, 1, "127.0.0.1", 29_433)
    actor.import_weights()
    sample = TrainSample(tuple(range(3, 19)), 8, (1,) * 8, (-7.0,) * 8, 1.0)
    actor.train_step(TrainBatch(((sample,),), num_samples=1, num_tokens=8))
    return actor


def plain_write(folder: Path, num_bytes: int) -> float:
    """Seconds for as many bytes in as many files by as many threads, each flushed to disk."""
    data = memoryview(bytearray(os.urandom(CHUNK)))

    def write(number: int) -> None:
        with open(folder / f"plain-{number}", "wb", buffering=0) as file:
            left = num_bytes // NUM_WRITER_THREADS
            while left > 0:
                left -= file.write(data[: min(left, CHUNK)])
            os.fsync(file.fileno())

    begun = time.monotonic()
    with ThreadPoolExecutor(NUM_WRITER_THREADS) as pool:
        list(pool.map(write, range(NUM_WRITER_THREADS)))
    seconds = time.monotonic() - begun
    for path in folder.glob("plain-*"):
        path.unlink()
    return seconds


async def measure(actor: Actor, folder: Path, rounds: int) -> tuple[Seconds, int]:
    """Seconds of each kind in each round, and the bytes of a checkpoint."""
    seconds: Seconds = defaultdict(list)
    checkpoints = Checkpoints(CheckpointConfig(keep_last=1), folder / "saved", committed=lambda step, path: None)
    checkpoints.claim("bench")
    for number in range(1, rounds + 1):
        in_background = False

        async def write(into: Path) -> None:
            actor.save(into, number, in_background=in_background)  # noqa: B023

        await checkpoints.commit(RunState(step=2 * number), write)
        assert checkpoints.last is not None
        seconds["waited for"].append(checkpoints.last.total_s)
        in_background = True
        await checkpoints.start(RunState(step=2 * number + 1), write, lambda: asyncio.to_thread(actor.finish_save))
        assert await checkpoints.settle(), "the save in the background failed"
        seconds["background, blocking"].append(checkpoints.last.blocking_s)
        seconds["background, in all"].append(checkpoints.last.total_s)
        seconds["plain write"].append(plain_write(folder, checkpoints.last.num_bytes))
        begun = time.monotonic()
        path, _ = checkpoints.newest()
        seconds["resume, finding"].append(time.monotonic() - begun)
        assert path is not None
        actor.load(path)
        seconds["resume, in all"].append(time.monotonic() - begun)
    return seconds, checkpoints.last.num_bytes


def rows(seconds: Seconds) -> list[list[str]]:
    """A row a kind: median, least, and the ratios to a plain write and to the save that is waited for."""
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="100M")
    parser.add_argument("--rounds", type=int, default=3, help="of each kind (default: 3)")
    parser.add_argument("--folder", type=Path, help="on the file system in question (default: a temporary one)")
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    options = parser.parse_args()
    logging.disable(logging.INFO)
    where = machine()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        num_parameters = make_model(folder / "model", options.size)
        actor = started(folder / "model")
        seconds, num_bytes = asyncio.run(measure(actor, folder, options.rounds))
        found = rows(seconds)
        actor.close()
    share = statistics.median(seconds["background, blocking"]) / statistics.median(seconds["waited for"])
    lines = [
        f"One rank, {num_parameters / 1e6:.0f} million parameters in float32 with Adam's moments, "
        f"{num_bytes / 1e9:.2f} GB a checkpoint,",
        f"{options.rounds} interleaved rounds. Training stands still for {100 * share:.1f} % of a save that is waited",
        f"for when it is in the background (goal: {100 * GOAL:.0f} %). torch {torch.__version__}, {where}:",
        "",
        "```bash",
        "python -m tools.bench.checkpoint --write",
        "```",
        "",
        *table(["", "median s", "least s", "time, plain write = 1", "of a save that is waited for"], found),
    ]
    show(HEADING, lines, write=options.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
