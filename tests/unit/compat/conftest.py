"""The tests of slime's interface run with its adapters."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _slime_adapters(slime_adapters: None) -> None:
    """Register them for each test."""
