"""Whether a package can be imported, without importing it."""

from __future__ import annotations

import importlib.util


def is_package(name: str) -> bool:
    """Return whether ``import NAME`` finds code.

    A folder of that name without ``__init__.py`` is none, although it has a spec: W&B writes a folder
    ``wandb`` where it runs, and distributions share the namespaces ``flash_attn`` and ``megatron``.
    """
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None
