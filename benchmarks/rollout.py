"""The rollout on a real SGLang server: wasted tokens, and time of each mode.

    python -m benchmarks.rollout [--rounds 3] [--write]

1. Tokens that are generated and never trained, with a long-tailed distribution of lengths: with and
   without keeping surplus groups and partial answers.
2. Wall time of a step in the three modes. Engine, weight update and loop are real. The
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
    WaitingStages,
    run_loop,
    serving,
    writer_over,
)
from benchmarks.weight_sync import Trainer, other_movers
from rlpost.config.load import load
from rlpost.config.tree import Config
from rlpost.engines.engine_side_weights import Mover, PauseMode, WeightUpdate
from rlpost.observe.writer import MetricsWriter, read_metrics
from rlpost.rollout.buffer import RolloutBuffer, Rules
from rlpost.rollout.collector import Choices, Collector
from rlpost.rollout.sampling import SamplingParams
from rlpost.types import Backlog, SampleGroup

HEADING = "## Rollout"
SAMPLES = 4  # a prompt
LONG_TAIL = Lengths(48, 1.0)
SAMPLING = SamplingParams(max_new_tokens=LONG_TAIL.most)
MODES = ("sync", "one_step_off", "fully_async")
BATCH, STEPS = 8, 7  # of the runs of each mode


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
            writer_over(connection, SAMPLING, n=SAMPLES),
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


class Stages(WaitingStages):
    """Real weight updates, and a trainer that only waits."""

    def __init__(self, served: Served, mover: Mover, *, train_s: float, pause: PauseMode) -> None:
        super().__init__(train_s)
        self._mover, self._pause = mover, pause
        self._update = WeightUpdate([served.engine], api_key=KEY)

    async def sync(self, policy_version: int) -> None:
        """Update the engine."""
        await self._update.update(policy_version, self._mover, pause=self._pause)


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
    path = folder / "metrics.jsonl"
    path.unlink(missing_ok=True)
    writer = writer_over(connection, SAMPLING, n=SAMPLES)
    await run_loop(stages, settings(mode), writer, folder=folder, metrics=MetricsWriter(path))
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
                step_lines = await lines(mode, times.train_s)
                times.step_s[mode].append(
                    statistics.mean(line["time/step_s"] for line in step_lines)
                )
                times.sync_s[mode].append(
                    statistics.mean(line["time/sync_s"] for line in step_lines)
                )
                if mode == "sync":
                    generated.append(
                        statistics.mean(line["time/generate_s"] for line in step_lines)
                    )
        times.generate_s = statistics.median(generated)
    return times


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
    """Start the server, measure, and return the lines of both tables."""
    async with serving(folder, concurrency=options.concurrency) as served:
        waste = await measure_waste(served, rounds=options.rounds, steps=options.steps)
        times = await measure_modes(served, rounds=options.rounds, folder=folder)
    return [
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
        "`python -m benchmarks.rollout --write`: the tiny model on one real SGLang server. Interleaved,",
        f"{options.rounds} rounds, medians. {where}.",
    ]
    show(HEADING, [*introduction, "", *tables], write=options.write)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
