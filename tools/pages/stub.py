"""The types of ``from rlpost import NAME``, for type checkers.

Input: the public names of the package and of rlpost's extensions. Output: stubs, because a type checker
cannot ask the registry: rlpost/__init__.pyi, and rlpost/extensions/__init__.pyi for what extensions add.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import rlpost
from rlpost.config.extensions import public_names

CORE = {name: f"{module}:{name}" for name, module in rlpost._PUBLIC.items()}


def public_stub() -> str:
    """The stub of the package."""
    all_of_extensions = "from rlpost.extensions import *  # noqa: F403"
    return _stub([*_imports(CORE), all_of_extensions]) + "\n__version__: str\n"


def extensions_stub() -> str:
    """The stub of the folder of extensions; names of other packages' extensions are left out."""
    paths = public_names(CORE)
    return _stub(
        _imports({name: path for name, path in paths.items() if path.startswith("rlpost.")})
    )


def _imports(paths: Mapping[str, str]) -> list[str]:
    pairs = (path.split(":") for path in paths.values())
    return [f"from {module} import {name} as {name}" for module, name in pairs]


def _stub(lines: Sequence[str]) -> str:
    return "\n".join(["# Written by tools/make_docs.py.", *sorted(lines)]) + "\n"
