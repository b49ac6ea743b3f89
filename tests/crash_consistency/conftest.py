"""A folder for trials, whose attempts use fakes, virtual time and intercepted files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash_consistency.world import ready


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    with ready() as folder:
        yield folder
