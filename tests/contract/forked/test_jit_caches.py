"""The libraries read the variables that move their caches of compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.jit_caches import BASE, cache_variables


def folders_of_libraries(base: str, triton_folder: str) -> tuple[dict[str, str], str, str]:
    """Return SGLang's defaults, and the folders of DeepGEMM and Triton, given two variables."""
    import triton.knobs
    from sglang.srt.environ import envs, third_party_cache_defaults

    os.environ[BASE] = base
    defaults = third_party_cache_defaults()
    os.environ["TRITON_CACHE_DIR"] = triton_folder
    return defaults, envs.SGLANG_DG_CACHE_DIR.get(), triton.knobs.cache.dir


def test_the_folders_are_those_that_sglang_chooses(forked):
    ours = cache_variables({}, Path("/disk"))
    theirs, of_deep_gemm, of_triton = forked.call(
        folders_of_libraries, ours[BASE], ours["TRITON_CACHE_DIR"]
    )
    assert ours.keys() - theirs.keys() == {BASE, "TVM_FFI_CACHE_DIR"}
    assert {name: ours[name] for name in ours.keys() & theirs.keys()}.items() <= theirs.items()
    assert of_deep_gemm == "/disk/deep_gemm"
    assert of_triton == "/disk/triton"


def test_tvm_ffi_reads_its_variable():
    """A whole build would need a compiler for CUDA."""
    extension = pytest.importorskip("tvm_ffi.cpp.extension")
    assert '"TVM_FFI_CACHE_DIR"' in Path(extension.__file__).read_text()
