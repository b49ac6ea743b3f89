"""A driver that is killed twice while it generates and trains: real Ray, Megatron, SGLang, router.

Each answer is requested from an engine, but its text is a function of the prompt, so that two runs
can be compared bit for bit (benchmarks/crash_answers.py).
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import psutil

from benchmarks import crash_answers
from rlpost.metrics.writer import read_metrics
from tests.e2e.runs import RECIPE, ROOT

NUM_STEPS, DEADLINE_S = 8, 300
KILLED_AFTER = (3, 6)  # steps; a checkpoint every 4, so that steps are trained again
SETTINGS = (
    *("--num-rollout", str(NUM_STEPS), "--save-interval", "4", "--eval-interval", "none"),
    *("--rollout-batch-size", "8", "--n-samples-per-prompt", "4", "--global-batch-size", "32"),
    *("--rm-type", "exact_match"),
)
AREAS = ("step", "train", "reward", "rollout")


class LocalRun:
    """A run on this machine, in attempt 0."""

    def __init__(self, folder):
        self.folder = folder / "run"
        self.plugin = shutil.copy(crash_answers.__file__, folder / "answers.py")
        command = [sys.executable, "-m", "rlpost.submit", RECIPE, "--local", *SETTINGS]
        command += ["--run-folder", str(self.folder)]
        command += ["--custom-generate-function-path", f"{self.plugin}:answer"]
        command += ["--dynamic-sampling-filter-path", f"{self.plugin}:is_wanted"]
        with (folder / "submit.log").open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
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
    def lines(self):
        """Metrics without what a clock or the machine says."""
        return [
            {key: value for key, value in line.items() if key.split("/")[0] in AREAS}
            for line in read_metrics(self.folder / "metrics.jsonl")
        ]

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

    @property
    def finished(self):
        """The prompt of each group that was finished, in the order of their numbers."""
        lines = (self.folder.parent / "answers.finished").read_text().splitlines()
        return sorted(int(line.split()[0]) for line in lines)

    def until(self, condition, what):
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert self.process.poll() is None, f"{what}: the run has ended"
            assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}"
            time.sleep(0.05)

    def done(self):
        assert self.process.wait(timeout=DEADLINE_S) == 0
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


def test_a_driver_killed_twice_leaves_the_run_of_one_that_lived(assets, tmp_path):
    """Engines are the same processes to the end; weights, metrics and prompts are equal, and no
    finished group is generated again.
    """
    (tmp_path / "undisturbed").mkdir()
    (tmp_path / "killed").mkdir()
    with LocalRun(tmp_path / "undisturbed") as undisturbed:
        undisturbed.done()
    engines = []
    with LocalRun(tmp_path / "killed") as run:
        for number, step in enumerate(KILLED_AFTER, start=1):
            run.until(lambda: run.step >= step, f"step {step}")  # noqa: B023
            engines.append(run.processes(r"engine-\d+-server\.log"))
            run.driver().kill()
            killed_at, reached = time.monotonic(), run.step
            run.until(lambda: run.step > reached, "a newly trained step")  # noqa: B023
            seconds = time.monotonic() - killed_at
            print(f"KILL {number} to the driver: {seconds:.1f} s to a newly trained step")
        engines.append(run.processes(r"engine-\d+-server\.log"))
        run.done()
    assert engines[0] and engines[0] == engines[1] == engines[2]
    assert not run.processes(r".*\.log"), "detached workers end with the attempt"
    assert run.weights == undisturbed.weights
    assert run.lines == undisturbed.lines and len(run.lines) >= NUM_STEPS
    assert len(set(run.finished)) == len(run.finished)
    assert set(run.finished) == set(undisturbed.finished)
    events = [entry["event"] for entry in run.ledger]
    assert (events.count("started"), events.count("ready")) == (1, 1)
    recovered = [entry for entry in run.ledger if entry["event"] == "recovered"]
    print("recovered after", [entry["seconds"] for entry in recovered], "s; load", os.getloadavg())
    assert [(entry["role"], entry["incarnation"]) for entry in recovered] == [
        ("driver", 1),
        ("driver", 2),
    ]
