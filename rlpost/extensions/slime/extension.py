"""The row of functions with slime's interface."""

from rlpost.config.extensions import Extension

EXTENSION = Extension(
    name="slime",
    adapters="rlpost.compat.slime.adapters:register",
    foreign_names={"slime": "rlpost.config.slime_names:lacking"},
)
