"""Fixtures of the unit tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from rlpost.algorithm import plugin
from rlpost.extensions.slime.adapters import SlimeAdapters
from tests.left_threads import left_threads


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert left_threads(before) == [], "threads of this test continue in the next one"


@pytest.fixture
def slime_adapters() -> Iterator[None]:
    """Functions with slime's interface run, as in the driver; without it they are refused."""
    plugin.register(SlimeAdapters())
    yield
    plugin.register(plugin.Adapters())
