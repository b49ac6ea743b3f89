"""Fixtures of the unit tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlpost.algorithm import plugin
from rlpost.extensions.slime.adapters import SlimeAdapters


@pytest.fixture
def slime_adapters() -> Iterator[None]:
    """Functions with slime's interface run, as in the driver; without it they are refused."""
    plugin.register(SlimeAdapters())
    yield
    plugin.register(plugin.Adapters())
