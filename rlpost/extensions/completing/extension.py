"""The row of completion in a shell."""

from rlpost.config.extensions import Extension, Verb

EXTENSION = Extension(
    name="completing",
    verbs={
        "completion": Verb(
            "rlpost.extensions.completing.completion_verb:main",
            "a script that completes words in bash or zsh",
            after="doctor",
        )
    },
    moved={
        "rlpost.cli.completion": "rlpost.extensions.completing.completion_verb",
    },
)
