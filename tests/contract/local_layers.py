"""Megatron's own layers where TransformerEngine is installed, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from rlpost.trainer import model
from rlpost.trainer.layer_specs import LOCAL


def use_local_layers() -> None:
    """Build models of Megatron's own layers in this process from now on."""
    patch.object(model, "implementation_of", lambda _: LOCAL).start()


@contextmanager
def local_layers() -> Iterator[None]:
    """Build them in the block."""
    with patch.object(model, "implementation_of", lambda _: LOCAL):
        yield
