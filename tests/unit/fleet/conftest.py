from __future__ import annotations

from tests.unit.cli.conftest import project

__all__ = ["project"]
