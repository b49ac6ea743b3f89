"""The loader finds the CUDA runtime of the wheels in front of Python, checked with a real loader."""

import os
import shutil
import subprocess
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

from common import cuda_runtime
from common.cuda_runtime import RUNTIME, SAVER, VARIABLE, preload_problem, with_runtime

SAVER_FILE = "torch_memory_saver_hook_mode_preload_cu13.abi3.so"
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages: a library that is preloaded, and one that it needs."""
    source, runtime = tmp_path / "empty.c", tmp_path / "nvidia/cu13/lib"
    runtime.mkdir(parents=True)
    source.write_text("int nothing;\n")
    needed = runtime / "libcudart.so.99"
    for words in (
        ["-Wl,-soname,libcudart.so.99", "-o", needed],
        ["-Wl,--no-as-needed", needed, "-o", tmp_path / SAVER_FILE],
    ):
        subprocess.run(["cc", "-shared", "-fPIC", source, *words], check=True)
    for name, file in {RUNTIME: needed.relative_to(tmp_path), SAVER: SAVER_FILE}.items():
        folder = tmp_path / f"{name}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: 1\n")
        (folder / "RECORD").write_text(f"{file},,\n")

    def distribution(name: str) -> PathDistribution:
        return PathDistribution(tmp_path / f"{name}.dist-info")

    monkeypatch.setattr(cuda_runtime.importlib.metadata, "distribution", distribution)
    return tmp_path


def test_an_engine_finds_the_runtime_of_the_packages(site):
    assert preload_problem({}, "13.0") == ""


def test_a_runtime_that_the_loader_does_not_find_is_named(site, monkeypatch):
    monkeypatch.setattr(cuda_runtime, "with_runtime", dict)
    (site / "nvidia/cu13/lib/libcudart.so.99").rename(site / "elsewhere.so")
    assert "libcudart.so.99: cannot open shared object file" in preload_problem({}, "13.0")


def test_the_user_s_folders_come_first_and_the_runtime_once(site):
    folder = str(site / "nvidia/cu13/lib")
    environ = with_runtime({VARIABLE: "/site/cuda"})
    assert environ[VARIABLE] == f"/site/cuda:{folder}"
    assert with_runtime(environ) == environ


def test_nothing_is_known_or_changed_without_the_packages():
    assert with_runtime(os.environ) == dict(os.environ)
    assert preload_problem(os.environ, "13.0") is None
