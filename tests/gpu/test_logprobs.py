"""Log-probs by Triton's kernels on the device, compared with those by operators."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlpost.trainer import logprobs, parallel
from tests.contract.logprob_kernels import Group, of_rank

ROWS, WIDTH, VALID = 300, 151_936, 151_669
"""The columns of Qwen3, and its tokens."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_the_kernels_of_log_probs_equal_the_operators(
    device: str, dtype: torch.dtype, with_entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values within 1e-5, gradients within one rounding of their type."""
    if device == "cpu":
        pytest.skip("Triton needs CUDA; tests/contract/test_triton_kernels.py runs its interpreter")
    monkeypatch.setattr(parallel, "tensor_parallel_group", lambda: Group(0, 1))
    generator = torch.Generator(device).manual_seed(3)
    logits = torch.randn(ROWS, WIDTH, generator=generator, device=device).mul_(5).to(dtype)
    index = torch.arange(10, ROWS, 2, device=device)
    rows = logprobs.LogitRows(index, index * 7, 0.7, num_valid=VALID, chunk_size=64)
    expected = of_rank(logits, rows, with_entropy=with_entropy)
    found = of_rank(logits, replace(rows, fused=True), with_entropy=with_entropy)
    torch.testing.assert_close(found[:2], expected[:2], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found[2], expected[2], rtol=2**-7, atol=1e-6)
