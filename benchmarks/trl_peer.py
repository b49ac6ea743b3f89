"""A GRPO step of TRL and of rlpost on one pretrained model: seconds, memory, busy cores, rewards.

    python -m benchmarks.trl_peer [--steps 4] [--only trl rlpost] [--write]

Both train jobs/recipes/smollm2_135m.toml on this machine, one after the other: the same model,
prompts, answers for each prompt, lengths, reward, learning rate and precision (float32). Bring them
first: `rlpost fetch smollm2_135m`. TRL's settings are those that took least time here: no
checkpointing of activations, 32 samples in a pass, all cores for each operator. --write puts the
table into docs/benchmarks.md, section "A step beside TRL".
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.page import machine, make_parser, show, table
from rlpost.extensions.fetching.fetch_verb import assets_folder
from rlpost.observe.writer import read_metrics

REPOSITORY = Path(__file__).parents[1]
HEADING = "## A step beside TRL"
RECIPE = "smollm2_135m"
PROMPTS, ANSWERS, LENGTH, LR = 16, 8, 24, 2e-5
SAMPLES_IN_PASS = 32


@dataclass(frozen=True)
class Measured:
    """What one trainer took, by step; memory in GB and busy cores of all its processes."""

    step_s: Sequence[float]
    generate_s: Sequence[float]
    rewards: Sequence[float]
    peak_gb: float
    busy_cores: float


class Watch(threading.Thread):
    """Samples the memory and CPU time of every process that begins after this one, until ``end``.

    A local run leaves the session and the parents of the command that submits it.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._others = set(psutil.pids())
        self._over = threading.Event()
        self.peak_gb = 0.0
        self.samples: list[tuple[float, float]] = []  # (time, CPU seconds)

    def run(self) -> None:
        spent: dict[int, float] = {}  # by pid: processes may end between two samples
        while not self._over.wait(0.5):
            memory = 0
            for pid in set(psutil.pids()) - self._others:
                try:
                    process = psutil.Process(pid)
                    memory += process.memory_full_info().pss
                    times = process.cpu_times()
                    spent[process.pid] = times.user + times.system
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
            self.peak_gb = max(self.peak_gb, memory / 1e9)
            self.samples.append((time.time(), sum(spent.values())))

    def end(self) -> None:
        self._over.set()
        self.join()

    def busy_cores(self, begin: float, end: float) -> float:
        """Mean CPU seconds a second between two times."""
        within = [sample for sample in self.samples if begin <= sample[0] <= end]
        if len(within) < 2:
            return 0.0
        return (within[-1][1] - within[0][1]) / (within[-1][0] - within[0][0])


def run_trl(steps: int, out: Path) -> None:
    """Train with TRL in this process; write its times and rewards to ``out``."""
    import torch
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from rlpost.extensions.rewards.gsm8k import gsm8k

    torch.set_num_threads(os.cpu_count() or 1)
    assets = assets_folder(None)
    rewards: list[float] = []
    generate_s: list[float] = []
    ends = [time.time()]

    def reward(
        completions: list[list[dict[str, str]]], label: list[str], **_: object
    ) -> list[float]:
        scores = [
            gsm8k(answer[0]["content"], expected, {})
            for answer, expected in zip(completions, label, strict=True)
        ]
        rewards.append(statistics.fmean(scores))
        return scores

    class Timed(GRPOTrainer):  # type: ignore[misc]
        def _generate(self, *arguments: object, **options: object) -> object:
            began = time.time()
            try:
                return super()._generate(*arguments, **options)
            finally:
                generate_s.append(time.time() - began)

    class Ends(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: object, **__: object) -> None:
            ends[0] = time.time()

        def on_step_end(self, *_: object, **__: object) -> None:
            ends.append(time.time())

    model = str(assets / "SmolLM2-135M-Instruct")
    settings = GRPOConfig(
        output_dir=str(out.parent / "trl"),
        use_cpu=True,
        bf16=False,
        max_steps=steps,
        per_device_train_batch_size=SAMPLES_IN_PASS,
        gradient_accumulation_steps=PROMPTS * ANSWERS // SAMPLES_IN_PASS,
        num_generations=ANSWERS,
        max_completion_length=LENGTH,
        temperature=1.0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="grpo",
        learning_rate=LR,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        adam_beta2=0.98,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        save_strategy="no",
        report_to="none",
        logging_steps=1,
    )
    Timed(
        model=model,
        reward_funcs=reward,
        args=settings,
        train_dataset=_conversations(assets),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[Ends()],
    ).train()
    step_s = [later - earlier for earlier, later in itertools.pairwise(ends)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    measurements = {"step_s": step_s, "generate_s": generate_s, "rewards": rewards, "ends": ends}
    out.write_text(json.dumps(measurements | {"peak_gb": peak}))


def _conversations(assets: Path) -> Any:
    """Return the training prompts as a dataset of conversations with labels."""
    from datasets import Dataset

    lines = (assets / "addition/train.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": row["prompt"]}], "label": row["label"]}
            for row in rows
        ]
    )


def measure_trl(steps: int, folder: Path) -> Measured:
    """Train with TRL in a process of its own."""
    out = folder / "trl.json"
    words = ["--steps", str(steps), "--as-trl", str(out)]
    command = [sys.executable, "-m", "benchmarks.trl_peer", *words]
    watch = _run(command, folder / "trl.log")
    found = json.loads(out.read_text())
    busy = watch.busy_cores(found["ends"][0], found["ends"][-1])
    return Measured(found["step_s"], found["generate_s"], found["rewards"], watch.peak_gb, busy)


def measure_rlpost(steps: int, folder: Path) -> Measured:
    """Train with rlpost: an agent, Ray, a driver, a rank and an engine on this machine."""
    run = folder / "run"
    command = [sys.executable, "-m", "rlpost.submit", RECIPE, "--local", "--run-folder", str(run)]
    command += ["--num-rollout", str(steps), "--eval-interval", "none"]
    command += ["--save-interval", str(steps)]
    watch = _run(command, folder / "rlpost.log")
    lines = [line for line in read_metrics(run / "metrics.jsonl") if "reward/mean" in line]
    return _of_metrics(lines, watch)


def _of_metrics(lines: Sequence[Mapping[str, float]], watch: Watch) -> Measured:
    step_s = [line["time/step_s"] for line in lines]
    end = watch.samples[-1][0]
    return Measured(
        step_s,
        [line["time/generate_s"] for line in lines],
        [line["reward/mean"] for line in lines],
        watch.peak_gb,
        watch.busy_cores(end - sum(step_s), end),
    )


def _run(command: Sequence[str], log: Path) -> Watch:
    """Run a command to its end. Raises RuntimeError with the end of its output."""
    watch = Watch()
    watch.start()
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=file, stderr=subprocess.STDOUT)
    code = process.wait()
    watch.end()
    if code:
        raise RuntimeError(f"{' '.join(command[:5])} ended with {code}:\n{log.read_text()[-3000:]}")
    return watch


def row(name: str, measurement: Measured) -> list[str]:
    """A row of the table; the first step, which warms up, does not count."""
    later = slice(1, None) if len(measurement.step_s) > 1 else slice(None)
    step, generate = (
        statistics.median(measurement.step_s[later]),
        statistics.median(measurement.generate_s[later]),
    )
    rewards = " ".join(f"{reward:.2f}" for reward in measurement.rewards)
    return [
        name,
        f"{step:.1f}",
        f"{generate:.1f}",
        f"{step - generate:.1f}",
        f"{measurement.peak_gb:.1f}",
        f"{measurement.busy_cores / (os.cpu_count() or 1):.0%}",
        rewards,
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both and print the table."""
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=4, help="(default: 4)")
    parser.add_argument("--only", nargs="+", choices=["trl", "rlpost"], default=["trl", "rlpost"])
    parser.add_argument("--as-trl", type=Path, help="train with TRL in this process, for this file")
    options = parser.parse_args(argv)
    if options.as_trl is not None:
        run_trl(options.steps, options.as_trl)
        return 0
    where = machine()
    measurements = {}
    with tempfile.TemporaryDirectory(prefix="rlpost-trl-") as folder:
        for name in options.only:
            measure = measure_trl if name == "trl" else measure_rlpost
            measurements[name] = measure(options.steps, Path(folder))
            print(f"{name}: {row(name, measurements[name])}", file=sys.stderr, flush=True)
    header = [
        "trainer",
        "step, s",
        "generation, s",
        "rest, s",
        "memory, GB",
        "cores busy",
        "rewards",
    ]
    lines = [
        f"`python -m benchmarks.trl_peer --steps {options.steps} --write`: SmolLM2-135M-Instruct,",
        f"{PROMPTS} prompts of addition, {ANSWERS} answers each of at most {LENGTH} tokens, float32, learning",
        f"rate {LR:g}, reward `gsm8k`. Medians without the first step. {where}.",
        "",
        *table(header, [row(name, one) for name, one in measurements.items()]),
    ]
    show(HEADING, lines, write=options.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
