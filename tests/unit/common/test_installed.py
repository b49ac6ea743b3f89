"""A package is one that can be imported, not a folder of its name."""

import sys
from pathlib import Path

import pytest

from common.installed import is_package


def test_a_folder_without_code_is_no_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``wandb``, which W&B writes where it runs, or ``flash_attn`` of another distribution."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "runs_of_a_tool/latest").mkdir(parents=True)
    assert not is_package("runs_of_a_tool") and not is_package("missing_tool")
    (tmp_path / "runs_of_a_tool/__init__.py").write_text("raise AssertionError('imported')")
    sys.path_importer_cache.clear()
    assert is_package("runs_of_a_tool")
