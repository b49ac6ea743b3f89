"""A training step on the answers of one prompt, with and without --share-prefix.

    python -m benchmarks.shared_prefix [--steps 3] [--write]

A small random Qwen3, one prompt and its answers, log-probs of the old policy, forward, backward and
optimizer. Each way runs in its own process, with all cores, so that its peak of memory is its own;
both end with the same gradient norm. "possible" is the ratio of tokens, prompt + answers of n
samples over one prompt and n answers, which PrefixGrouper (verl) states as the limit; attention
limits it further, because each answer attends to the whole prompt. --write puts the table into
docs/benchmarks.md, section "Beginnings that samples share".
"""

from __future__ import annotations

import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.page import machine, make_parser, show, table
from benchmarks.train_step import VOCAB_SIZE, make_model, one_rank, started_actor
from rlpost.types import TrainBatch, TrainSample

HEADING = "## Beginnings that samples share"
SIZE = "small"
CASES = ((256, 8, 256), (2048, 8, 512), (4096, 16, 1024))  # prompt, answers, tokens of an answer


@dataclass(frozen=True)
class Measured:
    """Seconds of the steps, and the peak of a process before and during them."""

    seconds: Sequence[float]
    before_gb: float
    peak_gb: float
    norm: float


def group(prompt: int, answers: int, length: int) -> tuple[TrainSample, ...]:
    """Return one prompt's answers of equal length."""
    source = random.Random(1)
    ids = [source.randrange(3, VOCAB_SIZE) for _ in range(prompt)]
    return tuple(
        TrainSample(
            token_ids=[*ids, *(source.randrange(3, VOCAB_SIZE) for _ in range(length))],
            prompt_length=prompt,
            loss_mask=[1] * length,
            rollout_logprobs=[-7.0] * length,
            advantage=source.uniform(-1, 1),
        )
        for _ in range(answers)
    )


def peak_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def run_steps(folder: Path, case: tuple[int, int, int], *, shares: bool, count: int) -> Measured:
    """Run ``count`` steps after one that warms up."""
    samples = group(*case)
    batch = TrainBatch((samples,), num_samples=len(samples), num_tokens=len(samples) * case[2])
    torch.set_num_threads(os.cpu_count() or 1)
    settings = one_rank(
        folder, bf16=False, share_prefix=shares, actor_num_threads=os.cpu_count(), lr=1e-6
    )
    actor = started_actor(settings, port=29_437)
    before, seconds, norm = peak_gb(), [], 0.0
    for _ in range(count + 1):
        started = time.perf_counter()
        result = actor.train_step(batch, actor.compute_logprobs(batch))
        seconds.append(time.perf_counter() - started)
        norm = norm or result.metrics["train/grad_norm"]
    actor.close()
    return Measured(seconds[1:], before, peak_gb(), norm)


def in_own_process(
    folder: Path, case: tuple[int, int, int], *, shares: bool, count: int
) -> Measured:
    """Run the steps in a process of their own."""
    words = ["--child", str(folder), json.dumps(case), str(int(shares)), str(count)]
    command = [sys.executable, "-m", "benchmarks.shared_prefix", *words]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return Measured(**json.loads(output.splitlines()[-1]))


def main() -> int:
    """Measure and print."""
    if sys.argv[1:2] == ["--child"]:
        folder, case, shares, count = sys.argv[2:]
        chosen = tuple(json.loads(case))
        measurement = run_steps(Path(folder), chosen, shares=bool(int(shares)), count=int(count))
        print(json.dumps(asdict(measurement)))
        return 0
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=3, help="measured steps (default: 3)")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        num_parameters = make_model(Path(name), SIZE)
        for case in CASES:
            separate, shared = (
                in_own_process(Path(name), case, shares=shares, count=options.steps)
                for shares in (False, True)
            )
            assert abs(shared.norm / separate.norm - 1) < 1e-3, "not the same work"
            rows.append(row(case, separate, shared))
    header = ["prompt, answers, length", "answer tokens/s separate", "shared", "faster"]
    header += ["possible", "of possible", "memory of a step, separate", "shared"]
    lines = [
        f"One random Qwen3 of {num_parameters / 1e6:.1f} million parameters, float32, median of {options.steps} steps",
        f"of log-probs, forward, backward and AdamW; {os.cpu_count()} threads, torch {torch.__version__}; {machine()}:",
        "",
        "```bash",
        "python -m benchmarks.shared_prefix --write",
        "```",
        "",
        *table(header, rows),
    ]
    show(HEADING, lines, write=options.write)
    return 0


def row(case: tuple[int, int, int], separate: Measured, shared: Measured) -> list[str]:
    """Return the cells of a case."""
    prompt, answers, length = case
    possible = answers * (prompt + length) / (prompt + answers * length)
    before, after = (statistics.median(each.seconds) for each in (separate, shared))
    return [
        f"{prompt}, {answers}, {length}",
        f"{answers * length / before:.0f}",
        f"{answers * length / after:.0f}",
        f"{before / after:.2f} x",
        f"{possible:.2f} x",
        f"{before / after / possible:.2f}",
        *(f"{each.peak_gb - each.before_gb:.2f} GB" for each in (separate, shared)),
    ]


if __name__ == "__main__":
    sys.exit(main())
