"""CPU seconds and memory at large numbers of engines, nodes, prompts, groups, steps and attempts.

    python -m benchmarks.scale [NAME ...] [--write]

Each subject runs in a separate process, with the code of the driver or the command line. Engines
are stubs behind real HTTP in another process (``benchmarks.stub_engines``). Ray's actors of a
thousand ranks wait for GPUs that this machine lacks, so that the driver makes its calls, but no
process starts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

from benchmarks.page import machine, make_parser, show, table
from benchmarks.stub_engines import LARGEST_ID, LETTERS_A_TOKEN, started
from common.run_folder import RunFolder
from rlpost.config.load import load
from rlpost.config.tree import Config
from rlpost.driver.engines.own_engines import OwnEngines
from rlpost.driver.placement import Offer, Placement, order_by_gpu, place, service_ports
from rlpost.durable.journal import Journal
from rlpost.durable.state import RunState
from rlpost.engines.connection import RunEngines
from rlpost.engines.engine_side_weights import BroadcastMover, WeightUpdate
from rlpost.engines.own_membership import OwnMembership
from rlpost.engines.places import Request
from rlpost.rollout.buffer import RolloutBuffer, Rules
from rlpost.tasks.cursor import PromptCursor
from rlpost.tasks.prompts import PromptFields, PromptSet, check_prompt_file
from rlpost.types import Backlog, Bucket, EngineAddress, Prompt, Sample, SampleGroup, ScoredSample

HEADING = "## Scale"
NUM_ENGINES, NUM_NODES, GPUS_A_NODE = 512, 128, 8
NUM_BUCKETS, NAMES_A_BUCKET = 10, 270  # as of GLM-4.5 in buckets of 4 GiB, of which it has 165
NUM_PROMPTS = 10_000_000
NUM_GROUPS = 100_000
SAMPLES, PROMPT_LENGTH, RESPONSE_LENGTH = 4, 3, 16  # of each group
NUM_STEPS, NUM_ATTEMPTS = 10_000, 1_000
JOB_PORTS = 400
NUM_REQUESTS = 16_384  # in flight at once
FIRST_PORT = 12_000  # of the stub engines

Row = tuple[str, float, str]
"""An operation, its processor seconds, and a note."""


class Timer:
    """Measures blocks; ``rows`` are those of the table."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    @contextmanager
    def of(self, what: str, note: Callable[[], str] = lambda: "") -> Iterator[None]:
        """Add a row: the block's processor seconds, and the growth of this process's peak memory."""
        before, used = _most_memory(), time.process_time()
        yield
        seconds, grown = time.process_time() - used, _most_memory() - before
        notes = [note(), f"{grown:.0f} MB more" if grown >= 10 else ""]
        self.rows.append((what, seconds, ", ".join(filter(None, notes))))


def _most_memory() -> float:
    """Peak resident memory of this process, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def engines(folder: Path) -> list[Row]:
    """Health checks, aborts, a weight update and the placement of requests."""
    timer = Timer()
    with started(["control", "--port", FIRST_PORT, "--num", NUM_ENGINES]):
        urls = [f"http://127.0.0.1:{FIRST_PORT + number}" for number in range(NUM_ENGINES)]
        addresses = tuple(EngineAddress(url) for url in urls)
        cluster = SimpleNamespace(attempt_dir=str(folder), secret="key")
        engines = OwnEngines(Config(), cluster, None, None)  # type: ignore
        engines.addresses = addresses
        engines.members = OwnMembership(len(addresses))

        def most() -> str:
            with urllib.request.urlopen(f"{urls[0]}/most") as response:
                return f"at most {response.read().decode()} requests at once"

        async def run() -> None:
            with timer.of(f"health check of {NUM_ENGINES} engines", most):
                assert await engines.unhealthy(generating=True) == []
            with timer.of(f"abort on {NUM_ENGINES} engines", most):
                await RunEngines.of(urls, "key", capacity=1).abort_all()
            names = tuple(
                f"model.layers.46.mlp.experts.{n}.down_proj.weight" for n in range(NAMES_A_BUCKET)
            )
            shapes, dtypes = ((5120, 1536),) * NAMES_A_BUCKET, ("bfloat16",) * NAMES_A_BUCKET
            buckets = [Bucket(names, shapes, dtypes)] * NUM_BUCKETS
            mover = BroadcastMover(buckets, _nothing, group_name="group")
            with timer.of(f"weight update of {NUM_ENGINES} engines, {len(buckets)} buckets", most):
                await WeightUpdate(addresses, api_key="key").update(1, mover)

        asyncio.run(run())
        with timer.of(f"placement of {NUM_REQUESTS:,} requests on {NUM_ENGINES} engines"):
            asyncio.run(_placed(urls))
    return timer.rows


async def _nothing(index: int) -> None:
    pass


async def _placed(urls: Sequence[str]) -> None:
    """Choose engines for the answers of groups, all in flight at once."""
    places = RunEngines.of(urls, "key", capacity=NUM_REQUESTS).places
    async with AsyncExitStack() as stack:
        for number in range(NUM_REQUESTS):
            request = Request(num_input=1024, num_new=1024, prompt=number // 8)
            await stack.enter_async_context(places.take(request))


def nodes(folder: Path) -> list[Row]:
    """Placement and ports, and the creation of all actors in Ray."""
    import ray

    from rlpost.driver.workers import WorkerGroup

    timer = Timer()
    placed: list[Placement] = []
    for nodes_to_train in (NUM_NODES, NUM_NODES // 2):
        is_colocated = nodes_to_train == NUM_NODES
        config = _cluster(nodes_to_train, is_colocated)
        offers = [
            Offer(f"id{n}", f"10.0.{n // 256}.{n % 256}", GPUS_A_NODE) for n in range(NUM_NODES)
        ]
        how = "colocated" if is_colocated else "disaggregated"
        with timer.of(f"placement of {NUM_NODES} nodes x {GPUS_A_NODE} GPUs, {how}"):
            placement = place(offers, config)
            order_by_gpu(
                placement.actors, [rank % GPUS_A_NODE for rank in range(len(placement.actors))]
            )
        with timer.of(f"ports of {len(placement.engines)} engines, attention data-parallel"):
            service_ports(
                20_600, JOB_PORTS, engines=placement.engines, num_stages=16, over_tcp=True
            )
        placed.append(placement)
    ray.init(
        num_cpus=1,
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    node = ray.nodes()[0]["NodeID"]
    slots = [type(slot)(node, slot.ip, 1) for slot in placed[0].actors]
    names = [f"actor-{rank}" for rank in range(len(slots))]
    with timer.of(f"creation of {len(slots)} actors in Ray"):
        group = WorkerGroup(
            [dict] * len(slots), slots, names=names, log_dir=folder, envs=[{}] * len(slots)
        )
    del group
    ray.shutdown()
    return timer.rows


def _cluster(nodes_to_train: int, is_colocated: bool) -> Config:
    more: dict[str, object] = (
        {"colocate": True} if is_colocated else {"rollout_num_gpus": nodes_to_train * GPUS_A_NODE}
    )
    cluster = {
        "actor_num_nodes": nodes_to_train,
        "actor_num_gpus_per_node": GPUS_A_NODE,
        "num_gpus_per_node": GPUS_A_NODE,
        "rollout_num_gpus_per_engine": 1,
        **more,
    }
    return load([], {"cluster": cluster}).config


def prompts(folder: Path) -> list[Row]:
    """Start-up, the order of an epoch, a resume."""
    timer, path = Timer(), folder / "prompts.jsonl"
    with path.open("w") as file:
        for n in range(NUM_PROMPTS):
            file.write(f'{{"prompt": "What is {n} plus {n + 1}?", "label": "{2 * n + 1}"}}\n')
    fields = PromptFields("prompt", "label")
    with timer.of(f"index of {NUM_PROMPTS} prompts"):
        prompt_set = PromptSet(
            path, tokenize=lambda content, tools: (str(content), (1,)), fields=fields
        )
    cursor = PromptCursor(prompt_set, shuffle=True, seed=1)
    with timer.of("order of an epoch, the first 1,000 prompts"):
        cursor.take(1000)
    with timer.of("the next 1,000 prompts"):
        cursor.take(1000)
    state = {**cursor.state(), "epoch": 3, "offset": NUM_PROMPTS // 2}
    with timer.of("resume in the fourth epoch, 1,000 prompts"):
        PromptCursor.from_state(prompt_set, state, shuffle=True, seed=1).take(1000)
    part = folder / "part.jsonl"
    with path.open() as file, part.open("w") as first:
        first.writelines(line for line, _ in zip(file, range(NUM_PROMPTS // 10), strict=False))
    with timer.of(f"check of {NUM_PROMPTS // 10} prompts on the login node"):
        check_prompt_file(part, fields)
    return timer.rows


def random_group(rng: random.Random, prompt_id: int) -> SampleGroup:
    """Return a complete group of random tokens and log-probs."""
    samples = []
    for index in range(SAMPLES):
        sample = Sample(
            prompt_id=prompt_id,
            index=index,
            prompt_ids=tuple(range(PROMPT_LENGTH)),
            response_ids=tuple(rng.randrange(LARGEST_ID) for _ in range(RESPONSE_LENGTH)),
            rollout_logprobs=tuple(-rng.random() for _ in range(RESPONSE_LENGTH)),
            text="x" * LETTERS_A_TOKEN * RESPONSE_LENGTH,
            finish_reason="stop",
            policy_version=prompt_id * 4 // NUM_GROUPS,
        )
        samples.append(ScoredSample(sample, 1.0))
    return SampleGroup(prompt_id, tuple(samples))


def backlog(folder: Path) -> list[Row]:
    """A buffer with NUM_GROUPS complete groups, its checkpoint, its journal."""
    timer, rng = Timer(), random.Random(1)
    groups = [random_group(rng, prompt_id) for prompt_id in range(NUM_GROUPS)]
    rules = Rules(
        batch_size=256, start_size=NUM_GROUPS, num_steps=NUM_GROUPS, max_staleness=NUM_GROUPS
    )
    buffer = RolloutBuffer(rules, Backlog(), step=0)
    buffer.is_open = True
    with timer.of(f"{NUM_GROUPS} groups fetched and started"):
        buffer.add_prompts([Prompt(n, "", (1, 2, 3)) for n in range(NUM_GROUPS)])
        for n in range(NUM_GROUPS):
            buffer.start(n)
    with timer.of(f"{NUM_GROUPS} groups complete, each asks for a batch and for capacity"):
        for group in groups:
            buffer.finish(group, wanted=True)
            buffer.has_batch()
            buffer.capacity()
    state = RunState(backlog=buffer.backlog())
    with timer.of("checkpoint of all of them", lambda: f"{len(text) / 1e6:.0f} MB"):
        text = state.to_json()
    with timer.of("resume from it"):
        again = RunState.from_json(text)
        RolloutBuffer(rules, again.backlog, step=0)
    assert again.backlog == state.backlog
    journal = Journal.resume(folder / "journal", 0, step=0, settings="")
    with timer.of("journal of all of them"):
        for group in groups:
            journal.append_group(group, wanted=True)
    journal.close()
    with timer.of("resume from it"):
        journal = Journal.resume(folder / "journal", 0, step=0, settings="")
        assert sum(1 for _ in journal.again()) == NUM_GROUPS
    journal.close()
    return timer.rows


def report(folder: Path) -> list[Row]:
    """Report and status of a run of NUM_STEPS steps."""
    from rlpost.extensions.watching.report.write import write_report
    from rlpost.observe.metric_names import METRICS

    run, rng, timer = RunFolder(folder), random.Random(1), Timer()
    run.report.mkdir()
    names = [
        metric.name for metric in METRICS if "SET" not in metric.name and "@K" not in metric.name
    ]
    with run.metrics.open("w") as file:
        for step in range(1, NUM_STEPS + 1):
            file.write(json.dumps({"step": step, **{name: rng.random() for name in names}}) + "\n")
    run.run_json.write_text(Config().model_dump_json())
    for step in range(0, NUM_STEPS, 20):
        run.ledger.append(
            "committed", step=step, checkpoint=f"iter_{step:07d}", bytes=1, seconds=1.0
        )
    page: list[Path] = []
    with timer.of(
        f"report of {NUM_STEPS} steps", lambda: f"a page of {page[0].stat().st_size / 1e6:.1f} MB"
    ):
        page.append(write_report(run))
    with timer.of(f"status of a run of {NUM_STEPS} steps"):
        _status(run)
    return timer.rows


def _status(run: RunFolder) -> None:
    from rlpost.extensions.watching.run_status import status_of

    status_of(run, None, None)


def attempts(folder: Path) -> list[Row]:
    """Folders and ledger of a run with NUM_ATTEMPTS attempts."""
    run, timer = RunFolder(folder), Timer()
    run.report.mkdir()
    run.run_json.write_text(Config().model_dump_json())
    with timer.of(f"{NUM_ATTEMPTS} attempts begun, each with 6 lines in the ledger"):
        for number in range(NUM_ATTEMPTS):
            run.new_attempt()
            for event in ("attempt", "started", "ready", "committed", "preempted", "verdict"):
                run.ledger.append(event, attempt=str(number), step=number)
    with timer.of("one more attempt"):
        run.new_attempt()
    with timer.of("status"):
        _status(run)
    from rlpost.extensions.watching.report.write import write_report

    with timer.of("report"):
        write_report(run)
    return timer.rows


SUBJECTS: dict[str, Callable[[Path], list[Row]]] = {
    "engines": engines,
    "nodes": nodes,
    "prompts": prompts,
    "backlog": backlog,
    "report": report,
    "attempts": attempts,
}


def in_separate_process(name: str) -> list[Row]:
    """Return the rows of a subject."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scale", "--one", name],
        stdout=subprocess.PIPE,
        check=True,
    )
    return [tuple(row) for row in json.loads(done.stdout.splitlines()[-1])]


def main() -> int:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(SUBJECTS)}; all unless given"
    )
    parser.add_argument("--one", choices=SUBJECTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(SUBJECTS[options.one](Path(folder))))
        return 0
    where, timings = machine(), []
    for name in options.names or SUBJECTS:
        timings += in_separate_process(name)
    rows = [[what, f"{seconds:.2f}", note] for what, seconds, note in timings]
    lines = [
        "Processor seconds of the driver, or of a command, at sizes that a small machine can only simulate",
        f"([scale](scale.md)). {where}:",
        "",
        "```bash",
        "python -m benchmarks.scale --write",
        "```",
        "",
        *table(["", "processor s", ""], rows),
    ]
    show(HEADING, lines, write=options.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
