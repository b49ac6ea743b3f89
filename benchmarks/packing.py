"""Compare schedules of micro-batches with other trainers': their number, balance of the ranks, time
to compute.

    python -m benchmarks.packing [--write]

Lengths: GSM8K (question and solution, characters / 4, drawn from the training set), a long tail
(log-normal, median 1800, truncated at 32768) and two humps (four of five around 300, the others
around 6000). Peers, reimplemented from published descriptions: first fit in order of arrival, dealt
to the ranks in turn (slime); the same with the micro-batches dealt by Karmarkar-Karp (slime
--balance-data); and Karmarkar-Karp twice, over the ranks with equal numbers of samples and within
each rank into ceil(tokens / limit) micro-batches, which may pass the limit (verl). --write puts the
tables into docs/benchmarks.md, section "Packing".
"""

from __future__ import annotations

import csv
import heapq
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import TypeVar

from benchmarks.page import machine, make_parser, show, table
from rlpost.algorithm.schedule import (
    Schedule,
    break_even_length,
    first_fit,
    schedule,
    sequence_work,
)

HEADING = "## Packing"
RANKS, NUM_STEPS, NUM_SAMPLES, MANY = 8, 32, 1024, 100_000
LIMITS = {"GSM8K": 2048, "long tail": 16_384, "two humps": 16_384}
# Qwen2.5-7B
BREAK_EVEN = break_even_length(num_parameters=7_070_000_000, num_layers=28, attention_width=3584)

SLOW = "Karmarkar-Karp twice"

T = TypeVar("T")
Lengths = Sequence[int]
Scheduler = Callable[[Lengths, Sequence[float], int], Schedule]


def draw(name: str, count: int, seed: int) -> list[int]:
    """Lengths in tokens."""
    source = random.Random(seed)
    if name == "GSM8K":
        with (Path(__file__).parent / "gsm8k_lengths.csv").open() as file:
            rows = list(csv.DictReader(file))
        tokens = [int(row["tokens"]) for row in rows]
        samples = [int(row["samples"]) for row in rows]
        return source.choices(tokens, samples, k=count)
    if name == "long tail":
        return [min(32_768, max(64, int(source.lognormvariate(7.5, 1.0)))) for _ in range(count)]
    humps = ((300, 60), (6000, 600))
    return [max(1, int(source.gauss(*humps[source.random() < 0.2]))) for _ in range(count)]


def ours(lengths: Lengths, work: Sequence[float], limit: int, *, balance: bool) -> Schedule:
    """The schedule of this project."""
    return schedule(
        lengths,
        data_parallel_size=RANKS,
        max_tokens=limit,
        micro_batch_size=1,
        work=work if balance else None,
    )


def first_fit_in_turn(
    lengths: Lengths, work: Sequence[float], limit: int, *, balance: bool
) -> Schedule:
    """First fit in order, the largest halved until ranks have as many; dealt in turn or by
    Karmarkar-Karp.
    """
    bins = first_fit(lengths, range(len(lengths)), limit)
    while len(bins) % RANKS:
        bins.sort(key=lambda one: total(lengths, one))
        largest = bins.pop()
        bins += [largest[::2], largest[1::2]]
    if not balance:
        return [bins[rank::RANKS] for rank in range(RANKS)]
    loads = [total(work, one) for one in bins]
    return [chosen(bins, part) for part in karmarkar_karp(loads, RANKS, equal=True)]


def karmarkar_karp_twice(lengths: Lengths, work: Sequence[float], limit: int) -> Schedule:
    """Over the ranks, then within each."""
    ranks = karmarkar_karp(work, RANKS, equal=True)
    count = math.ceil(max(total(lengths, own) for own in ranks) / limit)
    dealt = []
    for own in ranks:
        parts = karmarkar_karp(chosen(lengths, own), count, equal=False)
        dealt.append([chosen(own, part) for part in parts])
    return dealt


def chosen(values: Sequence[T], indices: Iterable[int]) -> list[T]:
    """Return the values at these indices."""
    return [values[index] for index in indices]


def total(values: Sequence[float], indices: Iterable[int]) -> float:
    """Return the sum of the values at these indices."""
    return sum(values[index] for index in indices)


def karmarkar_karp(sizes: Sequence[float], parts: int, *, equal: bool) -> list[list[int]]:
    """The largest differencing method (Karmarkar and Karp, 1982), for several parts: partial
    partitions are merged, the two of the largest spread first, the fullest part of one with the
    emptiest of the other. With ``equal`` it starts from partitions of one item a part, so that all
    parts get as many items.
    """
    order = sorted(range(len(sizes)), key=lambda i: sizes[i])
    step = parts if equal else 1
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for number, start in enumerate(range(0, len(order), step)):
        items = [(sizes[i], [i]) for i in reversed(order[start : start + step])]
        state = items + [(0.0, []) for _ in range(parts - len(items))]
        heap.append((state[-1][0] - state[0][0], number, state))
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        (_, _, first), (_, _, second) = heapq.heappop(heap), heapq.heappop(heap)
        merged = [
            (a[0] + b[0], a[1] + b[1] if len(a[1]) < 64 else _grown(a[1], b[1]))
            for a, b in zip(first, reversed(second), strict=True)
        ]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
        number += 1
    return [items for _, items in heap[0][2]]


def _grown(items: list[int], others: list[int]) -> list[int]:
    items.extend(others)
    return items


SCHEDULERS: dict[str, Scheduler] = {
    "rlpost --balance-data": partial(ours, balance=True),
    "rlpost": partial(ours, balance=False),
    "first fit, Karmarkar-Karp over ranks": partial(first_fit_in_turn, balance=True),
    "first fit, in turn": partial(first_fit_in_turn, balance=False),
    SLOW: karmarkar_karp_twice,
}


@dataclass(frozen=True)
class Step:
    """Figures of the schedule of one step."""

    micro_batches: int
    bound: int
    imbalance: float  # work of the busiest rank over the mean
    fullest: float  # tokens of the fullest micro-batch over the limit, one sample alone not counted
    seconds: float  # of processor time; there is one thread


def run(name: str, scheduler: str, *, count: int, seed: int) -> Step:
    """Schedule one step and check that every sample is in it."""
    lengths, limit = draw(name, count, seed), LIMITS[name]
    work = [sequence_work(length, BREAK_EVEN) for length in lengths]
    started = time.process_time()
    dealt = SCHEDULERS[scheduler](lengths, work, limit)
    seconds = time.process_time() - started
    micro_batches = list(chain.from_iterable(dealt))
    assert sorted(chain.from_iterable(micro_batches)) == list(range(count))
    loads = [total(work, chain.from_iterable(rank)) for rank in dealt]
    tokens = [total(lengths, one) for one in micro_batches if len(one) > 1]
    bound = math.ceil(sum(lengths) / (limit * RANKS)) * RANKS
    imbalance = max(loads) * RANKS / sum(loads)
    return Step(len(micro_batches), bound, imbalance, max(tokens) / limit, seconds)


def measure(name: str, scheduler: str, *, count: int, num_steps: int) -> list[str]:
    """A line of the table."""
    steps = [run(name, scheduler, count=count, seed=seed) for seed in range(num_steps)]
    needed = sum(step.micro_batches for step in steps) / sum(step.bound for step in steps)
    return [
        name,
        scheduler,
        f"{needed:.3f}",
        f"{statistics.mean(step.imbalance for step in steps):.3f}",
        f"{max(step.imbalance for step in steps):.3f}",
        f"{max(step.fullest for step in steps):.2f}",
        f"{statistics.median(step.seconds for step in steps):.3f}",
    ]


def main() -> int:
    """Measure and print."""
    parser = make_parser(__doc__)
    options = parser.parse_args()
    lines = [
        *_INTRODUCTION,
        f"{machine()}:",
        "",
        "```bash",
        "python -m benchmarks.packing --write",
        "```",
    ]
    for count, num_steps in ((NUM_SAMPLES, NUM_STEPS), (MANY, 1)):
        schedulers = [name for name in SCHEDULERS if count == NUM_SAMPLES or name != SLOW]
        rows = []
        for name, scheduler in product(LIMITS, schedulers):
            rows.append(measure(name, scheduler, count=count, num_steps=num_steps))
        first = (
            f"{num_steps} steps of {count} samples"
            if num_steps > 1
            else f"a step of {count} samples"
        )
        header = [
            *(first, "schedule", "micro-batches / bound", "work max/mean", "worst"),
            *("fullest / limit", "processor s a step"),
        ]
        lines += ["", *table(header, rows)]
    show(HEADING, lines, write=options.write)
    return 0


_INTRODUCTION = (
    f"The micro-batches of a step for {RANKS} data-parallel ranks. The bound is ceil(tokens / limit) in whole rounds",
    f"of the ranks; limits: {', '.join(f'{name} {limit}' for name, limit in LIMITS.items())} tokens.",
    "Work is a sample's tokens and its attention, which costs a 7B model as much as its matrices at",
    f"{BREAK_EVEN:.0f} tokens; a step lasts as long as its busiest rank. Where less than a twentieth of the bound's",
    "room is free, even work may cost a round more; a sample longer than the limit fills more than its micro-batch,",
    "which is why less than the bound is possible. Reimplemented peers: first fit in order of arrival (slime,",
    "with and without --balance-data), and Karmarkar-Karp over ranks and then within them (verl), which may pass the",
    "limit and is left out of the second table (more than a minute). GSM8K's lengths are characters / 4, the others",
    "random. One thread,",
)

if __name__ == "__main__":
    sys.exit(main())
