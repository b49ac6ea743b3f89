"""The row of functions with slime's interface, and of its flags."""

from rlpost.config.extensions import Extension

EXTENSION = Extension(
    name="slime",
    adapters="rlpost.extensions.slime.adapters:register",
    foreign_words="rlpost.extensions.slime.flags:answer_to",
    idle_flags="rlpost.extensions.slime.flags:without_effect",
    foreign_names={"slime": "rlpost.extensions.slime.names:lacking"},
    moved={
        "rlpost.compat.slime": "rlpost.extensions.slime",
        "rlpost.compat": "rlpost.extensions.slime",
    },
)
