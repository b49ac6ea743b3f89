"""Checks that need one GPU.

``RLPOST_GPU_TESTS_ON=cpu`` runs them without a GPU, to test everything but the device. A check states
with ``pytest.mark.needs(*packages, gpus=1, cuda=False)`` what it cannot run without, and is skipped
with the reason where that is missing.
"""

from __future__ import annotations

import importlib.metadata
import os

import pytest

from tests.contract.conftest import secret_of_ranks  # noqa: F401

ON_CPU = os.environ.get("RLPOST_GPU_TESTS_ON") == "cpu"


def lacking(packages: tuple[str, ...], *, gpus: int = 1, cuda: bool = False) -> str:
    """Return what is missing for a check; empty if nothing is.

    Args:
        packages: names of distributions, as pip lists them.
        gpus: that it uses; on the CPU processes take their place.
        cuda: it has no meaning on the CPU.
    """
    import torch

    for name in packages:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return f"{name} is not installed"
    has_cuda = torch.cuda.is_available()
    if cuda and not has_cuda:
        return "it needs CUDA"
    if has_cuda and torch.cuda.device_count() < gpus:
        return f"it needs {gpus} GPUs"
    return ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a check whose needs are not met."""
    for mark in item.iter_markers("needs"):
        if reason := lacking(mark.args, **mark.kwargs):
            pytest.skip(reason)


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
