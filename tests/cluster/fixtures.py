"""Pytest fixtures of the Slurm lab, for every test folder that wants a cluster.

Import them in a ``conftest.py``; each is up for one module (one to two seconds to start, half a
second to end).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.cluster.lab import Lab, why_unavailable
from tests.cluster.lab_config import LabOptions


@pytest.fixture(scope="session")
def slurm_available() -> None:
    """Skip where no lab can run, with the reason."""
    reason = why_unavailable()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def lab(slurm_available: None) -> Iterator[Lab]:
    """Four nodes of eight fake GPUs; a preempted job gets its ``--signal`` at once."""
    with Lab(4) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def lab_without_user_signal(slurm_available: None) -> Iterator[Lab]:
    """Two nodes; a preempted job's steps get TERM, its batch shell nothing."""
    with Lab(
        2, name=f"p{os.getpid()}nosignal", options=LabOptions(send_user_signal=False)
    ) as cluster:
        yield cluster
