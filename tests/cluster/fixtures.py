"""Pytest fixtures of the Slurm lab, to be imported in a ``conftest.py``.

Each module gets a new lab, which takes about two seconds to start and to end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.cluster.lab import Lab, why_unavailable
from tests.cluster.lab_config import LabOptions


@pytest.fixture(scope="session")
def slurm_available() -> None:
    """Skip with the reason where no lab can run."""
    reason = why_unavailable()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def lab(slurm_available: None) -> Iterator[Lab]:
    """Four nodes with eight fake GPUs each; a preempted job gets its ``--signal`` at once."""
    with Lab(4) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def lab_without_user_signal(slurm_available: None) -> Iterator[Lab]:
    """Two nodes; at a preemption the steps get TERM and the batch shell gets no signal."""
    with Lab(
        2, name=f"p{os.getpid()}nosignal", options=LabOptions(send_user_signal=False)
    ) as cluster:
        yield cluster
