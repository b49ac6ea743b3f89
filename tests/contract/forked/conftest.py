"""Fixture of a process that imported SGLang, which the tests of this folder share.

These tests run in one process, one file after the other (``tests/conftest.py``).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.forked.forked_sglang import ForkedSglang


@pytest.fixture(scope="package")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedSglang]:
    """Start the process from which the engines of all modules are forked."""
    with ForkedSglang(tmp_path_factory.mktemp("forked") / "imports.log") as started:
        yield started
