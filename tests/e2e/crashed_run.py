"""A run of the tiny model on the tests' Slurm: its folder, its job, and its processes by place."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from rlpost.observe.writer import read_metrics
from slurm.states import JobInfo
from tests.cluster.jobs import job_info
from tests.cluster.lab import REPOSITORY, Lab
from tests.e2e import crash_answers
from tests.processes import living, output_of

RECIPE = "jobs/recipes/tiny.toml"
BATCH = 6
SETTINGS = (
    *("--rollout-batch-size", str(BATCH), "--n-samples-per-prompt", "4"),
    *("--global-batch-size", str(BATCH * 4), "--actor-num-gpus-per-node", "2"),
    *("--tensor-model-parallel-size", "1", "--sequence-parallel", "false"),
    *("--rollout-num-gpus", "1", "--save-interval", "2", "--async-save", "--eval-interval", "20"),
    *("--rollout-health-check-interval", "1", "--nodes", "1", "--partition", "batch"),
    *("--max-trainer-recoveries", "100000"),
    *("--max-failures", "100000", "--max-preemptions", "100000"),
    *("--max-stalled-attempts", "100000"),
)
DEADLINE_S = 600.0  # of each wait, on a machine at load 40
POLL_S = 0.1
QUERY_S = 1.0  # between two queries of Slurm about a job; a process runs three programs for each


class CrashedRun:
    """A run in a lab: its folder, the job that runs it, its processes."""

    defaults: Sequence[str] = SETTINGS

    def __init__(
        self, lab: Lab, name: str, num_steps: int, *, settings: Sequence[str] = ()
    ) -> None:
        """``settings``: flags that replace those of ``defaults``."""
        self.settings = _replaced(self.defaults, settings)
        self.lab, self.folder, self.num_steps = lab, lab.shared / name, num_steps
        self._queries: dict[str, tuple[float, JobInfo]] = {}
        self.plugin = lab.shared / f"{name}_answers.py"
        shutil.copy(str(crash_answers.__file__), self.plugin)
        self.job = self._submit()

    def flags(self, *more: str) -> list[str]:
        """Recipe and flags of the run."""
        own = ["--run-folder", str(self.folder), "--num-rollout", str(self.num_steps)]
        own += ["--custom-generate-function-path", f"{self.plugin}:answer"]
        own += ["--dynamic-sampling-filter-path", f"{self.plugin}:is_wanted"]
        return [RECIPE, *self.settings, *own, *more]

    def _submit(self, *more: str) -> str:
        command = [sys.executable, "-m", "rlpost.submit", *self.flags(*more)]
        return self.lab.run("ctl", command, cwd=REPOSITORY).stdout.split()[1]

    def bring_back(self) -> None:
        """Act as the user: resubmit the run after its job ended; release a job that Slurm holds
        after node failures.
        """
        if self.is_over:
            self.job = self._submit("--resume")
        else:
            self.lab.run("ctl", ["scontrol", "release", self.job])
        self._queries.clear()

    @property
    def ledger(self) -> list[dict]:
        path = self.folder / "ledger.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def count(self, event: str) -> int:
        return sum(line["event"] == event for line in self.ledger)

    @property
    def step(self) -> int:
        """The newest step with a metrics line; 0 before the first."""
        lines = read_metrics(self.folder / "metrics.jsonl")
        return int(lines[-1]["step"]) if lines else 0

    @property
    def is_done(self) -> bool:
        return self.count("done") > 0

    @property
    def is_ready(self) -> bool:
        """Whether the newest attempt trains."""
        newest = [line["attempt"] for line in self.ledger if line["event"] == "attempt"][-1:]
        return any(
            line["event"] == "ready" and int(line["attempt"]) in newest for line in self.ledger
        )

    def job_info(self, job: str) -> JobInfo:
        """The job as Slurm showed it at most QUERY_S ago, because waits ask again and again."""
        asked_at, info = self._queries.get(job, (-math.inf, None))
        if info is None or time.monotonic() > asked_at + QUERY_S:
            info = job_info(self.lab, job)
            self._queries[job] = time.monotonic(), info
        return info

    @property
    def is_over(self) -> bool:
        return bool(self.job_info(self.job).state.is_over)

    @property
    def is_held(self) -> bool:
        return self.job_info(self.job).reason == "JobHoldMaxRequeue"

    def attempt(self) -> Path | None:
        """The folder of the newest attempt."""
        found = sorted((self.folder / "attempts").glob("[0-9]*"), key=lambda path: int(path.name))
        return found[-1] if found else None

    def processes(self, place: str) -> list[psutil.Process]:
        """Return the living processes of a place in the newest attempt.

        The oldest comes first, because a standby driver is younger than the active one.
        """
        attempt = self.attempt()
        if attempt is None:
            return []
        logs = {"actor": "actor-*.log", "engine": "engine-*-server.log"}
        modules = {
            "driver": "rlpost.train",
            "agent": "bootstrap.agent",
            "batch shell": "slurm.batch",
        }
        if place in logs:
            wanted = {str(path) for path in attempt.glob(logs[place])}
            return [process for process in living() if output_of(process) in wanted]
        found = [
            process
            for process, line in command_lines()
            if module_of(line) == modules[place] and _holds(line, str(self.folder))
        ]
        return sorted(found, key=lambda process: process.create_time())

    def weights(self) -> str:
        return [line["weights"] for line in self.ledger if line["event"] == "done"][-1]

    def lines(self) -> list[dict[str, float]]:
        """Metrics that do not depend on a clock, the machine or an engine's rounding."""
        areas = ("step", "train", "reward", "rollout")
        return [
            {key: value for key, value in line.items() if key.split("/")[0] in areas}
            for line in read_metrics(self.folder / "metrics.jsonl")
        ]

    def finished(self) -> list[int]:
        """The prompt of each finished group; one that was finished twice is there twice."""
        return [prompt for prompt, _ in self.finished_in_time()]

    def finished_in_time(self) -> list[tuple[int, float]]:
        """Each finished group: its prompt, and when, in seconds of ``time.monotonic``."""
        lines = self.plugin.with_suffix(".finished").read_text().splitlines()
        return [(int(prompt), float(at)) for prompt, _, at in map(str.split, lines)]

    def tell(self) -> str:
        """The ends of the logs of the last attempt and of the jobs."""
        attempt = self.attempt()
        logs = [] if attempt is None else sorted(attempt.glob("*.log"))
        logs += sorted(self.folder.glob("*.out"), key=os.path.getmtime)[-2:]
        return "\n".join(
            f"--- {path}\n" + "\n".join(path.read_text().splitlines()[-15:]) for path in logs
        )


def wait_for(
    run: CrashedRun, what: str, condition: Callable[[], bool], *, deadline_s: float = DEADLINE_S
) -> None:
    """Wait until ``condition`` is true. Raises TimeoutError with the ends of the run's logs."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not in {deadline_s:g} s\n{run.tell()}")
        time.sleep(POLL_S)


def _replaced(flags: Sequence[str], by: Sequence[str]) -> list[str]:
    """Return ``flags`` without those that ``by`` repeats, followed by ``by``."""
    kept: list[str] = []
    is_kept = True
    for word in flags:
        if word.startswith("--"):
            is_kept = word not in by
        if is_kept:
            kept.append(word)
    return [*kept, *by]


def command_lines() -> Iterator[tuple[psutil.Process, list[str]]]:
    """Yield each process of this machine with the words of its command line."""
    for process in living():
        with contextlib.suppress(psutil.Error):  # it ended after it was listed
            yield process, process.cmdline()


def _holds(line: Sequence[str], text: str) -> bool:
    return any(text in word for word in line)


def module_of(line: Sequence[str]) -> str | None:
    """The module that a command line of Python runs with ``-m``; None for every other program.

    Searching for the driver's words would also find srun, the agent and keepers: the driver's
    command line is part of theirs.
    """
    if not line or not Path(line[0]).name.startswith("python"):
        return None
    options = line[1:]
    for word, following in itertools.pairwise(options):
        if word == "-m":
            return following
        if not word.startswith("-"):  # a script, or the value of an option such as -X
            return None
    return None
