"""Fixtures that the contract tests share: a tiny model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
START_DEADLINE_S = 600.0  # on a machine that is busy with other work


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the tiny model and its problems; return their folder.

    The warm-up is too short for answers that are often right, and long enough for distributions
    that are not uniform.
    """
    folder = tmp_path_factory.mktemp("tiny")
    words = ["--out", str(folder), "--warmup-steps", "60"]
    subprocess.run([sys.executable, "-m", "rlpost.cli.tiny_model", *words], cwd=ROOT, check=True)
    return folder
