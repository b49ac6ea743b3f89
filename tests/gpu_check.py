"""Run the checks that need a GPU, and print an answer for each: ``python -m tests.gpu_check``.

A check is a file of tests/gpu. This module starts pytest, and is a plug-in of it (``-p
tests.gpu_check``) that runs each file in a separate process with a time limit, because a kernel fault
destroys the CUDA context of its process. The summary has a sentence for each test function, with the
figures that it recorded (``record_property("figure", ...)``) or the reason; results.json has the same
and the facts of the machine, to paste into an issue. A check that lacks memory, time, packages or a
second GPU has neither passed nor failed: it is not run, with that reason.

The exit code is 0 if no check failed, 1 if one did, and 2 if no check can run on this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.predicted import compared_table

ROOT = Path(__file__).parents[1]
FILES = {path.stem.removeprefix("test_"): path for path in ROOT.glob("tests/gpu/test_*.py")}
ORDER = (
    "runs",
    "engine_memory",
    "facts",
    "attention_kernels",
    "logprobs",
    "memory",
    "quantise",
    "optimizer_offload",
    "actor",
    "predictions",
    "benchmarks",
    "broadcast",
    "profiling",
)
"""By worth: does a run work, what would break it in silence, then figures."""
ENGINES = ("runs", "engine_memory", "broadcast")
"""Checks that are left out with ``--part trainer``."""
PROCESSES = {"actor": 6}
"""Checks of many small worlds, of which none reads the memory of the GPU: so many at a time."""
RANKS_DEADLINE_S = 600.0
LIMIT_S = 1800.0
MINUTES = 14.0  # for all checks, so that they and the summary fit into 15
SHORTEST_S = 30.0  # no check is begun with less time
NOT_RUN = "not run"
OUT_OF_MEMORY = "CUDA out of memory"
"""Words of torch's error, which a rank or a benchmark passes on as text."""
PACKAGES = (
    "megatron-core",
    "transformer-engine",
    "sglang",
    "torch-memory-saver",
    "ray",
    "fla-core",
)
REMEDY = "on a machine with a GPU: make install, then make test-gpu; --on-cpu tries the checks without one"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu_check", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=sorted(FILES), metavar="CHECK", help=", ".join(sorted(FILES)))
    add(
        "--part",
        choices=("all", "trainer"),
        default="all",
        help="trainer: without engines, for a machine that reaches no package registry; torch, "
        "megatron-core and transformers are enough",
    )
    add("--on-cpu", action="store_true", help="run them on the CPU, to test all but the device")
    add("--out", type=Path, metavar="FOLDER", help="for logs and results.json (default: in runs/)")
    add("--minutes", type=float, default=MINUTES, metavar="N", help="time for all checks (14)")
    add("--began", type=float, metavar="S", help="second of the epoch from which they count")
    add("--timeout-s", type=float, default=LIMIT_S, metavar="S", help="limit of each check")
    options = parser.parse_args(arguments)
    if options.on_cpu:
        os.environ["RLPOST_GPU_TESTS_ON"] = "cpu"
    elif obstacles := obstacles_of(machine_facts()):
        print(f"gpu_check: {'; '.join(obstacles)}; {REMEDY}", file=sys.stderr)
        return 2
    folder = options.out or ROOT / "runs" / f"gpu-check-{datetime.now():%Y%m%d-%H%M%S}"
    words = [f"--gpu-results={folder}", f"--gpu-limit-s={options.timeout_s}"]
    left_out = ENGINES if options.part == "trainer" else ()
    spent_s = max(0.0, time.time() - options.began) if options.began else 0.0
    words.append(f"--gpu-minutes={options.minutes - spent_s / 60:.2f}")
    names = options.only or [name for name in ORDER if name not in left_out]
    files = [str(FILES[name]) for name in names]
    return int(pytest.main([*files, "-p", "tests.gpu_check", "-p", "no:cacheprovider", *words]))


# --- the plug-in


@dataclass(frozen=True)
class Answer:
    """What one test function found: its figures, or why it has none."""

    check: str
    sentence: str
    outcome: str
    seconds: float
    note: str

    def __str__(self) -> str:
        note = f": {self.note}" if self.note else ""
        return f"{self.outcome:<8}{self.sentence}{note} ({self.check}, {self.seconds:.1f} s)"


def pytest_addoption(parser: pytest.Parser) -> None:
    """See pytest."""
    parser.addoption("--gpu-results", type=Path, help="folder of logs and results.json")
    parser.addoption("--gpu-limit-s", type=float, default=LIMIT_S, help="of the process of a file")
    parser.addoption("--gpu-minutes", type=float, default=MINUTES, help="time for all files")
    parser.addoption("--gpu-reports", type=Path, help=argparse.SUPPRESS)  # of a file's process


def pytest_configure(config: pytest.Config) -> None:
    """See pytest."""
    reports: Path | None = config.getoption("--gpu-reports")
    plugin = Files(config) if reports is None else Reports(config, reports)
    config.pluginmanager.register(plugin)


class Reports:
    """In the process of a file: writes each report, so that a fault loses none of them."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self._config, self._path = config, path

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Skip a check that this GPU has too little memory for."""
        report = yield
        if report.failed and call.excinfo is not None and OUT_OF_MEMORY in str(call.excinfo.value):
            report.outcome = "skipped"
            report.longrepr = (str(item.path), 0, "too little memory of the GPU for it")
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if hasattr(self._config, "workerinput"):
            return  # the process that started this one gets all reports
        hook = self._config.hook
        document = hook.pytest_report_to_serializable(config=self._config, report=report)
        with self._path.open("a") as file:
            file.write(json.dumps(document) + "\n")


class Files:
    """Runs each file of tests in a separate process, and summarises the reports of all."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._folder: Path = (config.getoption("--gpu-results") or Path("runs/gpu-check")).resolve()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._minutes: float = config.getoption("--gpu-minutes")
        self._deadline = time.monotonic() + 60 * self._minutes
        self._ends: dict[Path, str] = {}
        self._left: set[Path] = set()  # files that there was no time for, or not enough
        self._reports: dict[str, list[pytest.TestReport]] = {}
        self._summarised: dict[str, list[pytest.TestReport]] = {}
        # as an interrupt, so that a running check is killed as well
        signal.signal(signal.SIGTERM, signal.default_int_handler)

    def pytest_runtest_protocol(self, item: pytest.Item) -> bool:
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        if item.path not in self._ends:
            items = [one.nodeid for one in item.session.items if one.path == item.path]
            self._ends[item.path] = self._run(item.path, items)
        reports = self._reports.pop(item.nodeid, [])
        if not any(report.when == "teardown" for report in reports):  # its process has ended before
            reports.append(self._unfinished(item))
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _unfinished(self, item: pytest.Item) -> pytest.TestReport:
        """The report of a test whose process has ended before, or never began."""
        reason: Any = self._ends[item.path]
        if item.path not in self._left:
            return pytest.TestReport(item.nodeid, item.location, {}, "failed", reason, "call")
        skip = (str(item.path), 0, reason)
        return pytest.TestReport(item.nodeid, item.location, {}, "skipped", skip, "call")

    def _run(self, path: Path, items: Sequence[str]) -> str:
        """Run the items of a file, and keep their reports; return how the process ended."""
        name = path.stem.removeprefix("test_")
        remedy = f"--minutes {self._minutes:g} are over: python -m tests.gpu_check --only {name}"
        left_s = self._deadline - time.monotonic()
        limit_s = min(self._config.getoption("--gpu-limit-s"), left_s)
        if left_s < SHORTEST_S:
            self._left.add(path)
            return remedy
        log, reports = self._folder / f"{path.stem}.log", self._folder / f"{path.stem}.jsonl"
        reports.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", *items, f"--rootdir={self._config.rootpath}"]
        command += ["-q", "-p", "tests.gpu_check", "-p", "no:cacheprovider"]
        processes = min(PROCESSES.get(name, 1), (os.cpu_count() or 1) // 2)
        if processes > 1 and version("pytest-xdist"):
            command += ["-n", str(processes)]
        search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        with log.open("w") as output:
            process = subprocess.Popen(
                [*command, f"--gpu-reports={reports}"],
                cwd=self._config.rootpath,
                env=os.environ
                | {"PYTHONPATH": search, "PYTHONUNBUFFERED": "1"}
                | {"RLPOST_RANKS_DEADLINE_S": str(RANKS_DEADLINE_S)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(limit_s)
                end = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            except subprocess.TimeoutExpired:
                end = f"no end after {limit_s:.3g} s"
                if limit_s == left_s:
                    self._left.add(path)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for line in reports.read_text().splitlines() if reports.exists() else ():
            report = self._config.hook.pytest_report_from_serializable(
                config=self._config, data=json.loads(line)
            )
            if isinstance(report.longrepr, list):  # JSON has no tuples; of a skip
                report.longrepr = tuple(report.longrepr)
            self._reports.setdefault(report.nodeid, []).append(report)
        return remedy if path in self._left else f"{end}: {_last_lines(log)}; see {log}"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._summarised.setdefault(report.nodeid.partition("[")[0], []).append(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Exit with 2 where no check ran: nothing is known of this machine."""
        outcomes = {_answer(name, each).outcome for name, each in self._summarised.items()}
        if outcomes == {NOT_RUN} and not session.exitstatus:
            session.exitstatus = 2

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        answers = [_answer(name, reports) for name, reports in self._summarised.items()]
        facts, results = machine_facts(), self._folder / "results.json"
        compared = _compared(self._summarised)
        document = {"machine": facts, "answers": [asdict(one) for one in answers]}
        document["compared"] = compared
        results.write_text(json.dumps(document, indent=1) + "\n")
        terminalreporter.section("answers")
        for line in (*answers, "", *(f"{name}: {value}" for name, value in facts.items())):
            terminalreporter.write_line(str(line))
        for line in compared_table(compared):
            terminalreporter.write_line(line)
        counts = Counter(one.outcome for one in answers)
        named = ("passed", "failed", NOT_RUN)
        terminalreporter.write_line(", ".join(f"{counts[name]} {name}" for name in named))
        terminalreporter.write_line(f"paste into an issue: {results}")


def _compared(reports: Mapping[str, Sequence[pytest.TestReport]]) -> list[Any]:
    """Name, predicted and measured seconds of all that tests recorded as ``compared``."""
    rows = []
    for each in reports.values():
        for report in each:
            rows += [value for key, value in report.user_properties if key == "compared"]
    return rows


def _answer(function: str, reports: Sequence[pytest.TestReport]) -> Answer:
    """The answer of all cases of a function: failed if one failed, not run if none was."""
    outcomes: dict[str, set[str]] = {}
    for report in reports:
        outcomes.setdefault(report.nodeid, set()).add(report.outcome)
    num_passed = sum(outcome == {"passed"} for outcome in outcomes.values())
    has_failed = any("failed" in outcome for outcome in outcomes.values())
    outcome = "failed" if has_failed else "passed" if num_passed else NOT_RUN
    notes = [f"{num_passed} of {len(outcomes)}"] if len(outcomes) > 1 else []
    for report in reports:
        notes += [value for key, value in report.user_properties if key == "figure"]
    notes += [_reason(report) for report in reports if not report.passed]
    path, _, name = function.partition("::")
    sentence = name.removeprefix("test_").replace("_", " ").capitalize()
    seconds = sum(report.duration for report in reports)
    check = Path(path).stem.removeprefix("test_")
    return Answer(check, sentence, outcome, seconds, "; ".join(dict.fromkeys(notes)))


def _reason(report: pytest.TestReport) -> str:
    """The case, and the first line of its failure or the reason of its skip."""
    error = report.longrepr
    crash = getattr(error, "reprcrash", None)
    text = error[2] if isinstance(error, tuple) else getattr(crash, "message", str(error))
    case = report.nodeid.partition("[")[2].removesuffix("]")
    line = text.removeprefix("Skipped: ").strip().partition("\n")[0]
    return f"{case}: {line}" if case else line


def _last_lines(log: Path, count: int = 3) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return " / ".join([line for line in lines if line][-count:])


# --- the machine


def machine_facts() -> dict[str, Any]:
    """Driver, torch, GPUs and packages; None: missing. Creates no CUDA context."""
    facts: dict[str, Any] = {"driver": None, "GPUs": [], "torch": None, "CUDA of torch": None}
    with contextlib.suppress(Exception):  # no package, no driver, no permission
        import pynvml as nvml

        nvml.nvmlInit()
        facts["driver"] = nvml.nvmlSystemGetDriverVersion()
        for number in range(nvml.nvmlDeviceGetCount()):
            gpu = nvml.nvmlDeviceGetHandleByIndex(number)
            size = nvml.nvmlDeviceGetMemoryInfo(gpu).total / 1e9
            facts["GPUs"].append(f"{nvml.nvmlDeviceGetName(gpu)} {size:.0f} GB")
    with contextlib.suppress(ImportError, OSError):  # a library of CUDA that does not load
        import torch

        facts["torch"], facts["CUDA of torch"] = torch.__version__, torch.version.cuda
        facts["GPUs for torch"] = torch.cuda.device_count()
    facts |= {name: version(name) for name in PACKAGES}
    with contextlib.suppress(ImportError):  # a package of the project that the image lacks
        from bootstrap.preflight.probe import read_nvcc

        facts["nvcc"] = read_nvcc(os.environ) or None
    return {"nvcc": None} | facts | {"CPU cores": os.cpu_count()}


def version(package: str) -> str | None:
    """Return the installed version of a package; None without it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def obstacles_of(facts: dict[str, Any]) -> list[str]:
    """Why no check can run, and what else is missing; empty if checks can run."""
    answers = facts["driver"] or facts.get("GPUs for torch")  # nvidia-ml-py may be missing
    found = [] if answers else ["no NVIDIA driver answers"]
    if facts["torch"] is None:
        found.append("torch cannot be imported")
    elif facts["CUDA of torch"] is None:
        found.append(f"torch {facts['torch']} is built without CUDA")
    elif not facts["GPUs for torch"]:
        found.append(f"torch {facts['torch']} finds no GPU")
    missing = [f"{name} is not installed" for name in PACKAGES if facts[name] is None]
    if facts["nvcc"] is None:
        missing.append("no nvcc is found, and engines compile kernels when they start")
    return [*found, *missing] if found else []


if __name__ == "__main__":
    sys.exit(main())
