"""Checks that need one GPU.

``RLPOST_GPU_TESTS_ON=cpu`` runs them without a GPU, to test everything but the device.
"""

from __future__ import annotations

import os

import pytest

from tests.contract.conftest import secret_of_ranks  # noqa: F401

ON_CPU = os.environ.get("RLPOST_GPU_TESTS_ON") == "cpu"


@pytest.fixture(scope="session", autouse=True)
def device() -> str:
    """Return "cuda"; without CUDA skip the test, or return "cpu" if that is requested."""
    import torch

    if torch.cuda.is_available():
        torch.backends.cuda.matmul.allow_tf32 = False
        return "cuda"
    if not ON_CPU:
        pytest.skip("no CUDA device here; RLPOST_GPU_TESTS_ON=cpu runs the same checks on the CPU")
    return "cpu"
