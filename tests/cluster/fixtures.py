"""Pytest fixtures of the Slurm lab, to be imported in a ``conftest.py``.

Each module gets a new lab, which takes about two seconds to start and to end. A test with the
marker ``every_slurm`` runs on the Slurm of this machine and on that of Debian 13, or on that of
``--slurm`` alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.cluster import slurm_roots
from tests.cluster.lab import Lab, why_unavailable
from tests.cluster.lab_config import LabOptions
from tests.cluster.lab_host import LabError


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise the tests with the marker ``every_slurm``."""
    if metafunc.definition.get_closest_marker("every_slurm") is None:
        return
    releases = slurm_releases(metafunc.config)
    names = [release or "machine" for release in releases]
    metafunc.parametrize("slurm_release", releases, ids=names, indirect=True, scope="module")


def slurm_releases(config: pytest.Config) -> list[str | None]:
    """``LabOptions.slurm`` of the tests with the marker ``every_slurm``."""
    chosen = config.getoption("--slurm")
    return [chosen] if chosen else [None, "trixie"]


@pytest.fixture(scope="session")
def slurm_available() -> None:
    """Skip with the reason where no lab can run."""
    reason = why_unavailable()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def slurm_release(request: pytest.FixtureRequest, slurm_available: None) -> str | None:
    """``LabOptions.slurm`` of the module's labs; skips where this Slurm cannot be had."""
    release = getattr(request, "param", None)
    if release is not None:
        try:
            slurm_roots.find_or_make(release)
        except LabError as error:
            pytest.skip(str(error))
    return release


@pytest.fixture(scope="module")
def lab(slurm_release: str | None) -> Iterator[Lab]:
    """Four nodes with eight fake GPUs each; a preempted job gets its ``--signal`` at once."""
    with Lab(4, options=LabOptions(slurm=slurm_release)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def lab_without_user_signal(slurm_release: str | None) -> Iterator[Lab]:
    """Two nodes; at a preemption the steps get TERM and the batch shell gets no signal."""
    options = LabOptions(send_user_signal=False, slurm=slurm_release)
    with Lab(2, name=f"p{os.getpid()}nosignal", options=options) as cluster:
        yield cluster
