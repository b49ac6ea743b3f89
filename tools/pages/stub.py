"""rlpost/__init__.pyi: the types of ``from rlpost import NAME``, for type checkers.

Input: the public names of the package and of rlpost's extensions. Output: a stub, because a type
checker cannot ask the registry.
"""

from __future__ import annotations

import rlpost
from rlpost.config.extensions import public_names


def public_stub() -> str:
    """The stub; names of other packages' extensions are left out."""
    paths = {name: f"{module}:{name}" for name, module in rlpost._PUBLIC.items()}
    paths |= public_names(paths)
    imports = [path.split(":") for path in paths.values() if path.startswith("rlpost.")]
    lines = [f"from {module} import {name} as {name}" for module, name in sorted(imports)]
    return "\n".join(["# Written by tools/make_docs.py.", *lines, "", "__version__: str"]) + "\n"
