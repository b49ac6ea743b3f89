"""The supported families of models, one file each.

A file has a table ``FAMILIES``: for each architecture in config.json, the names of its weights and
the Megatron fields of its configuration. To add a family here, add a file and its name below. An
installed package can also provide one: an entry point of the group ``rlpost.families``, named like
the architecture, that resolves to a ``Family`` (docs/extending.md). Every process loads it
independently, on the login node and on all ranks.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

from rlpost.errors import WeightError
from rlpost.models.families import (
    deepseek,
    gemma,
    glm,
    gpt_oss,
    llama,
    minimax,
    multimodal,
    qwen,
    qwen_hybrid,
)
from rlpost.models.family import Family
from rlpost.models.model_types import HfConfig

FAMILIES: dict[str, Family] = {
    **llama.FAMILIES,
    **qwen.FAMILIES,
    **glm.FAMILIES,
    **minimax.FAMILIES,
    **qwen_hybrid.FAMILIES,
    **gpt_oss.FAMILIES,
    **deepseek.FAMILIES,
    **gemma.FAMILIES,
    **multimodal.FAMILIES,
}
"""By the first entry of ``architectures`` in config.json; those with more features follow."""
ENTRY_POINTS = "rlpost.families"


def family(architecture: str) -> Family:
    """The family of an architecture.

    Raises:
        WeightError: the architecture is not supported; the message lists those that are.
    """
    return FAMILIES[architecture] if architecture in FAMILIES else _from_entry_point(architecture)


def family_of(hf: HfConfig) -> Family | None:
    """The family of a config.json; None if its architecture is missing or not supported."""
    try:
        return family(next(iter(hf.get("architectures") or ()), ""))
    except WeightError:
        return None


@cache
def _from_entry_point(architecture: str) -> Family:
    """The family that an installed package provides."""
    installed = entry_points(group=ENTRY_POINTS)
    point = next((point for point in installed if point.name == architecture), None)
    if point is None:
        known = ", ".join(sorted({*FAMILIES, *installed.names}))
        raise WeightError(f"architecture {architecture!r} is not known; known: {known}")
    where = f"{ENTRY_POINTS} {architecture} = {point.value}"
    try:
        loaded_family = point.load()
    except Exception as error:  # importing a package may raise anything
        raise WeightError(f"{where}: cannot load it: {type(error).__name__}: {error}") from error
    if not isinstance(loaded_family, Family):
        raise WeightError(
            f"{where}: got a {type(loaded_family).__name__}; provide an rlpost.models.family.Family"
        )
    return loaded_family
