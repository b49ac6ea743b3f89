"""The libraries read the variables that move their caches of compiled kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.jit_caches import BASE, cache_variables
from rlpost.rollout.server import use_stand_ins


def test_the_folders_are_those_that_sglang_chooses(monkeypatch):
    use_stand_ins()
    import triton.knobs
    from sglang.srt.environ import envs, third_party_cache_defaults

    ours = cache_variables({}, Path("/disk"))
    monkeypatch.setenv(BASE, ours[BASE])
    theirs = third_party_cache_defaults()
    assert ours.keys() - theirs.keys() == {BASE, "TVM_FFI_CACHE_DIR"}
    assert {name: ours[name] for name in ours.keys() & theirs.keys()}.items() <= theirs.items()
    assert envs.SGLANG_DG_CACHE_DIR.get() == "/disk/deep_gemm"
    monkeypatch.setenv("TRITON_CACHE_DIR", ours["TRITON_CACHE_DIR"])
    assert triton.knobs.cache.dir == "/disk/triton"


def test_tvm_ffi_reads_its_variable():
    """A whole build would need a compiler for CUDA."""
    extension = pytest.importorskip("tvm_ffi.cpp.extension")
    assert '"TVM_FFI_CACHE_DIR"' in Path(extension.__file__).read_text()
