"""The row of recipes from scripts of other stacks."""

from rlpost.config.extensions import Extension, Verb

EXTENSION = Extension(
    name="importing",
    verbs={
        "import": Verb(
            "rlpost.extensions.importing.main:main",
            "a recipe from a script of slime or verl, or YAML of NeMo-RL",
            after="check",
        )
    },
    foreign_words="rlpost.extensions.importing.peers.pasted:answer_to",
)
