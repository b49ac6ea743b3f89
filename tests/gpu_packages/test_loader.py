"""Libraries that are loaded before Python starts, where the loader's cache has no CUDA toolkit."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.gpu_packages.conftest import VARIABLE
from tests.gpu_packages.processes import ROOT

CODE = """
import os
from common import cuda_runtime
print(repr(cuda_runtime.preload_problem(os.environ, "13.0")))
cuda_runtime.with_runtime = dict
print(repr(cuda_runtime.preload_problem(os.environ, "13.0")))
"""
BARE = 'mount --bind /dev/null /etc/ld.so.cache && exec "$@"'


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to hide the loader's cache")
def test_the_library_that_engines_preload_finds_the_runtime_of_the_wheels() -> None:
    words = ["unshare", "-m", "sh", "-c", BARE, "sh", sys.executable, "-c", CODE]
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env=os.environ | {"LD_LIBRARY_PATH": os.environ[VARIABLE]},
    )
    assert done.returncode == 0, done.stderr
    ours, without = done.stdout.splitlines()
    assert ours == "''"
    assert "libcudart.so.13: cannot open shared object file" in without
