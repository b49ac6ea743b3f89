"""A run on this machine without Slurm, whose processes a test may kill."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import psutil

from rlpost.metrics.writer import read_metrics
from tests.e2e.runs import RECIPE, ROOT


class LocalRun:
    """A run on this machine, in attempt 0; a context manager that ends it."""

    def __init__(self, folder, settings, environment=None, *, deadline_s=300):
        self.deadline_s = deadline_s  # of each wait
        self.folder = folder / "run"
        self.log = folder / "submit.log"
        command = [sys.executable, "-m", "rlpost.submit", RECIPE, "--local", *settings]
        command += ["--run-folder", str(self.folder)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @property
    def step(self):
        path = self.folder / "metrics.jsonl"
        lines = read_metrics(path) if path.exists() else []
        return int(lines[-1]["step"]) if lines else -1

    @property
    def ledger(self):
        return [
            json.loads(line)
            for line in (self.folder / "ledger.jsonl").read_text().split("\n")
            if line
        ]

    @property
    def weights(self):
        return [entry["weights"] for entry in self.ledger if entry["event"] == "done"]

    def until(self, condition, what):
        deadline = time.monotonic() + self.deadline_s
        while not condition():
            assert self.process.poll() is None, f"{what}: the run has ended"
            assert time.monotonic() < deadline, f"not within {self.deadline_s} s: {what}"
            time.sleep(0.05)

    def done(self):
        code = self.process.wait(timeout=self.deadline_s)
        assert code == 0, self.log.read_text()[-4000:]
        return self

    def processes(self, log):
        """Processes whose output is a log of the attempt."""
        found = set()
        for process in psutil.process_iter():
            try:
                output = os.readlink(f"/proc/{process.pid}/fd/1")
                if re.fullmatch(rf"{self.folder}/attempts/0/{log}", output):
                    found.add(process.pid)
            except OSError:
                continue
        return found

    def driver(self):
        """The driver that works: it has a router and graders, which a standby has not."""
        for pid in self.processes(r"driver\.log"):
            process = psutil.Process(pid)
            parent = process.parent()
            is_kept = parent is not None and "bootstrap.agent.keeper" in parent.cmdline()
            if is_kept and process.children():
                return process
        raise AssertionError("no driver works")
