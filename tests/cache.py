"""The folder for what tests download or make once for a machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$RLPOST_LAB_CACHE``, by default ~/.cache/rlpost; it may not exist yet."""
    return Path(os.environ.get("RLPOST_LAB_CACHE") or Path.home() / ".cache/rlpost")
