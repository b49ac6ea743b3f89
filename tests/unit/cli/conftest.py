from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.cli.projects import make_project


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a recipe, a model folder and prompts that have nothing wrong."""
    make_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path
