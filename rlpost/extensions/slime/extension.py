"""The row of functions with slime's interface."""

from rlpost.config.extensions import Extension

EXTENSION = Extension(
    name="slime",
    adapters="rlpost.extensions.slime.adapters:register",
    foreign_names={"slime": "rlpost.extensions.slime.names:lacking"},
)
