"""Costs of groups of engines: evaluation beside training, and the client of a judge.

    python -m benchmarks.engine_groups [--rounds 3] [--steps 6] [--only evaluation judge] [--write]

Evaluation: the time of a step with --eval-engines beside one without evaluation, of two processes that
run at the same time, so that other work on the machine delays both. Real are the loop, the collector,
journal and metrics, the background evaluation, and an actor rank that writes the weights. Engines are
stubs over real HTTP, and training waits TRAIN_S: on separate GPUs neither uses this processor. A step
takes 20 s, less than that of any recipe for GPUs, and every step is evaluated, more often than a
recipe does; both make the share of the evaluation larger. An answer of the evaluation takes longer
than half of a step, so that it overlaps with generation and with training.

Judge: chat calls of one ``GroupClient``, IN_FLIGHT at a time, over stub engines that answer at once.
The limit are bare requests of aiohttp with the same bodies. "Each question 8 times": as for a group
whose answers are equal; its cache hits are 7 of 8.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp

from benchmarks.page import machine, make_parser, show, table
from benchmarks.rollout_parts import WaitingStages, make_prompt, run_loop, writer_over
from benchmarks.stub_engines import prepared_engines, started
from rlpost.config.engine_groups import NamedGroup
from rlpost.config.groups.engines import EngineGroup
from rlpost.config.load import load
from rlpost.driver.background_evaluation import BackgroundEvaluation, SnapshotWeights
from rlpost.driver.engines.engine_health import EngineHealth
from rlpost.durable.journal import Journal
from rlpost.engines.connection import Connection, RunEngines
from rlpost.engines.group_client import GroupClient
from rlpost.observe.writer import MetricsWriter, read_metrics
from rlpost.rollout.evaluate import evaluate
from rlpost.rollout.sampling import SamplingParams
from rlpost.types import EngineAddress
from tests.ports import free_ports

HEADING = "## Groups of engines"
KEY, GOAL = "bench", 3.0  # percent of a step
WAYS = ("without", "beside")
ANSWER_S, EVALUATED_S, TRAIN_S = 12.0, 14.0, 8.0
BATCH, SAMPLES, NUM_EVALUATED = 8, 8, 200
SAMPLING = SamplingParams(max_new_tokens=1024)
PARTS = ("time/generate_s", "time/train_s", "time/eval_s", "time/eval_beside_s")
SIZE = {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1536}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
IN_FLIGHT, SIBLINGS, NUM_CALLS = 256, 8, 8_000
VERDICT_LENGTH = 16  # tokens
QUESTION = "Question: what is 12 + 30? Answer number {number}: 42. Is it right? Say yes or no. " * 8


class Stages(WaitingStages):
    """Training that waits, and real evaluation beside training on a stub engine."""

    def __init__(self, folder: Path, url: str, actor: Any) -> None:
        """``url``: of the engine that evaluates; ``actor``: writes the weights."""
        super().__init__(TRAIN_S)
        self._actor, self._step, self.times = actor, 0, list[float]()
        fleet: Any = SimpleNamespace(addresses=[EngineAddress(url)], api_key=KEY)
        self._weights = SnapshotWeights(fleet, load_adapters=False, timeout_s=60.0)
        self._engines = RunEngines.of([url], KEY, capacity=NUM_EVALUATED)
        root, health = folder / "eval_weights", cast(EngineHealth, self)
        self.evaluations = BackgroundEvaluation(root, health, self._weights, self._evaluate)

    async def evaluate(self) -> None:
        """As ``ClusterStages.evaluate``."""

        async def write(folder: str) -> None:
            await asyncio.to_thread(self._actor.write_engine_folder, folder, 0)

        await self.evaluations.begin(self._step, self._step, write, is_last=False)

    async def update(self, version: int, **_: object) -> None:
        """As ``EngineHealth.update``, without deaths."""
        await self._weights.update(version)

    async def over(self, work: Awaitable[Mapping[str, float]]) -> Mapping[str, float]:
        """As ``EngineHealth.over``, without health checks."""
        return await work

    async def _evaluate(self, step: int) -> Mapping[str, float]:
        async with Connection(self._engines) as connection:
            prompts = [make_prompt(number) for number in range(NUM_EVALUATED)]
            writer = writer_over(connection, SAMPLING, n=1)
            means = await evaluate(writer, prompts, lambda: False)
        return {f"eval/heldout/{name}": value for name, value in means.items()}

    async def measure(self, step: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Record the time, once a step."""
        self._step = step
        self.times.append(time.monotonic())
        return {}


async def run_steps(way: str, num_steps: int, folder: Path, actor: Any) -> dict[str, float]:
    """Run the loop; return the seconds of a step, and means of the metrics of all but the first."""
    rollout = {
        "num_rollout": num_steps,
        "rollout_batch_size": BATCH,
        "n_samples_per_prompt": SAMPLES,
    }
    evaluation = {"eval_interval": 1, "skip_eval_before_train": True} if way == "beside" else {}
    config = load([], {"rollout": {**rollout, "prompt_data": "none"}, "eval": evaluation}).config
    metrics, ports = MetricsWriter(folder / "metrics.jsonl"), free_ports(2)
    delays = zip(ports, (ANSWER_S, EVALUATED_S), strict=True)
    engines = (["external", "--port", port, "--delay", delay, delay] for port, delay in delays)
    policy, evaluator = (f"http://127.0.0.1:{port}" for port in ports)
    stages = Stages(folder, evaluator, actor)
    with started(*engines, key=KEY):
        async with Connection(RunEngines.of([policy], KEY, capacity=BATCH * SAMPLES)) as connection:
            await stages.evaluations.resume(0, metrics.amend)
            writer = writer_over(connection, SAMPLING, n=SAMPLES)
            journal = Journal.resume(folder / "journal", 0, step=0, settings="")
            await run_loop(stages, config, writer, folder=folder, metrics=metrics, journal=journal)
            await stages.evaluations.finish()
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if line["step"] > 1]
    means = {name: statistics.fmean(line.get(name, 0.0) for line in lines) for name in PARTS}
    return {"step_s": (stages.times[-1] - stages.times[0]) / (num_steps - 1), **means}


def run_way(way: str, num_steps: int, folder: Path) -> dict[str, float]:
    """Run one way in this process, when the other one is ready too: at a line on standard input."""
    from benchmarks.train_step import one_rank, save_random_qwen3, started_actor
    from rlpost.extensions.fetching.tiny_model import VOCAB_SIZE, make_tokenizer

    actor = None
    if way == "beside":
        make_tokenizer().save_pretrained(folder / "model")
        save_random_qwen3(folder / "model", vocab_size=VOCAB_SIZE, **SIZE, **HEADS)
        actor = started_actor(one_rank(folder / "model", bf16=False), port=29_441)
    print("ready", flush=True)
    sys.stdin.readline()
    return asyncio.run(run_steps(way, num_steps, folder, actor))


def run_both(num_steps: int) -> dict[str, dict[str, float]]:
    """Run both ways at the same time, each in a process."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "benchmarks.engine_groups", "--steps", str(num_steps), "--way"]
    processes = [
        subprocess.Popen([*command, way], stdin=pipe, stdout=pipe, text=True) for way in WAYS
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", "a process did not start"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        outputs = [process.communicate()[0] for process in processes]
        return {
            way: json.loads(text.splitlines()[-1]) for way, text in zip(WAYS, outputs, strict=True)
        }
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure_evaluation(rounds: int, num_steps: int) -> list[str]:
    """Return the lines of evaluation beside training."""
    round_times = []
    for number in range(rounds):
        round_times.append(run_both(num_steps))
        print(f"round {number + 1}: {round_times[-1]}", file=sys.stderr, flush=True)
    costs = [100 * (one["beside"]["step_s"] / one["without"]["step_s"] - 1) for one in round_times]
    rows = []
    for way in WAYS:
        steps = [one[way]["step_s"] for one in round_times]
        parts = [
            statistics.median(one[way][name] for one in round_times) for name in round_times[0][way]
        ]
        cells = [f"{parts[0]:.3f}", f"{min(steps):.3f} to {max(steps):.3f}"]
        rows.append([way, *cells, *(f"{part:.2f}" for part in parts[1:])])
    header = ["evaluation", "step s", "rounds", "generate", "train", "written", "evaluated"]
    return [
        f"{NUM_EVALUATED} answers evaluated after every step, beside training: a step takes "
        f"{statistics.median(costs):+.1f} %",
        f"({min(costs):+.1f} to {max(costs):+.1f} in {rounds} rounds of {num_steps} steps; goal: at "
        f"most {GOAL:g}). The loop waits while a rank",
        "writes the weights of 25 million parameters:",
        "",
        *table(header, rows),
        "",
    ]


def messages(num_siblings: int) -> Iterator[list[dict[str, str]]]:
    """Yield the messages of all calls; ``num_siblings`` ask the same question."""
    for number in range(NUM_CALLS):
        yield [{"role": "user", "content": QUESTION.format(number=number // num_siblings)}]


async def call_all(
    call: Callable[[list[dict[str, str]]], Awaitable[object]], num_siblings: int
) -> tuple[float, float]:
    """Return calls a second and processor milliseconds a call of IN_FLIGHT workers."""
    conversations = messages(num_siblings)

    async def work() -> None:
        for each in conversations:
            await call(each)

    began, used = time.perf_counter(), time.process_time()
    await asyncio.gather(*(work() for _ in range(IN_FLIGHT)))
    seconds, used = time.perf_counter() - began, time.process_time() - used
    return NUM_CALLS / seconds, 1000 * used / NUM_CALLS


async def bare_round(url: str) -> tuple[float, float, float]:
    """Return the figures of aiohttp alone, with the bodies of ``GroupClient.chat``."""
    connector = aiohttp.TCPConnector(limit=0)
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:

        async def call(conversation: list[dict[str, str]]) -> object:
            body = json.dumps({"messages": conversation, "model": "default", "temperature": 0.0})
            async with session.post(f"{url}/v1/chat/completions", data=body.encode()) as response:
                return json.loads(await response.read())["choices"][0]["message"]["content"]

        return *await call_all(call, 1), 0.0


async def client_round(url: str, cache_mib: int, num_siblings: int) -> tuple[float, float, float]:
    """Return the figures of ``GroupClient``, and the share of calls that the cache answered."""
    settings = EngineGroup(url=(url,), concurrency=IN_FLIGHT, cache_mib=cache_mib)
    client = GroupClient(NamedGroup.declared("judge", settings))
    try:
        figures = await call_all(client.chat, num_siblings)
        return *figures, client.counters().get("engines/judge/cache_hit_frac", 0.0)
    finally:
        await client.close()


def measure_judge(rounds: int) -> list[str]:
    """Return the lines of the judge's client; the first round is a warm-up."""
    with prepared_engines(VERDICT_LENGTH, chat=True) as url:
        ways: dict[str, Callable[[], Any]] = {
            "aiohttp alone": lambda: bare_round(url),
            "rlpost, no cache": lambda: client_round(url, 0, 1),
            "rlpost, each question once": lambda: client_round(url, 64, 1),
            "rlpost, each question 8 times": lambda: client_round(url, 64, SIBLINGS),
        }
        measured = [
            {name: asyncio.run(way()) for name, way in ways.items()} for _ in range(rounds + 1)
        ]
    rows = []
    for name in ways:
        speeds, used, hits = zip(*(one[name] for one in measured[1:]), strict=True)
        ratio = statistics.median(one[name][0] / one["aiohttp alone"][0] for one in measured[1:])
        cells = [f"{statistics.median(speeds):,.0f}", f"{min(speeds):,.0f} to {max(speeds):,.0f}"]
        cells += [f"{ratio:.2f}", f"{statistics.median(used):.2f}", f"{100 * hits[0]:.1f} %"]
        rows.append([name, *cells])
    return [
        f"Chat calls of a judge's client, {IN_FLIGHT} in flight, {NUM_CALLS:,} calls a round, over two processes that",
        "answer at once on the same 2 cores:",
        "",
        *table(["client", "calls/s", "rounds", "aiohttp = 1", "processor ms a call", "hits"], rows),
        "",
    ]


def main() -> int:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="of each run (default: 6)")
    parts: Sequence[str] = ("evaluation", "judge")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(run_way(options.way, options.steps, Path(folder))))
        return 0
    lines = [f"`python -m benchmarks.engine_groups --write`; {machine()}.", ""]
    if "judge" in options.only:
        lines += measure_judge(options.rounds)
    if "evaluation" in options.only:
        lines += measure_evaluation(options.rounds, options.steps)
    show(HEADING, lines[:-1], write=options.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
