"""Placeholders for kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def absent(name: str) -> Callable[..., Any]:
    """Return a function that raises NotImplementedError when it is called."""

    def call(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            f"{name}: this stub of TransformerEngine builds modules and computes nothing"
        )

    call.__name__ = name
    return call
