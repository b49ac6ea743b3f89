"""The ids that a model knows.

Input: a Hugging Face folder, and ids from rows, tools or functions. Output: the number of rows of
the model's embedding, and the first id outside. An id outside has no weights: one rank fails on it,
and over several ranks of tensor parallelism it silently reads zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlpost.columns import IntColumn
from rlpost.models.config_file import read_config


def vocabulary_size(folder: str | Path) -> int | None:
    """Return vocab_size of config.json; None if it has none or cannot be read."""
    try:
        hf = read_config(folder)
        size = hf.get("vocab_size")
    except (OSError, ValueError, AttributeError):  # ``check_settings`` reports it
        return None
    return size if isinstance(size, int) else None


def unknown_id(ids: Sequence[int], vocab_size: int | None) -> int | None:
    """Return an id that the model does not know; None if it knows all, or the size is unknown."""
    if vocab_size is None or not ids:
        return None
    values = IntColumn.of(ids).array
    for value in (int(values.min()), int(values.max())):
        if not 0 <= value < vocab_size:
            return value
    return None
