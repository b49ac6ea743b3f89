"""Megatron sees DeepEP in the ranks that dispatch with it, and in no other."""

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

from rlpost.trainer import optional_packages as packages

CLASSES = "class Buffer: ...\nclass EventHandle: ...\nclass EventOverlap: ...\n"
UTILS_OF_2 = "from deep_ep import EventHandle\n"


@pytest.fixture
def has_deep_ep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Install a DeepEP whose packages run ``code``; return whether Megatron then has it."""
    fused_a2a = importlib.import_module("megatron.core.transformer.moe.fused_a2a")

    def has(is_asked: bool, *, code: str = CLASSES, utils: str = UTILS_OF_2) -> bool:
        folder = tmp_path / "deep_ep"
        folder.mkdir()
        (folder / "__init__.py").write_text(code)
        (folder / "utils.py").write_text(utils)
        for name in ("deep_ep", "deep_ep.utils"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv(packages.VARIABLE, str(int(is_asked)))
        monkeypatch.setattr(packages, "_problems", [])
        packages.prepare()
        # Megatron's own statements, again
        spec = importlib.util.spec_from_file_location("fused_a2a_again", fused_a2a.__file__)
        assert spec is not None and spec.loader is not None
        again = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(again)
        monkeypatch.setattr(fused_a2a, "HAVE_DEEP_EP", again.HAVE_DEEP_EP)
        return again.HAVE_DEEP_EP

    yield has
    for name in ("deep_ep", "deep_ep.utils"):
        sys.modules.pop(name, None)
    sys.modules["deep_ep"] = None  # type: ignore[assignment]  # as the package leaves it


def test_megatron_has_deep_ep_two_where_it_is_asked_for(has_deep_ep):
    assert has_deep_ep(True)
    assert packages.deep_ep_problem() is None


def test_native_code_of_other_ranks_is_not_run(has_deep_ep):
    assert not has_deep_ep(False, code="raise AssertionError")
    assert "is not imported in this process" in packages.deep_ep_problem()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("assert None is not None", "a bare AssertionError: no CUDA toolkit"),
        ("raise AssertionError('Duplicate NCCL runtime found')", "Duplicate NCCL runtime found"),
        ("raise OSError('libnvshmem_host.so.3: cannot open')", "libnvshmem_host"),
    ],
)
def test_an_import_that_fails_is_named_with_its_reason(has_deep_ep, code, words):
    assert not has_deep_ep(True, code=code)
    assert words in packages.deep_ep_problem()


def test_a_package_that_takes_seconds_to_import_is_hidden(monkeypatch):
    for name in packages.UNUSED:
        monkeypatch.delitem(sys.modules, name, raising=False)
    packages.prepare()
    for name in packages.UNUSED:
        with pytest.raises(ImportError):
            importlib.import_module(name)
