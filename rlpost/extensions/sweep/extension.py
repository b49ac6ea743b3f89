"""The row of sweeps."""

from rlpost.config.extensions import Extension, Verb

EXTENSION = Extension(
    name="sweep",
    verbs={
        "sweep": Verb(
            "rlpost.extensions.sweep.sweep_verb:main",
            "submit a run for each point of a grid",
            takes_settings=True,
            after="submit",
        )
    },
    moved={
        "rlpost.cli.sweep": "rlpost.extensions.sweep.sweep_verb",
    },
)
