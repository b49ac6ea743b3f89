"""Run Python in a process as a GPU node starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.gpu_packages.conftest import VARIABLE

ROOT = Path(__file__).resolve().parents[2]


def run(code: str, **environ: str) -> str:
    """Return what ``code`` prints in a new process; fail with its error."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        env=os.environ | {"LD_LIBRARY_PATH": os.environ[VARIABLE], **environ},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
