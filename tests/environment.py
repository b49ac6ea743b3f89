"""Environment variables that outlive their test: later tests and their processes would read them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

OF_PYTEST = "PYTEST_CURRENT_TEST"
"""Changed by pytest between the setup of a test and its end."""


@contextmanager
def restored_environment() -> Iterator[None]:
    """Restore ``os.environ`` at the end."""
    before = _variables()
    try:
        yield
    finally:
        after = _variables()
        if after != before:
            for name in after.keys() - before.keys():
                del os.environ[name]
            os.environ.update(before)


def _variables() -> dict[str, str]:
    found = dict(os.environ)
    found.pop(OF_PYTEST, None)
    return found
