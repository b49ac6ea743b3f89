"""The families of models that can be trained, one file each.

A file has a table ``FAMILIES``: for each architecture, as config.json names it, what its weights are called and what
its configuration means for Megatron. Adding a family is adding a file and its name below.
"""

from __future__ import annotations

from rlpost.errors import WeightError
from rlpost.weights.families import glm, llama, qwen
from rlpost.weights.family import Family

FAMILIES: dict[str, Family] = {**llama.FAMILIES, **qwen.FAMILIES, **glm.FAMILIES}
"""By the first entry of ``architectures`` in config.json."""


def family(architecture: str) -> Family:
    """The family of an architecture; raises WeightError, naming those known."""
    if architecture not in FAMILIES:
        raise WeightError(f"architecture {architecture!r} is not known; known: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[architecture]
