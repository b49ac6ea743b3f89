"""Check what is not available for models that are published with an encoder of images. Pure.

Input: a ``Config``, the keys of the language model in config.json. Output: one line for each
problem.
"""

from __future__ import annotations

from rlpost.config.tree import Config
from rlpost.models.families import family_of
from rlpost.models.model_types import HfConfig


def image_model_problems(config: Config, hf: HfConfig) -> list[str]:
    """Return the settings that such a model does not allow; adapters are refused by family."""
    family = family_of(hf)
    if family is None or not family.carried or not config.use_critic:
        return []
    estimator = config.grpo.advantage_estimator
    return [
        f"--advantage-estimator {estimator}: a critic has the policy's layers, and transformers has no "
        f"model with one value for {hf['architectures'][0]}; use an estimator without a critic, or the "
        "language model saved alone"
    ]
