"""Triton's kernels compute what torch's operators do, for outputs and gradients.

Triton's interpreter runs them on a CPU: those of flash-linear-attention, and those of log-probs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract import delta_kernels, logprob_kernels

ROOT = Path(__file__).parents[2]


MODULES = (delta_kernels, logprob_kernels)


@pytest.mark.timeout(300)
def test_the_kernels_compute_outputs_and_gradients_of_the_operators() -> None:
    """In a separate process: Triton reads the variable when it is imported."""
    names = ", ".join(module.__name__ for module in MODULES)
    program = f"import {names}\n" + "\n".join(f"{one.__name__}.main()" for one in MODULES)
    environ = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    equal = [f"equal: {', '.join(names)}" for names in (delta_kernels.NAMES, logprob_kernels.CASES)]
    assert done.stdout.splitlines() == equal


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_kernels_of_log_probs_compile_for_every_gpu(
    capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a device, by the compiler that Triton brings."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert logprob_kernels.compiled(capability) == ["_sums_kernel", "_gradient_kernel"]
