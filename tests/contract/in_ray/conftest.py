"""Fixture of a node of a real Ray, started once for the tests of this folder.

These tests run in one process, one file after the other (``tests/conftest.py``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.ray_sessions import disable_authentication

ray = pytest.importorskip("ray")

NUM_GPUS = 4


@pytest.fixture(scope="package")
def node() -> Iterator[dict[str, Any]]:
    """The node, with NUM_GPUS logical GPUs. Each test kills its workers, so that all are free."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    disable_authentication()
    ray.init(
        num_cpus=1,
        num_gpus=NUM_GPUS,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 1024**2,
    )
    yield ray.nodes()[0]
    ray.shutdown()
