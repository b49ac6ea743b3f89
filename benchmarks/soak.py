"""Growth of a long run: memory, descriptors, threads, tasks, shared memory and files of each process.

    python -m benchmarks.soak [--steps 2000] [--write]

The tiny recipe on this machine: real agent, Ray, driver, graders and Megatron-core ranks.
Engines are stubs that answer at once (``benchmarks.stub_engines``), so that a step is short; weights
reach them as files. Every SAMPLE_STEPS steps all processes of the run are measured. Growth is the
slope of a line through the samples of the second half: in the first, caches and pools of connections
fill and modules load.

It ends with status 1 when descriptors, threads, tasks or shared memory grow, which no data explains.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from benchmarks.page import machine, make_parser, show, table
from benchmarks.stub_engines import started
from rlpost.config.keys import EXTERNAL_ENGINES
from rlpost.observe.writer import read_metrics
from tests.ports import free_ports
from tests.processes import living

HEADING = "## Soak"
RECIPE = "jobs/recipes/tiny.toml"
SETTINGS = (
    *("--num-gpus-per-node", "2", "--update-weight-transport", "disk", "--time", "04:00:00"),
    *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--global-batch-size", "16"),
    *("--save-interval", "50", "--eval-interval", "100"),
)
MARK = "RLPOST_SOAK"  # in the environment of every process of the run
SAMPLE_STEPS, POLL_S, START_S = 20, 0.5, 300.0
MEGA = 2**20
LIMITS = {"descriptors": 5.0, "threads": 5.0, "tasks": 5.0, "shm_mb": 1.0}
"""Growth per 1,000 steps above which the benchmark fails."""


@dataclass
class Samples:
    """Values over steps, by process and quantity."""

    steps: list[int] = field(default_factory=list)
    values: dict[tuple[str, str], dict[int, float]] = field(
        default_factory=lambda: defaultdict(dict)
    )

    def add(self, step: int, name: str, values: Mapping[str, float]) -> None:
        """Add values of a process."""
        for quantity, value in values.items():
            self.values[name, quantity][step] = value

    def growth(self, name: str, quantity: str) -> tuple[float, float, float] | None:
        """Return first and last value of the second half, and the slope per 1,000 steps."""
        since = self.steps[-1] / 2
        points = [point for point in self.values[name, quantity].items() if point[0] >= since]
        if len(points) < 3:
            return None
        at, values = np.array(points, dtype=float).T
        return values[0], values[-1], 1000.0 * float(np.polyfit(at, values, 1)[0])


class SoakRun:
    """The run, its folder and its processes."""

    def __init__(self, folder: Path, ports: Sequence[int], key: str, num_steps: int) -> None:
        self.folder, self._token = folder / "run", secrets.token_hex(8)
        command = [sys.executable, "-m", "rlpost.submit", RECIPE, "--local", *SETTINGS]
        command += ["--run-folder", str(self.folder), "--num-rollout", str(num_steps)]
        command += ["--rollout-external-engine-addrs", *(f"127.0.0.1:{port}" for port in ports)]
        self.log, self._temporary = folder / "submit.log", folder / "t"
        self._temporary.mkdir()
        environment = {**os.environ, EXTERNAL_ENGINES: key, MARK: self._token}
        environment["TMPDIR"] = str(self._temporary)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment
            )

    def end(self) -> None:
        """Kill all processes of the run, which outlives ``rlpost submit``."""
        for _, process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    @property
    def lines(self) -> list[dict[str, float]]:
        """The lines of ``metrics.jsonl``."""
        path = self.folder / "metrics.jsonl"
        return read_metrics(path) if path.exists() else []

    def processes(self) -> Iterator[tuple[str, psutil.Process]]:
        """Yield the processes of the run with their names, oldest first.

        Processes that share a log are numbered: the standby driver is "driver (2)".
        """
        found: list[tuple[float, str, psutil.Process]] = []
        for process in living():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == self._token:
                    found.append((process.create_time(), self._name(process), process))
        names: Counter[str] = Counter()
        for _, name, process in sorted(found, key=lambda one: one[0]):
            names[name] += 1
            yield name if names[name] == 1 else f"{name} ({names[name]})", process

    def _name(self, process: psutil.Process) -> str:
        """The name of its log, or else of its program."""
        log = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
        if self.folder in log.parents and log.suffix == ".log":
            is_first = process.name().startswith(("ray::", "python"))
            return log.stem if is_first else f"{log.stem}: {process.name()}"
        return process.name()

    def measure(self, step: int, into: Samples) -> None:
        """Add one sample of all processes and of files."""
        into.steps.append(step)
        for name, process in self.processes():
            with contextlib.suppress(psutil.Error):
                memory = process.memory_info()
                values = {
                    "rss_mb": (memory.rss - memory.shared) / MEGA,
                    "shm_mb": _shared_kb(process.pid) / 1024,
                    "descriptors": process.num_fds(),
                    "threads": process.num_threads(),
                }
                into.add(step, name, values)
        for name, folder in (("run folder", self.folder), ("temporary files", self._temporary)):
            sizes = _sizes(folder)
            into.add(step, name, {"files": len(sizes), "size_mb": sum(sizes) / MEGA})
        newest = self.lines[-1]
        if "driver/num_tasks" in newest:
            into.add(step, "driver", {"tasks": newest["driver/num_tasks"]})


def _shared_kb(pid: int) -> float:
    """Resident shared memory of a process (``RssShmem`` in proc(5)), in KiB."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssShmem:"):
                return float(line.split()[1])
    return 0.0


def _sizes(folder: Path) -> list[int]:
    """Sizes of all files below a folder that exist while it is read."""
    found = []
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                found.append((Path(root) / name).lstat().st_size)
    return found


def soak(folder: Path, num_steps: int) -> tuple[Samples, float]:
    """Run ``num_steps`` steps; return the samples and the seconds of all steps.

    Raises AssertionError with the end of the log when the run fails.
    """
    ports, key, samples = free_ports(2), secrets.token_hex(16), Samples()
    with started(*(["external", "--port", port] for port in ports), key=key):
        run = SoakRun(folder, ports, key, num_steps)
        began, first, newest = time.monotonic(), 0.0, 0
        try:
            while run.process.poll() is None:
                time.sleep(POLL_S)
                lines = run.lines
                step = int(lines[-1]["step"]) if lines else 0
                assert step or time.monotonic() < began + START_S, run.log.read_text()[-3000:]
                first = first or (time.monotonic() if step else 0.0)
                if step // SAMPLE_STEPS > newest // SAMPLE_STEPS:
                    newest = step
                    run.measure(step, samples)
            assert run.process.returncode == 0, run.log.read_text()[-3000:]
            return samples, time.monotonic() - first
        finally:
            run.end()


def section(samples: Samples, num_steps: int, seconds: float) -> tuple[list[str], list[str]]:
    """Return the lines of the page, and those quantities that grow without data."""
    rows, grown = list[Sequence[str]](), list[str]()
    for name, quantity in sorted(samples.values):
        growth = samples.growth(name, quantity)
        if growth is None:
            continue
        first, last, slope = growth
        rows.append((name, quantity, f"{first:.1f}", f"{last:.1f}", f"{slope:+.1f}"))
        if slope > LIMITS.get(quantity, float("inf")):
            grown.append(f"{name}: {quantity} {slope:+.1f} per 1,000 steps")
    lines = [
        "```bash",
        f"python -m benchmarks.soak --steps {num_steps} --write",
        "```",
        "",
        f"{num_steps:,} steps of 16 answers in {seconds / 60:.1f} minutes ({machine()}). Megabytes or counts at a",
        "half of the run and at its end; growth per 1,000 steps is the slope of a line through all these",
        "samples. What grows without being data of the run: `gcs_server` keeps the events of Ray's last 100,000 tasks",
        "(`RAY_task_events_max_num_task_in_gcs`).",
        "",
        *table(("process", "quantity", "at half", "at the end", "growth"), rows),
    ]
    return lines, grown


def main() -> int:
    """Run and print the table."""
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-", dir="/var/tmp") as folder:
        samples, seconds = soak(Path(folder), options.steps)
    lines, grown = section(samples, options.steps, seconds)
    show(HEADING, lines, write=options.write)
    print(json.dumps({"steps": options.steps, "seconds": round(seconds), "grown": grown}))
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
