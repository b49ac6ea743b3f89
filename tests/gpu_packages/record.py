"""Record that the packages of the GPU lock passed: ``python -m tests.gpu_packages.record``.

Runs the tests of this folder and writes tools/locks/gpu_tested.json, which a unit test compares with
the lock: a new lock is never untested.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCK, RECORD = ROOT / "tools/locks/gpu.txt", ROOT / "tools/locks/gpu_tested.json"
NAMED = ("torch", "sglang", "megatron-core", "transformer-engine", "sgl-deep-ep", "cuda-tile")
"""Packages whose version is in the record; "missing" if it could not be installed."""


class Outcomes:
    """A plug-in of pytest that keeps the outcome of each test."""

    def __init__(self) -> None:
        self.tests: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the outcome of the call, or that of a set-up that failed or skipped it."""
        if report.when == "call" or report.outcome != "passed":
            self.tests[report.nodeid.rpartition("/")[2]] = report.outcome


def digest(lock: Path) -> str:
    """Return the SHA-256 of a lock file."""
    return hashlib.sha256(lock.read_bytes()).hexdigest()


def version(package: str) -> str:
    """Return the installed version of a package, or "missing"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def main() -> int:
    """Run the tests and write the record; return pytest's exit code."""
    outcomes = Outcomes()
    code = pytest.main(["-q", "-p", "no:cacheprovider", "tests/gpu_packages"], [outcomes])
    if not code:
        record = {
            "lock": digest(LOCK),
            "python": platform.python_version(),
            "packages": {name: version(name) for name in NAMED},
            "tests": outcomes.tests,
        }
        RECORD.write_text(json.dumps(record, indent=2) + "\n")
        print(f"{RECORD.relative_to(ROOT)}: written")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
