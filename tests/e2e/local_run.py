"""A run on one machine, observed and disturbed from outside."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from rlpost.cli.runs import LOCAL, local_is_alive
from rlpost.observe.writer import read_metrics
from tests.e2e.runs import RECIPE, ROOT, RUN_DEADLINE_S, USER_ENVIRONMENT, process_of
from tests.processes import living, output_of

AREAS = ("step", "train", "reward", "rollout")


def end_run(folder: Path) -> None:
    """Kill the run of a folder, which outlives ``rlpost submit``: all ends with its controller."""
    entries = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    for entry in entries:
        job_id = str(entry.get("job_id", ""))
        if entry["event"] == "submitted" and job_id.startswith(LOCAL) and local_is_alive(job_id):
            os.kill(int(job_id.removeprefix(LOCAL)), signal.SIGKILL)


def num_plans_of_slices(log: str) -> int:
    """Count the plans of weight updates from shard to shard; no update may have gathered."""
    assert "all engines receive all weights" not in log
    return log.count("weight updates from shard to shard: ")


class LocalRun:
    """A run on this machine, in attempt 0.

    Its folder is ``folder/run``; relative paths of the recipe are resolved in ``home``. ``prefix`` is
    a command that runs the rest in other namespaces, where ``folder`` is ``seen_as``.
    """

    def __init__(
        self,
        folder: Path,
        settings: Sequence[str],
        *,
        recipe: str = RECIPE,
        home: Path = ROOT,
        prefix: Sequence[str] = (),
        seen_as: Path | None = None,
    ) -> None:
        self.folder = folder / "run"
        self._seen = (seen_as or folder) / "run"
        self.log = folder / "submit.log"
        command = [sys.executable, "-m", "rlpost.submit", recipe, "--local", *settings]
        command = [*prefix, *command, "--run-folder", str(self._seen)]
        environment = {**os.environ, **USER_ENVIRONMENT}
        # torch sets it in the process of the tests, to a folder that anyone can make
        environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                cwd=home,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> LocalRun:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if (self.folder / "ledger.jsonl").exists():
            end_run(self.folder)

    @property
    def step(self) -> int:
        path = self.folder / "metrics.jsonl"
        lines = read_metrics(path) if path.exists() else []
        return int(lines[-1]["step"]) if lines else -1

    @property
    def lines(self) -> list[dict[str, float]]:
        """Metrics that do not depend on time or machine."""
        return [
            {key: value for key, value in line.items() if key.split("/")[0] in AREAS}
            for line in read_metrics(self.folder / "metrics.jsonl")
        ]

    @property
    def ledger(self) -> list[dict[str, Any]]:
        return [
            json.loads(line)
            for line in (self.folder / "ledger.jsonl").read_text().split("\n")
            if line
        ]

    @property
    def recovered(self) -> list[dict[str, Any]]:
        """Entries of the ledger about recoveries, in order."""
        return [entry for entry in self.ledger if entry["event"] == "recovered"]

    @property
    def weights(self) -> list[str]:
        return [entry["weights"] for entry in self.ledger if entry["event"] == "done"]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + RUN_DEADLINE_S
        while not condition():
            assert self.process.poll() is None, f"{what}: ended\n{self.log.read_text()[-4000:]}"
            assert time.monotonic() < deadline, f"not within {RUN_DEADLINE_S:.0f} s: {what}"
            time.sleep(0.05)

    def done(self) -> None:
        assert self.process.wait(timeout=RUN_DEADLINE_S) == 0, self.log.read_text()[-8000:]

    def num_plans_of_slices(self) -> int:
        return num_plans_of_slices(self.log.read_text())

    def processes(self, log: str) -> set[int]:
        """Return the ids of processes that write a log of the attempt; ``log`` is a pattern."""
        found = set()
        for process in living():
            if re.fullmatch(rf"{self._seen}/attempts/0/{log}", output_of(process)):
                found.add(process.pid)
        return found

    def driver(self) -> psutil.Process:
        """Return the driver that works: the oldest, because its standby starts after it."""
        kept = []
        for pid in self.processes(r"driver\.log"):
            process = psutil.Process(pid)
            parent = process.parent()
            if parent is not None and "bootstrap.agent.keeper" in parent.cmdline():
                kept.append(process)
        assert kept, "no working driver"
        return min(kept, key=psutil.Process.create_time)

    def kill_a_rank_and_an_engine(self, *, after_step: int) -> None:
        """Kill a trainer rank after this step, and an engine after the ranks have recovered.

        Until then the engines must be the same processes.
        """
        attempt = self.folder / "attempts/0"
        self.until(lambda: self.step >= after_step, f"step {after_step}")
        engines = [process_of(attempt / f"engine-{index}-server.log") for index in (0, 1)]
        process_of(attempt / "actor-1.log").kill()
        self.until(lambda: "trainer recovered at step" in self.log.read_text(), "new ranks")
        assert all(engine.is_running() for engine in engines), "the same processes, by their start"
        engines[1].kill()  # at once, for few steps are left

    def assert_recovered_within_its_attempt(self) -> None:
        """Assert, after ``kill_a_rank_and_an_engine``, that both were started again, the engine with
        current weights, and that there was one attempt.
        """
        text = self.log.read_text()
        assert "1 engine restarted, at policy version" in text, text[-8000:]
        assert [entry["role"] for entry in self.recovered].count("trainer") == 1
        assert len(list((self.folder / "attempts").glob("[0-9]*"))) == 1
