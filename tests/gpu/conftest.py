"""The checks of one GPU.

``RLPOST_GPU_TESTS_ON=cpu`` runs them without one, so that all but the device is tried.
"""

from __future__ import annotations

import os

import pytest

ON_CPU = os.environ.get("RLPOST_GPU_TESTS_ON") == "cpu"


@pytest.fixture(scope="session", autouse=True)
def device() -> str:
    """cuda; on a machine without it the test is skipped, or runs on the CPU if asked to."""
    import torch

    if torch.cuda.is_available():
        torch.backends.cuda.matmul.allow_tf32 = False
        return "cuda"
    if not ON_CPU:
        pytest.skip("no CUDA device here; RLPOST_GPU_TESTS_ON=cpu runs the same checks on the CPU")
    return "cpu"
