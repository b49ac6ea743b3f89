"""rlpost: GRPO training that survives preemption, from a Slurm login node to a finished run.

``from rlpost import NAME`` gives the names that plug-ins and programs of users need (docs/api.md). A
name is loaded at its first use, so that ``import rlpost`` stays light.
"""

from importlib import import_module

__version__ = "0.2.0"

_MODULES = {
    "rlpost.types": ("Prompt", "Sample", "SampleGroup", "ScoredSample", "Unfinished"),
    "rlpost.errors": ("ConfigError", "GradingLost"),
    "rlpost.rollout.response_builder": ("ResponseBuilder",),
    "rlpost.rollout.sampling": ("SamplingParams",),
    "rlpost.algorithm.objective": ("Tokens",),
    "rlpost.algorithm.loss_settings": ("LossSettings",),
    "rlpost.models.family": ("Family",),
    "rlpost.rollout.turns": ("Step", "Turn"),
    "rlpost.config.load": ("load",),
    "rlpost.driver.in_process.run": ("InProcessRun",),
}
_PUBLIC = {name: module for module, names in _MODULES.items() for name in names}
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> object:
    """Load a public name (PEP 562)."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'rlpost' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
