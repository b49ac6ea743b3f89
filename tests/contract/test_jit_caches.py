"""The libraries read the variables that move their caches of compiled kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.jit_caches import FOLDERS
from rlpost.rollout.server import use_stand_ins


def test_sglang_and_triton_read_the_variables(monkeypatch):
    """SGLang moves the caches of other libraries below its own, except where a variable is set."""
    use_stand_ins()
    import triton.knobs
    from sglang.srt.environ import envs, third_party_cache_defaults

    for name, below in FOLDERS.items():
        monkeypatch.setenv(name, f"/disk/{below}")
    moved = third_party_cache_defaults()
    assert moved.keys() >= {"FLASHINFER_WORKSPACE_BASE", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH"}
    assert all(path.startswith("/disk/sglang") for path in moved.values())
    assert envs.SGLANG_DG_CACHE_DIR.get() == "/disk/sglang/deep_gemm"
    assert triton.knobs.cache.dir == "/disk/triton"


def test_tvm_ffi_reads_its_variable():
    """A whole build would need a compiler for CUDA."""
    extension = pytest.importorskip("tvm_ffi.cpp.extension")
    assert '"TVM_FFI_CACHE_DIR"' in Path(extension.__file__).read_text()
