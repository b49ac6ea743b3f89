"""Cost of the journal: lag of the event loop, bytes of a token, and the recovery of conversations.

    python -m benchmarks.journal [--answers 1000] [--length 4096] [--seconds 5]
        [--conversations 10000] [--megabytes 200] [--write]

Answers are finished evenly over the seconds, as a driver's event loop sees them: each is recorded,
and every eighth ends a group. "Groups alone" is the journal without single answers. The recovery is
that of a new process: it reads the segments, copies what is unfinished to a new one, and reads the
turns of every conversation as its answers begin.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.driver import Lags, LagSampler, lag_row
from benchmarks.page import machine, make_parser, show, table
from common.garbage import collect_between_steps_only
from rlpost.columns import FloatColumn, IntColumn
from rlpost.durable.journal import Journal
from rlpost.durable.journal_format import ANSWER, Part
from rlpost.engines.answer import Answer
from rlpost.rollout.answer_log import turn_part
from rlpost.types import Prompt, Sample, SampleGroup, ScoredSample

HEADING = "## Journal"
SIBLINGS, PROMPT_LENGTH, TURNS = 8, 64, 5
BYTES_PER_TOKEN = 8  # id and log-prob
RNG = np.random.default_rng(1)


@dataclass(frozen=True)
class Written:
    """The lag of the loop while answers are recorded, and the bytes of a token in the files."""

    lags: Lags
    bytes_per_token: float


def columns(length: int) -> tuple[IntColumn, FloatColumn]:
    """Return token ids and log-probs of an answer."""
    ids = RNG.integers(0, 150_000, length, dtype=np.int32)
    return IntColumn.view(ids), FloatColumn.view(-RNG.random(length, dtype=np.float32))


def prompt_of(prompt_id: int) -> Prompt:
    """Return a prompt."""
    return Prompt(prompt_id, f"prompt {prompt_id}", tuple(range(PROMPT_LENGTH)))


def groups(count: int, length: int) -> Iterator[tuple[Prompt, SampleGroup]]:
    """Yield finished groups."""
    for prompt_id in range(count):
        prompt = prompt_of(prompt_id)
        samples = []
        for index in range(SIBLINGS):
            ids, logprobs = columns(length)
            sample = Sample(prompt_id, index, prompt.token_ids, ids, logprobs, "text", "stop", 3)
            samples.append(ScoredSample(sample, 1.0))
        yield prompt, SampleGroup(prompt_id, tuple(samples))


async def write(folder: Path, options: argparse.Namespace, *, single_answers: bool) -> Written:
    """Record answers evenly over the seconds, and a group after every SIBLINGS of them."""
    num_groups = round(options.answers * options.seconds / SIBLINGS)
    finished = list(groups(num_groups, options.length))
    journal = Journal.resume(folder, 0, step=0, settings="")
    pause_s = 1.0 / options.answers

    async def record() -> None:
        began, count = time.monotonic(), 0
        for prompt, group in finished:
            for scored in group.samples:
                if single_answers:
                    part = Part(
                        prompt.prompt_id, scored.sample.index, ANSWER, samples=(scored.sample,)
                    )
                    journal.add_part(part, prompt)
                count += 1
                await asyncio.sleep(max(0.0, began + count * pause_s - time.monotonic()))
            journal.append_group(group, wanted=True, prompt=prompt)
        await journal.durable()

    sampler = LagSampler()
    await sampler.during(record())
    journal.close()
    num_bytes = sum(path.stat().st_size for path in folder.glob("*.log"))
    return Written(sampler.lags(), num_bytes / (num_groups * SIBLINGS * options.length))


def write_conversations(folder: Path, options: argparse.Namespace) -> None:
    """Record TURNS turns of each conversation, none of which is finished."""
    length = round(options.megabytes * 1e6 / options.conversations / TURNS / BYTES_PER_TOKEN)
    journal = Journal.resume(folder, 0, step=0, settings="")
    for number in range(options.conversations):
        prompt_id, index = divmod(number, SIBLINGS)
        for turn in range(TURNS):
            ids, logprobs = columns(length)
            answer = Answer(ids, logprobs, "text", {"type": "stop"}, ((3, length),), {})
            part = turn_part(prompt_id, index, turn, f"{number} {turn}", answer)
            journal.add_part(part, prompt_of(prompt_id))
    journal.close()


async def recover(folder: Path, options: argparse.Namespace) -> tuple[float, float]:
    """Return the seconds to resume the journal, and those to read all conversations."""
    began = time.monotonic()
    journal = await Journal.open(folder, lambda: Journal.resume(folder, 0, step=0, settings=""))
    await journal.durable()
    resumed = time.monotonic()
    num_prompts = -(-options.conversations // SIBLINGS)
    await asyncio.gather(*(journal.parts_of(prompt_id) for prompt_id in range(num_prompts)))
    read = time.monotonic()
    assert journal.kept().turns == TURNS * options.conversations, "all turns are kept"
    journal.close()
    return resumed - began, read - resumed


def main() -> int:
    """Measure; return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--answers", type=int, default=1000, help="answers a second")
    parser.add_argument("--length", type=int, default=4096, help="tokens of an answer")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long answers are recorded")
    parser.add_argument("--conversations", type=int, default=10_000)
    parser.add_argument("--megabytes", type=float, default=200.0, help="of all their turns")
    options = parser.parse_args()
    where = machine()
    collect_between_steps_only()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        alone = asyncio.run(write(folder / "alone", options, single_answers=False))
        single = asyncio.run(write(folder / "single", options, single_answers=True))
        write_conversations(folder / "conversations", options)
        resume_s, read_s = asyncio.run(recover(folder / "conversations", options))
    lines = [
        f"`python -m benchmarks.journal --write`: {options.answers:,} answers of {options.length:,} tokens a",
        f"second in groups of {SIBLINGS}. {where}. Lag of the event loop in ms, bytes of a token:",
        "",
        *table(
            ["", "p50", "p99.9", "most", "own p99.9", "own most", "bytes a token"],
            [
                [*lag_row(row, measurement.lags), f"{measurement.bytes_per_token:.2f}"]
                for row, measurement in (("groups alone", alone), ("single answers", single))
            ],
        ),
        "",
        f"{options.conversations:,} unfinished conversations with {TURNS} turns each, {options.megabytes:.0f} MB:",
        f"{resume_s:.1f} s to resume the journal, which copies them, and {read_s:.1f} s to read all turns.",
    ]
    show(HEADING, lines, write=options.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
