"""CPU cost of a token in the driver, from an engine's answer to the trainer's ranks; lag of its loop.

    python -m benchmarks.driver [--tokens 1e6] [--rounds 3] [--ranks 64 1024] [--in-flight 8192]
    [--write]

Engines are other processes that answer a prepared JSON over HTTP (``benchmarks.stub_engines``). The
rest is the driver's own code: ``Connection`` and ``GroupWriter``, the hand-off to a grading process,
the journal, ``Training.train`` with the calls of all ranks. Ranks are Ray workers that take their
arguments and return. A thousand interpreters do not fit onto a small machine, so PROCESSES workers
stand for all ranks, with one call for each rank.

Only processor seconds of this process count, not those of engines, graders and ranks.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import ray

from benchmarks.page import machine, make_parser, show, table
from benchmarks.stub_engines import VARIANTS, prepared_engines
from common.garbage import collect_between_steps_only
from rlpost.config.tree import Config
from rlpost.driver.batches import (
    deal,
    rollout_metrics,
    rollout_samples,
    staleness_metrics,
)
from rlpost.driver.calls import Calls
from rlpost.driver.placement import Slot
from rlpost.driver.preemption import StopRequest
from rlpost.driver.training import Training
from rlpost.driver.worker_groups import ActorGroup
from rlpost.driver.workers import WorkerGroup
from rlpost.durable.journal import Journal
from rlpost.engines.connection import Connection, RunEngines
from rlpost.rollout.generate import GroupWriter
from rlpost.rollout.policy_versions import PolicyVersions
from rlpost.rollout.sampling import SamplingParams
from rlpost.tasks.reward.grader import InlineGrader, make_grader
from rlpost.types import Prompt, SampleGroup, StepResult, Unfinished

T = TypeVar("T")
HEADING = "## Driver"
SIBLINGS, PROMPT_LENGTH, PROCESSES = 8, 64, 8
LENGTHS = (1024, 4096)
PROMPT_IDS = tuple(range(100, 100 + PROMPT_LENGTH))
LAG_LENGTH, LAG_DELAY_S = 1024, (5.0, 35.0)
TICK_S = 0.005
HEALTHY = {"train/ppo_kl": 0.0, "train/grad_norm": 1.0, "train/rollout_logprob_abs_diff": 0.0}
GIGA = 10**9


@dataclass(frozen=True)
class Cost:
    """Processor seconds of this process: of the loop's thread, and of all its threads."""

    loop_s: float
    all_s: float

    def __truediv__(self, millions: float) -> Cost:
        return Cost(self.loop_s / millions, self.all_s / millions)

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.loop_s - other.loop_s, self.all_s - other.all_s)


async def cost_of(work: Awaitable[T]) -> tuple[T, Cost]:
    """Return the result of ``work`` and its cost. Call it in the loop's thread."""
    gc.collect()
    loop_s, all_s = time.thread_time(), time.process_time()
    result = await work
    return result, Cost(time.thread_time() - loop_s, time.process_time() - all_s)


def median_cost(costs: Sequence[Cost]) -> Cost:
    """Return the median of each field."""
    return Cost(
        statistics.median(c.loop_s for c in costs), statistics.median(c.all_s for c in costs)
    )


@dataclass(frozen=True)
class Lags:
    """Delays of callbacks in seconds.

    ``own_*``: the part in which the loop's thread used the processor. It excludes delays that other
    processes of a busy machine cause.
    """

    p50: float
    p999: float
    most: float
    own_p999: float
    own_most: float


class LagSampler:
    """Wakes up every TICK_S and records the delay."""

    def __init__(self) -> None:
        self._late: list[float] = []
        self._own: list[float] = []

    async def during(self, work: Awaitable[T]) -> T:
        """Return the result of ``work``; sample while it runs."""
        sampling = asyncio.create_task(self._sample())
        try:
            return await work
        finally:
            sampling.cancel()

    async def _sample(self) -> None:
        while True:
            due, used = time.monotonic() + TICK_S, time.thread_time()
            await asyncio.sleep(TICK_S)
            late = max(0.0, time.monotonic() - due)
            self._late.append(late)
            self._own.append(min(late, time.thread_time() - used))

    def lags(self) -> Lags:
        """Return the quantiles of all samples."""
        late, own = sorted(self._late), sorted(self._own)
        last = len(late) - 1
        return Lags(
            late[last // 2], late[int(0.999 * last)], late[-1], own[int(0.999 * last)], own[-1]
        )


class SentBytes:
    """Counts the bytes that this process serialises for Ray: arguments and stored objects."""

    def __init__(self) -> None:
        self.total = 0
        context = ray._private.worker.global_worker.get_serialization_context()
        serialize = context.serialize

        def counted(value: object) -> object:
            found = serialize(value)
            self.total += found.total_bytes
            return found

        context.serialize = counted


class StubRank:
    """A rank that accepts the calls of a trainer's rank and computes nothing."""

    def train_step(self, *_: object) -> StepResult:
        """See ``rlpost.trainer.actor.Actor``."""
        return StepResult(HEALTHY)


class SharedWorkers(WorkerGroup):
    """Many ranks in few processes: rank ``i`` is process ``i % num_processes``.

    The driver still makes a call for each rank; only the number of Python interpreters is bounded.
    """

    def __init__(self, num_ranks: int, *, num_processes: int, log_dir: Path) -> None:
        node = ray.nodes()[0]
        slots = [Slot(node["NodeID"], node["NodeManagerAddress"], 0)] * num_processes
        names = [f"stub-{index}" for index in range(num_processes)]
        ranks, envs = [StubRank] * num_processes, [{}] * num_processes
        super().__init__(ranks, slots, names=names, log_dir=log_dir, envs=envs)
        processes = range(num_ranks)
        self._workers = [self._workers[index % num_processes] for index in processes]
        self._names = [self._names[index % num_processes] for index in processes]
        self._logs = [self._logs[index % num_processes] for index in processes]

    def stop(self) -> None:
        """End the processes."""
        for worker in set(self._workers):
            ray.kill(worker)


@dataclass(frozen=True)
class Layout:
    """A trainer in blocks of 64 ranks, TP 8 x PP 4 x CP 2; the ranks of a block read the same samples."""

    num_ranks: int

    @property
    def data_ranks(self) -> list[int]:
        """The data-parallel rank of each rank."""
        return [rank // 64 for rank in range(self.num_ranks)]

    def config(self, num_groups: int) -> Config:
        """The settings of a run of this layout."""
        parallel = {
            "tensor_model_parallel_size": 8,
            "pipeline_model_parallel_size": 4,
            "context_parallel_size": 2,
        }
        return Config.model_validate(
            {
                "cluster": {"actor_num_nodes": self.num_ranks // 8, "actor_num_gpus_per_node": 8},
                "perf": {**parallel, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 8192},
                "rollout": {
                    "rollout_batch_size": num_groups,
                    "n_samples_per_prompt": SIBLINGS,
                    "rm_type": "math",
                },
            }
        )


def prompts(count: int) -> list[Prompt]:
    """Prompts of PROMPT_LENGTH tokens."""
    return [Prompt(number, "", PROMPT_IDS, label="1") for number in range(count)]


async def receive(
    url: str, num_groups: int, done: Callable[[SampleGroup], object] = lambda group: None
) -> list[SampleGroup]:
    """Return all groups: all requests are in flight at once, and the reward costs nothing."""
    count = num_groups * SIBLINGS
    sampling = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=1 << 20)
    grader = InlineGrader(lambda text, label, metadata: float(len(text) % 7 == 0))
    async with Connection(RunEngines.of([url], "key", capacity=count)) as connection:
        writer = GroupWriter(connection, sampling, n=SIBLINGS, grader=grader)

        async def write(prompt: Prompt) -> SampleGroup:
            group = await writer.write(Unfinished(prompt))
            assert isinstance(group, SampleGroup)
            done(group)
            return group

        return list(await asyncio.gather(*map(write, prompts(num_groups))))


async def grade(groups: Sequence[SampleGroup]) -> None:
    """Hand every sample to a grading process and await its reward."""
    grader = make_grader(Layout(64).config(len(groups)))
    try:
        by_id = {prompt.prompt_id: prompt for prompt in prompts(len(groups))}

        async def one(group: SampleGroup) -> object:
            return await grader.grade(
                by_id[group.prompt_id], [scored.sample for scored in group.samples]
            )

        await one(groups[0])  # starts the processes
        await asyncio.gather(*map(one, groups))
    finally:
        await grader.close()


async def journal(folder: Path, groups: Sequence[SampleGroup]) -> None:
    """Record groups and batch as the collector does, until they are on disk."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        journal = Journal.resume(Path(name), 0, step=0, settings="")
        for group, prompt in zip(groups, prompts(len(groups)), strict=True):
            journal.append_group(group, wanted=True, prompt=prompt)
        journal.batch(0, groups, {})
        await journal.durable()
        journal.close()


async def batches(groups: Sequence[SampleGroup], config: Config) -> None:
    """Make the batches, as ``Training.train`` does before it calls the ranks."""
    deal(rollout_samples(groups, config.grpo), config)


async def metrics(groups: Sequence[SampleGroup]) -> None:
    """Compute the metrics of the rollout."""
    rollout_metrics(groups)
    staleness_metrics(groups, 1)


def trainer(layout: Layout, num_groups: int, workers: SharedWorkers) -> Training:
    """Return the training stage over stub ranks."""
    config = layout.config(num_groups)
    stop = StopRequest(Path("/nowhere"))
    actors, ranks = ActorGroup(workers), layout.data_ranks
    calls = Calls(actors, stop)
    return Training(config, actors, ranks, calls=calls, is_fresh=False, break_even=1e9)


@dataclass
class Figures:
    """Figures of one length: costs of each stage in each round, bytes a token."""

    costs: dict[str, list[Cost]] = field(default_factory=lambda: defaultdict(list))
    sent: dict[int, float] = field(default_factory=dict)
    sending: dict[int, LagSampler] = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    """Everything that the rounds of one length share."""

    url: str
    length: int
    num_groups: int
    folder: Path
    workers: Mapping[int, SharedWorkers]
    sent: SentBytes

    @property
    def millions(self) -> float:
        """Millions of tokens of all answers."""
        return self.num_groups * SIBLINGS * self.length / 1e6


async def measure_round(bench: Bench, figures: Figures) -> None:
    """Add the figures of one round."""
    costs = figures.costs
    groups, cost = await cost_of(receive(bench.url, bench.num_groups))
    costs["receive"].append(cost / bench.millions)
    stages: list[tuple[str, Callable[[], Awaitable[object]]]] = [
        ("grade hand-off", lambda: grade(groups)),
        ("journal", lambda: journal(bench.folder, groups)),
        ("metrics", lambda: metrics(groups)),
    ]
    for name, stage in stages:
        _, cost = await cost_of(stage())
        costs[name].append(cost / bench.millions)
    for num_ranks, workers in bench.workers.items():
        layout = Layout(num_ranks)
        training = trainer(layout, bench.num_groups, workers)
        sampler = figures.sending.setdefault(num_ranks, LagSampler())
        _, batch = await cost_of(batches(groups, layout.config(bench.num_groups)))
        sent = bench.sent.total
        _, both = await cost_of(sampler.during(training.train(groups, 1, PolicyVersions())))
        costs["batch"].append(batch / bench.millions)
        costs[f"send, {num_ranks} ranks"].append((both - batch) / bench.millions)
        figures.sent[num_ranks] = (bench.sent.total - sent) / bench.millions / 1e6


async def measure_length(
    length: int,
    options: argparse.Namespace,
    folder: Path,
    workers: Mapping[int, SharedWorkers],
    sent: SentBytes,
) -> Figures:
    """Measure answers of one length."""
    figures = Figures()
    num_groups = max(1, round(options.tokens / length / SIBLINGS))
    with prepared_engines(length) as url:
        bench = Bench(url, length, num_groups, folder, workers, sent)
        for _ in range(options.rounds):
            await measure_round(bench, figures)
    return figures


async def measure_lag(in_flight: int, folder: Path) -> tuple[Lags, Cost]:
    """Return the lag of the loop, and its cost per million tokens.

    The answers arrive evenly within LAG_DELAY_S, and are graded and journaled.
    """
    sampler, num_groups = LagSampler(), in_flight // SIBLINGS
    journal = Journal.resume(folder / "lag", 0, step=0, settings="")

    def done(group: SampleGroup) -> None:
        journal.append_group(group, wanted=True)

    with prepared_engines(LAG_LENGTH, delay=LAG_DELAY_S) as url:
        _, cost = await cost_of(sampler.during(receive(url, num_groups, done)))
    journal.close()
    return sampler.lags(), cost / (in_flight * LAG_LENGTH / 1e6)


def cost_rows(figures: Mapping[int, Figures]) -> list[list[str]]:
    """Return rows of processor seconds per million tokens, one for each stage."""
    rows = []
    for length, of_length in figures.items():
        for stage, costs in of_length.costs.items():
            cost = median_cost(costs)
            cells = [f"{cost.all_s:.3f}", f"{cost.loop_s:.3f}"]
            rows.append([f"{stage}, answers of {length}", *cells])
    return rows


def byte_rows(figures: Mapping[int, Figures]) -> list[list[str]]:
    """Return rows of bytes per token that the driver serialises for Ray."""
    rows = []
    for length, of_length in figures.items():
        for count, sent in of_length.sent.items():
            rows.append([f"sent to {count} ranks, answers of {length}", f"{sent:.0f}"])
    return rows


def lag_row(name: str, lags: Lags) -> list[str]:
    """Return a row of the loop's lag in milliseconds."""
    values = (lags.p50, lags.p999, lags.most, lags.own_p999, lags.own_most)
    return [name, *(f"{1000 * value:.0f}" for value in values)]


async def run(options: argparse.Namespace, folder: Path) -> list[str]:
    """Measure everything; return the lines of the section."""
    where = machine()
    ray.init(
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=4 * GIGA,
    )
    workers = {
        count: SharedWorkers(count, num_processes=PROCESSES, log_dir=folder)
        for count in options.ranks
    }
    for group in workers.values():
        await group.call("train_step")  # they have started
    sent = SentBytes()
    figures, lag_rows = {}, []
    for length in options.lengths:
        figures[length] = await measure_length(length, options, folder, workers, sent)
        for count, sampler in figures[length].sending.items():
            name = f"batch and send to {count} ranks, {options.tokens / 1e6:.1f} million tokens of {length}"
            lag_rows.append(lag_row(name, sampler.lags()))
    for group in workers.values():
        group.stop()
    ray.shutdown()
    lags, cost = await measure_lag(options.in_flight, folder)
    lag_rows.insert(
        0, lag_row(f"receive, grade, journal: {options.in_flight} requests in flight", lags)
    )
    figures_of = [
        f"{options.rounds} rounds of {options.tokens / 1e6:.1f} million tokens, medians;",
        f"groups of {SIBLINGS} answers, prompts of {PROMPT_LENGTH} tokens. Engines are {VARIANTS} prepared answers",
        f"behind real HTTP; {PROCESSES} Ray workers stand for all ranks, blocks of TP 8 x PP 4 x CP 2, with one",
        f"call for each rank. {where}:",
        "",
        "```bash",
        "python -m benchmarks.driver --write",
        "```",
        "",
        "Processor seconds of the driver a million tokens, of all its threads and of the event loop's own:",
        "",
        *table(["", "all threads", "the loop"], cost_rows(figures)),
        "",
        "Bytes a token that the driver serialises for Ray in one pass over the batch:",
        "",
        *table(["", "bytes"], byte_rows(figures)),
    ]
    spread_s = LAG_DELAY_S[1] - LAG_DELAY_S[0]
    lateness = [
        "",
        "Milliseconds by which callbacks of the loop are late. *Own*: the part in which the loop's thread had the",
        f"processor. First row: {options.in_flight} answers of {LAG_LENGTH} tokens arrive within {spread_s:.0f} s, at",
        f"{cost.all_s:.2f} s of the driver a million tokens, {cost.loop_s:.2f} of them in the loop:",
        "",
        *table(["", "p50", "p99.9", "most", "own p99.9", "own most"], lag_rows),
    ]
    return [*figures_of, *lateness]


def main() -> int:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=float, default=1e6, help="of a rollout (default: 1e6)")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=LENGTHS, help="of answers, in tokens"
    )
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    parser.add_argument("--ranks", type=int, nargs="+", default=(64, 1024), help="multiples of 64")
    parser.add_argument("--in-flight", type=int, default=8192, help="requests (default: 8192)")
    options = parser.parse_args()
    collect_between_steps_only()  # as the driver does
    with tempfile.TemporaryDirectory() as name:
        lines = asyncio.run(run(options, Path(name)))
    show(HEADING, lines, write=options.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
