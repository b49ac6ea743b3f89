"""Fingerprint of the Python packages installed in this environment or image, to compare nodes.

Input: the import path. Output: a digest of the names and versions of all installed distributions.
Both come from the folder names, without reading files. The image's own digest is not visible from
inside the image.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable

_NUM_DIGITS = 8
_FORMS = (".dist-info", ".egg-info")


def fingerprint(folders: Iterable[str] | None = None) -> str:
    """Hexadecimal digest of every ``NAME-VERSION`` on the import path, independent of its order."""
    found: set[str] = set()
    for folder in sys.path if folders is None else folders:
        try:
            found.update(name for name in os.listdir(folder or ".") if name.endswith(_FORMS))
        except OSError:  # archives and missing folders
            continue
    return hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest()[:_NUM_DIGITS]
