"""The training step and the weight update, measured beside their peers by two programs of benchmarks/.

They run with ``python -m tests.gpu_check`` alone, because they prove nothing.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from rlpost.config.plan.cards import card_of
from tests.predicted import BenchmarkStep, step_seconds

SIZES = {120.0: "large", 60.0: "medium", 0.0: "small"}
"""Memory of a GPU from which on a size of the training benchmark fits.

Three models with their optimizers are in memory at once, and TRL pads all rows to the longest: the
large ones take 61 GB and about 29 GB of activations.
"""


@pytest.fixture(autouse=True)
def only_in_gpu_check(pytestconfig: pytest.Config) -> None:
    if not pytestconfig.pluginmanager.hasplugin("tests.gpu_check"):
        pytest.skip("measured by python -m tests.gpu_check")


def train_step_words(memory_gb: float | None) -> list[str]:
    """Arguments of a model that fits the device; ``memory_gb``: of a GPU, None on the CPU."""
    size = "tiny"
    if memory_gb is not None:
        size = next(name for least, name in SIZES.items() if memory_gb >= least)
    return ["benchmarks.train_step", "--size", size, "--steps", "2" if memory_gb is None else "5"]


def weight_sync_words(memory_gb: float | None) -> list[str]:
    """Arguments of models that fit the device; ``memory_gb``: of a GPU, None on the CPU."""
    sizes = ["small"] if memory_gb is None else ["small", "large"]
    repeat = "1" if memory_gb is None else "5"
    return ["benchmarks.weight_sync", "--size", *sizes, "--repeat", repeat]


def output_of(words: list[str]) -> str:
    """Run a benchmark in a process of its own; return what it prints."""
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def memory_gb_of(device: str) -> float | None:
    import torch

    return torch.cuda.mem_get_info()[1] / 1e9 if device == "cuda" else None


def tables(output: str) -> list[list[dict[str, str]]]:
    """The Markdown tables of an output, each as its rows by the names of the header."""
    found: list[list[dict[str, str]]] = []
    header: list[str] | None = None
    for line in output.splitlines():
        if not line.startswith("|"):
            header = None
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if header is None:
            header = cells
            found.append([])
        elif not all(re.fullmatch(":?-+:?", cell) for cell in cells):
            found[-1].append(dict(zip(header, cells, strict=True)))
    return [rows for rows in found if rows]


def train_step_figures(output: str) -> str:
    """``rlpost 3207 tokens/s; TRL 2.67 x as long``."""
    (rows,) = [rows for rows in tables(output) if "step of" in rows[0]]
    ours, *others = rows
    share = f", {ours['of peak']} of peak" if "of peak" in ours else ""
    compared = [f"{row['step of']} {row['time, rlpost = 1']} x as long" for row in others]
    return "; ".join([f"{ours['step of']} {ours['tokens/s']} tokens/s{share}", *compared])


def step_s(output: str, num_tokens: int) -> float:
    """Seconds of this project's step, from its tokens a second."""
    (rows,) = [rows for rows in tables(output) if "step of" in rows[0]]
    return num_tokens / float(rows[0]["tokens/s"].replace(",", ""))


def benchmark_step(size: str) -> BenchmarkStep:
    """The model and the samples of a size of benchmarks/train_step.py."""
    from benchmarks.train_step import SIZES, VOCAB_SIZE, make_samples

    (hidden, layers, heads, groups, ffn), num_samples, max_tokens, _ = SIZES[size]
    lengths = [len(sample.token_ids) for sample in make_samples(num_samples)]
    return BenchmarkStep(hidden, layers, heads, groups, ffn, VOCAB_SIZE, lengths, max_tokens)


def predicted_step(size: str) -> tuple[float, BenchmarkStep] | None:
    """Predicted seconds on the GPU here; None without one that the planner knows."""
    import torch

    card = card_of(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    step = benchmark_step(size)
    return None if card is None else (step_seconds(step, card), step)


def weight_sync_figures(output: str) -> str:
    """``159 MiB: memory 0.120 s, 1.30 x a plain copy, disk ...``, for every size."""
    found = [rows for rows in tables(output) if "update s" in rows[0]]
    sizes = re.findall(r"^(\d+ MiB) in \d+ buckets", output, re.MULTILINE)
    assert found
    figures = []
    for size, rows in zip(sizes, found, strict=True):
        parts = []
        for row in rows:
            ratio = next(value for name, value in row.items() if name.startswith("ratio"))
            parts.append(f"{row['mover']} {row['update s']} s, {ratio} x a plain copy")
        figures.append(f"{size}: {', '.join(parts)}")
    return "; ".join(figures)


def test_a_training_step_is_measured_beside_trl_and_hugging_face(device, record_property):
    words = train_step_words(memory_gb_of(device))
    output = output_of(words)
    record_property("figure", train_step_figures(output))
    if (prediction := predicted_step(words[2])) is not None:
        seconds = step_s(output, sum(prediction[1].lengths))
        record_property("compared", [f"training step, {words[2]}", prediction[0], seconds])


@pytest.mark.needs("sglang")
def test_a_weight_update_is_measured_beside_a_plain_copy(device, record_property):
    output = output_of(weight_sync_words(memory_gb_of(device)))
    record_property("figure", weight_sync_figures(output))
