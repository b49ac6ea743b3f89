"""The rollout on a real SGLang server: speed of the client, wasted tokens, and time of each mode.

    python -m benchmarks.rollout [--rounds 3] [--write]

1. Tokens/s of rlpost's client (groups, grading, placement) beside SGLang's own benchmark client
   (``sglang.benchmark.serving``), which asks the same server directly for the same answers.
2. Tokens that are generated and never trained, with a long-tailed distribution of lengths: with and
   without keeping surplus groups and partial answers.
3. Wall time of a step in the three modes. Engine, weight update and loop are real. The
   trainer only waits, for as long as generation takes: on separate GPUs it would not slow down the
   engine, but here both share two cores.

Rounds are interleaved and the median counts. --write puts the tables into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from safetensors.torch import load_file

from benchmarks.page import machine, make_parser, show, table
from benchmarks.rollout_parts import (
    KEY,
    TINY,
    Forced,
    Lengths,
    Prompts,
    Served,
    make_prompt,
    serving,
)
from benchmarks.weight_sync import Trainer, other_movers
from rlpost.config.load import load
from rlpost.config.tree import Config
from rlpost.driver.checkpoints import Checkpoints
from rlpost.driver.generation import rules
from rlpost.driver.loop import Loop
from rlpost.driver.preemption import StopRequest
from rlpost.durable.journal import Journal
from rlpost.durable.state import RunState
from rlpost.engines.engine_side_weights import Mover, PauseMode, WeightUpdate
from rlpost.observe.writer import MetricsWriter, read_metrics
from rlpost.rollout.buffer import RolloutBuffer, Rules
from rlpost.rollout.collector import Choices, Collector
from rlpost.rollout.generate import GroupWriter
from rlpost.rollout.policy_versions import PolicyVersions
from rlpost.rollout.sampling import SamplingParams
from rlpost.tasks.reward.grader import InlineGrader
from rlpost.types import Backlog, SampleGroup, Unfinished

HEADING = "## Rollout"
SAMPLES = 4  # a prompt
EVEN, LONG_TAIL = Lengths(64, 0.0), Lengths(48, 1.0)
SAMPLING = SamplingParams(max_new_tokens=LONG_TAIL.most)
MODES = ("sync", "one_step_off", "fully_async")
BATCH, STEPS = 8, 7  # of the runs of each mode


def writer_over(connection: Forced) -> GroupWriter:
    """Return a writer of groups whose reward costs almost nothing."""
    return GroupWriter(
        connection,
        SAMPLING,
        n=SAMPLES,
        grader=InlineGrader(lambda text, label, metadata: float(len(text) % 2)),
    )


async def client_round(connection: Forced, first: int, num_groups: int) -> float:
    """Return the tokens/s of rlpost's client for these groups, all requested at once."""
    writer, started = writer_over(connection), time.perf_counter()
    groups = await asyncio.gather(
        *(writer.write(Unfinished(make_prompt(first + i))) for i in range(num_groups))
    )
    seconds = time.perf_counter() - started
    assert all(isinstance(group, SampleGroup) for group in groups)
    return sum(group.num_tokens for group in groups if isinstance(group, SampleGroup)) / seconds


class TheirClient:
    """SGLang's benchmark client, with its bound on concurrency; it streams by default."""

    def __init__(self, served: Served, *, streams: bool) -> None:
        from rlpost.engines.server import use_stand_ins

        use_stand_ins()
        from sglang.benchmark import serving as theirs

        self._theirs, self._url, self._streams = theirs, served.engine.url, streams
        self._key, self._concurrency = KEY, served.concurrency

    async def round(self, lengths: Lengths, first: int, num_groups: int) -> float:
        """Return the tokens/s of a round."""
        settings = {
            "temperature": 1.0,
            "top_p": 1.0,
            "disable_ignore_eos": False,
            "disable_stream": not self._streams,
            "return_logprob": True,
            "return_routed_experts": False,
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
            "token_ids_logprob": None,
            "header": [f"Authorization=Bearer {self._key}"],
        }
        self._theirs.set_global_args(argparse.Namespace(**settings))
        slots = asyncio.Semaphore(self._concurrency)

        async def ask(number: int, index: int) -> int:
            prompt, length = make_prompt(number), lengths.of(number, index)
            request = self._theirs.RequestFuncInput(
                prompt=list(prompt.token_ids),
                api_url=f"{self._url}/generate",
                prompt_len=len(prompt.token_ids),
                output_len=length,
                model="",
                lora_name="",
                image_data=None,
                extra_request_body={},
            )
            async with slots:
                answer = await self._theirs.async_request_sglang_generate(request)
            assert answer.success, answer.error
            return length

        started = time.perf_counter()
        numbers = range(first, first + num_groups)
        asked = [ask(number, index) for number, index in product(numbers, range(SAMPLES))]
        return sum(await asyncio.gather(*asked)) / (time.perf_counter() - started)


async def measure_clients(
    served: Served, *, rounds: int, num_groups: int
) -> dict[str, list[float]]:
    """Return the tokens/s of every round, by client."""
    plain, streaming = TheirClient(served, streams=False), TheirClient(served, streams=True)
    found: dict[str, list[float]] = {"rlpost": [], "SGLang's": [], "SGLang's, streaming": []}
    async with Forced(served.engines, EVEN.remaining) as connection:
        for number in range(rounds + 1):
            first = number * num_groups
            speeds = {
                "rlpost": await client_round(connection, first, num_groups),
                "SGLang's": await plain.round(EVEN, first + 10_000, num_groups),
                "SGLang's, streaming": await streaming.round(EVEN, first + 20_000, num_groups),
            }
            for name, speed in speeds.items() if number else ():  # the first round is a warm-up
                found[name].append(speed)
    return found


KEEPING = {
    "nothing kept": (False, False),
    "surplus groups": (True, False),
    "and partial answers": (True, True),
}


async def collect_steps(
    served: Served, rules: Rules, *, keeps_surplus: bool
) -> Mapping[str, float]:
    """Generate and "train" all steps; return tokens trained, wasted and held at the end, and seconds."""
    buffer, started = RolloutBuffer(rules, Backlog(), step=0), time.perf_counter()
    wasted, trained = 0.0, 0

    def wanted(group: SampleGroup) -> bool:
        return keeps_surplus or buffer.num_finished < rules.batch_size

    async with Forced(served.engines, LONG_TAIL.remaining) as connection:
        choices = Choices(wanted=wanted)
        collector = Collector(
            buffer,
            Prompts(),
            writer_over(connection),
            choices=choices,
            stop_requested=lambda: False,
        )
        for step in range(rules.num_steps):
            trained += sum(group.num_tokens for group in await collector.batch())
            collector.mark_trained()
            wasted += collector.counts()["rollout/wasted_tokens"]
            collector.mark_synced(step + 1)
    seconds = time.perf_counter() - started
    backlog = buffer.backlog()
    held = sum(group.num_tokens for group in backlog.finished) + sum(
        each.num_tokens for each in backlog.unfinished
    )
    return {"trained": trained, "wasted": wasted, "held": held, "seconds": seconds}


async def measure_waste(
    served: Served, *, rounds: int, steps: int
) -> dict[str, list[Mapping[str, float]]]:
    """Return the figures of each kind of keeping, for each round."""
    found: dict[str, list[Mapping[str, float]]] = {name: [] for name in KEEPING}
    for _ in range(rounds):
        for name, (keeps_surplus, keeps_partial) in KEEPING.items():
            rules = Rules(batch_size=8, start_size=16, num_steps=steps, keep_partial=keeps_partial)
            found[name].append(await collect_steps(served, rules, keeps_surplus=keeps_surplus))
    return found


@dataclass
class LoopTimes:
    """Seconds of generation and training alone, and of the rounds of each mode."""

    generate_s: float
    train_s: float
    step_s: dict[str, list[float]] = field(default_factory=lambda: {mode: [] for mode in MODES})
    sync_s: dict[str, list[float]] = field(default_factory=lambda: {mode: [] for mode in MODES})


class Stages:
    """Stages with a trainer that only waits, and real weight updates."""

    def __init__(self, served: Served, mover: Mover, *, train_s: float, pause: PauseMode) -> None:
        self._train_s, self._mover, self._pause = train_s, mover, pause
        self._update = WeightUpdate([served.engine], api_key=KEY)

    async def train(self, groups: Sequence[SampleGroup], rollout: int) -> Mapping[str, float]:
        """Wait instead of training."""
        await asyncio.sleep(self._train_s)
        return {"train/loss": 0.0, "train/grad_norm": 0.0}

    async def sync(self, policy_version: int) -> None:
        """Update the engine."""
        await self._update.update(policy_version, self._mover, pause=self._pause)

    async def evaluate(self) -> Mapping[str, float]:
        """Nothing."""
        return {}

    async def measure(self, step: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Return no further metrics."""
        return {}

    async def save(self, state: RunState, *, wait: bool) -> None:
        """Nothing."""


def settings(mode: str) -> Config:
    """Return the settings of a run of ``STEPS`` steps."""
    rollout = {
        "prompt_data": "none",
        "rollout_mode": mode,
        "num_rollout": STEPS,
        "rollout_batch_size": BATCH,
        "n_samples_per_prompt": 4,
    }
    return load([], {"rollout": rollout}).config


async def one_run(
    connection: Forced, mode: str, *, stages: Stages, folder: Path
) -> list[dict[str, float]]:
    """Return the metrics lines of a run, except those of the first and the last step.

    These two have nothing to overlap with.
    """
    config, path = settings(mode), folder / "metrics.jsonl"
    path.unlink(missing_ok=True)
    collector = Collector(
        RolloutBuffer(rules(config, PolicyVersions()), Backlog(), step=0),
        Prompts(),
        writer_over(connection),
        choices=Choices(ahead=mode == "one_step_off"),
        stop_requested=lambda: False,
    )
    loop = Loop(
        stages,
        config,
        checkpoints=Checkpoints(config.checkpoint, folder, committed=lambda *_: None),
        rollouts=collector,
        journal=Journal.off(),
        metrics=MetricsWriter(path),
        stop=StopRequest(folder / "STOP"),
        versions=PolicyVersions(),
    )
    await loop.run(RunState(), saved=False)
    return [line for line in read_metrics(path) if line["step"] > 0][1:-1]


async def measure_modes(served: Served, *, rounds: int, folder: Path) -> LoopTimes:
    """Measure generation alone, then all modes with a trainer that takes as long."""
    files = folder / "files"
    files.mkdir()
    trainer = Trainer(dict(load_file(TINY / "model.safetensors")), 2**20)
    mover = other_movers(trainer, TINY, files)["memory"]

    async with Forced(served.engines, LONG_TAIL.remaining) as connection:

        async def lines(mode: str, train_s: float) -> list[dict[str, float]]:
            # as ``ClusterStages.sync``
            pause: PauseMode = "retract" if mode == "fully_async" else "abort"
            stages = Stages(served, mover, train_s=train_s, pause=pause)
            return await one_run(connection, mode, stages=stages, folder=folder)

        alone = statistics.mean(line["time/generate_s"] for line in await lines("sync", 0.0))
        generated, times = [], LoopTimes(alone, alone)
        for _ in range(rounds):
            for mode in MODES:
                found = await lines(mode, times.train_s)
                times.step_s[mode].append(statistics.mean(line["time/step_s"] for line in found))
                times.sync_s[mode].append(statistics.mean(line["time/sync_s"] for line in found))
                if mode == "sync":
                    generated.append(statistics.mean(line["time/generate_s"] for line in found))
        times.generate_s = statistics.median(generated)
    return times


def client_table(speeds: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the table of clients."""
    rows = []
    for name, values in speeds.items():
        ratios = [ours / other for ours, other in zip(speeds["rlpost"], values, strict=True)]
        middle, ratio = statistics.median(values), statistics.median(ratios)
        spread = f"{min(values):.0f} to {max(values):.0f}"
        rows.append([name, f"{middle:.0f}", spread, f"{ratio:.3f}"])
    return table(["client", "tokens/s", "rounds", "rlpost / this (goal: 0.95)"], rows)


def waste_table(found: Mapping[str, Sequence[Mapping[str, float]]], steps: int) -> list[str]:
    """Return the table of generated tokens by their use."""
    rows = []
    for name, rounds in found.items():

        def median(key: str, rounds: Sequence[Mapping[str, float]] = rounds) -> float:
            return statistics.median(one[key] for one in rounds)

        tokens = [median("trained"), median("wasted"), median("held")]
        wasted, step_s = tokens[1] / sum(tokens), median("seconds") / steps
        rows.append([name, *(f"{one:.0f}" for one in tokens), f"{wasted:.1%}", f"{step_s:.2f}"])
    header = ("kept of a rollout", "trained", "wasted", "held at the end")
    return table([*header, "wasted / generated", "s a step"], rows)


def mode_table(times: LoopTimes) -> list[str]:
    """Return the table of modes, whose bound is the longer of generation and training."""
    bound = max(times.generate_s, times.train_s)
    rows = []
    for mode in MODES:
        step_s, sync_s = (
            statistics.median(times.step_s[mode]),
            statistics.median(times.sync_s[mode]),
        )
        rows.append([mode, f"{step_s:.2f}", f"{step_s / bound:.2f}", f"{sync_s:.3f}"])
    head = f"generate {times.generate_s:.2f} s (sync), train {times.train_s:.2f} s; the longer is {bound:.2f} s:"
    header = ["mode", "s a step", "of the longer (goal of async: 1.10)", "weight update s"]
    return [head, "", *table(header, rows)]


async def run(options: argparse.Namespace, folder: Path) -> list[str]:
    """Start the server, measure, and return the lines of the three tables."""
    async with serving(folder, concurrency=options.concurrency) as served:
        speeds = await measure_clients(served, rounds=options.rounds, num_groups=options.groups)
        waste = await measure_waste(served, rounds=options.rounds, steps=options.steps)
        times = await measure_modes(served, rounds=options.rounds, folder=folder)
    return [
        f"The client: {options.groups} prompts, {SAMPLES} answers each of {EVEN.median} tokens, "
        f"{options.concurrency} requests at a time:",
        "",
        *client_table(speeds),
        "",
        f"Waste: {options.steps} steps of 8 groups of {SAMPLES} answers, 16 started; lengths log-normal (median "
        f"{LONG_TAIL.median}, sigma {LONG_TAIL.sigma}, at most {LONG_TAIL.most}). Tokens:",
        "",
        *waste_table(waste, options.steps),
        "",
        "Modes, with the same lengths and a trainer that only waits:",
        "",
        *mode_table(times),
    ]


def main() -> int:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default: 3)")
    parser.add_argument(
        "--groups", type=int, default=48, help="prompts of a round of the clients (default: 48)"
    )
    parser.add_argument(
        "--concurrency", type=int, default=64, help="requests at a time (default: 64)"
    )
    parser.add_argument(
        "--steps", type=int, default=6, help="steps of the waste table (default: 6)"
    )
    options = parser.parse_args()
    where = machine()
    with tempfile.TemporaryDirectory() as folder:
        tables = asyncio.run(run(options, Path(folder)))
    introduction = [
        "`python -m benchmarks.rollout --write`: the tiny model on one real SGLang server.",
        "SGLang's own benchmark client (`sglang.benchmark.serving`) asks the server directly: no groups or",
        f"grading. Interleaved, {options.rounds} rounds, medians. {where}.",
    ]
    show(HEADING, [*introduction, "", *tables], write=options.write)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
