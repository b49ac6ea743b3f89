"""The list of checks, their command lines, and the parsing of their output into rows. Pure.

A check is a file of tests/gpu, run by pytest, or a benchmark. Each runs in a separate process,
because a kernel fault destroys the CUDA context of its process.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tools.gpu_check.table import Outcome, Row

LARGE_GB = 60.0
"""Memory of a GPU on which the large model of a benchmark fits."""


@dataclass(frozen=True)
class Check:
    """``shows``: what a pass means; ``words``: arguments of ``python -m``; ``timeout_s``: limit of
    the process.
    """

    name: str
    shows: str
    words: tuple[str, ...]
    timeout_s: int
    figures: Callable[[str], str] | None = None
    """For a benchmark: summarises its output in one line.

    Raises ValueError if the table is missing.
    """

    @property
    def is_test(self) -> bool:
        return self.figures is None

    def command(self, python: str, report: str, *, memory_gb: float | None) -> list[str]:
        """The command line.

        ``report``: pytest's result file; ``memory_gb``: of a GPU, None on the CPU.
        """
        if self.is_test:
            options = [
                "-q",
                "-p",
                "no:cacheprovider",
                "-o",
                "junit_family=xunit1",
                f"--junitxml={report}",
            ]
            return [python, "-m", "pytest", *self.words, *options]
        return [python, "-m", *self.words, *_size(self.words[0], memory_gb)]


def _size(module: str, memory_gb: float | None) -> list[str]:
    """Options for the size of a benchmark's model that fits the device."""
    if module == "benchmarks.train_step":
        size = "tiny" if memory_gb is None else "large" if memory_gb >= LARGE_GB else "small"
        return ["--size", size, "--steps", "2" if memory_gb is None else "5"]
    size = ["small"] if memory_gb is None else ["small", "large"]
    return ["--size", *size, "--repeat", "1" if memory_gb is None else "5"]


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
    rows = _table(output, "step of")
    ours, *others = rows
    share = f", {ours['of peak']} of peak" if "of peak" in ours else ""
    compared = [f"{row['step of']} {row['time, rlpost = 1']} x as long" for row in others]
    return "; ".join([f"{ours['step of']} {ours['tokens/s']} tokens/s{share}", *compared])


def weight_sync_figures(output: str) -> str:
    """``159 MiB: memory 0.120 s, 1.30 x a plain copy, disk ...``, for every size."""
    found = [rows for rows in tables(output) if "update s" in rows[0]]
    sizes = re.findall(r"^(\d+ MiB) in \d+ buckets", output, re.MULTILINE)
    if not found:
        raise ValueError("no table of updates")
    return "; ".join(f"{size}: {_updates(rows)}" for size, rows in zip(sizes, found, strict=True))


def _updates(rows: Sequence[dict[str, str]]) -> str:
    parts = []
    for row in rows:
        ratio = next(value for name, value in row.items() if name.startswith("ratio"))
        parts.append(f"{row['mover']} {row['update s']} s, {ratio} x a plain copy")
    return ", ".join(parts)


def _table(output: str, column: str) -> list[dict[str, str]]:
    for rows in tables(output):
        if column in rows[0]:
            return rows
    raise ValueError(f"no table with a column {column!r}")


CHECKS = (
    Check(
        "attention kernels",
        "torch's packed attention in bfloat16 and float32, outputs and gradients, against the formula",
        ("tests/gpu/test_attention_kernels.py",),
        600,
    ),
    Check(
        "actor",
        "logits of every family against transformers on the CPU; three training steps against those of the CPU",
        ("tests/gpu/test_actor.py",),
        1800,
    ),
    Check(
        "trainer memory",
        "weights, gradients and optimizer leave the GPU, their memory is free, and they come back bit for bit",
        ("tests/gpu/test_memory.py",),
        600,
    ),
    Check(
        "optimizer on the host",
        "Adam in host memory trains as on the GPU, and its checkpoint resumes",
        ("tests/gpu/test_optimizer_offload.py",),
        900,
    ),
    Check(
        "FP8 blocks",
        "weights quantised on the GPU equal those quantised on the CPU",
        ("tests/gpu/test_quantise.py",),
        300,
    ),
    Check(
        "broadcast",
        "a process on a second GPU receives every weight bit for bit by NCCL (needs two GPUs)",
        ("tests/gpu/test_broadcast.py",),
        600,
    ),
    Check(
        "profiling",
        "profiles have kernels, memory histories have allocations",
        ("tests/gpu/test_profiling.py",),
        300,
    ),
    Check(
        "engine memory",
        "SGLang's memory saver frees 70 % and more of what an engine holds, which generates again afterwards",
        ("tests/gpu/test_engine_memory.py",),
        900,
    ),
    Check(
        "runs",
        "trainer and engine share one GPU by CUDA IPC, step after step, and the run resumes; an engine on a second GPU "
        "gets its weights by NCCL (needs two GPUs)",
        ("tests/gpu/test_runs.py",),
        1800,
    ),
    Check(
        "benchmark: training step",
        "tokens a second of a whole step, beside TRL and a bare Hugging Face model",
        ("benchmarks.train_step",),
        1800,
        train_step_figures,
    ),
    Check(
        "benchmark: weight sync",
        "seconds of an update of a real engine, beside a plain copy of the same bytes",
        ("benchmarks.weight_sync",),
        1800,
        weight_sync_figures,
    ),
)


def rows_of_tests(check: str, report: str) -> list[Row]:
    """One row per test function of a JUnit report; parametrised cases are counted.

    Raises ValueError if the report is invalid.
    """
    try:
        cases = list(ElementTree.fromstring(report).iter("testcase"))
    except ElementTree.ParseError as error:
        raise ValueError(f"pytest's report cannot be read: {error}") from error
    functions: dict[str, list[ElementTree.Element]] = {}
    for case in cases:
        functions.setdefault(case.get("name", "").partition("[")[0], []).append(case)
    return [_row(f"{check}: {_words(name)}", group) for name, group in functions.items()]


def _row(name: str, cases: Sequence[ElementTree.Element]) -> Row:
    """Row of one function: failed if one case failed, skipped if all cases were."""
    outcomes = [_outcome(case) for case in cases]
    seconds = sum(float(case.get("time", 0)) for case in cases)
    worst: Outcome = next(one for one in ("failed", "skipped", "passed") if one in outcomes)
    notes = [f"{outcomes.count('passed')} of {len(cases)}"] if len(cases) > 1 else []
    for case in cases:
        for one in case.iter("property"):
            figure = one.get("value", "")
            if one.get("name") == "figure" and figure not in notes:
                notes.append(figure)
    if worst != "passed":
        first = cases[outcomes.index(worst)]
        parameters = first.get("name", "").partition("[")[2].removesuffix("]")
        notes.append(f"{parameters}: {_reason(first)}" if parameters else _reason(first))
    outcome = "passed" if worst == "skipped" and "passed" in outcomes else worst
    return Row(name, outcome, seconds, "; ".join(notes))


def _outcome(case: ElementTree.Element) -> Outcome:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "skipped" if case.find("skipped") is not None else "passed"


def _reason(case: ElementTree.Element) -> str:
    """The first line of a failure, or the reason of a skip."""
    for kind in ("failure", "error", "skipped"):
        found = case.find(kind)
        if found is not None:
            return (found.get("message") or "").strip().partition("\n")[0]
    return ""


def _words(function: str) -> str:
    return function.removeprefix("test_").replace("_", " ")
