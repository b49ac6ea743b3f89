"""rlpost: GRPO training that survives preemption, from a Slurm login node to a finished run.

``from rlpost import NAME`` gives the names that plug-ins and programs of users need (docs/api.md). A
name is loaded at its first use, so that ``import rlpost`` stays light. Extensions add names.
"""

from importlib import import_module
from importlib.util import find_spec

__version__ = "0.2.0"

_MODULES = {
    "rlpost.types": ("Prompt", "Sample", "SampleGroup", "ScoredSample", "Unfinished"),
    "rlpost.errors": ("ConfigError", "GradingLost"),
    "rlpost.rollout.response_builder": ("ResponseBuilder",),
    "rlpost.rollout.sampling": ("SamplingParams",),
    "rlpost.algorithm.objective": ("Tokens",),
    "rlpost.algorithm.loss_settings": ("LossSettings",),
    "rlpost.models.family": ("Family",),
    "rlpost.config.load": ("load",),
}
_PUBLIC = {name: module for module, names in _MODULES.items() for name in names}
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> object:
    """Load a public name (PEP 562).

    Extensions are not asked for a module, which one may import while the registry loads it.
    """
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    message = f"module 'rlpost' has no attribute {name!r}"
    if name.startswith("_") or find_spec(f"rlpost.{name}") is not None:
        raise AttributeError(message)
    extensions = import_module("rlpost.config.extensions")
    try:
        path = extensions.public_names(_PUBLIC).get(name)
    except ValueError as error:  # ConfigError: an extension of another package is broken
        raise AttributeError(f"{message}: {error}") from error
    if path is None:
        raise AttributeError(message)
    return extensions.load(path)
