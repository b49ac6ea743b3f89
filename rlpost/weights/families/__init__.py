"""The families of models that can be trained, one file each.

A file has a table ``FAMILIES``: for each architecture, as config.json names it, what its weights are called and what
its configuration means for Megatron. Adding a family here is adding a file and its name below. An installed package
can bring one too: an entry point of the group ``rlpost.families``, named like the architecture, that leads to a
``Family`` (docs/extending.md). Every process finds it by itself, on the login node and on all ranks.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

from rlpost.errors import WeightError
from rlpost.weights.families import glm, llama, qwen
from rlpost.weights.family import Family

FAMILIES: dict[str, Family] = {**llama.FAMILIES, **qwen.FAMILIES, **glm.FAMILIES}
"""By the first entry of ``architectures`` in config.json."""
ENTRY_POINTS = "rlpost.families"


def family(architecture: str) -> Family:
    """The family of an architecture; raises WeightError, naming those known."""
    return FAMILIES[architecture] if architecture in FAMILIES else _brought(architecture)


@cache
def _brought(architecture: str) -> Family:
    """The family that an installed package brings."""
    there = entry_points(group=ENTRY_POINTS)
    point = next((point for point in there if point.name == architecture), None)
    if point is None:
        known = ", ".join(sorted({*FAMILIES, *there.names}))
        raise WeightError(f"architecture {architecture!r} is not known; known: {known}")
    where = f"{ENTRY_POINTS} {architecture} = {point.value}"
    try:
        found = point.load()
    except Exception as error:  # whatever the package raises while it is imported
        raise WeightError(f"{where}: cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(found, Family):
        raise WeightError(f"{where}: a {type(found).__name__}; an rlpost.weights.family.Family is needed")
    return found
