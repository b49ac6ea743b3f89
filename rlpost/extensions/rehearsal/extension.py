"""The row of the rehearsal."""

from rlpost.config.extensions import Extension, Verb

EXTENSION = Extension(
    name="rehearsal",
    verbs={
        "rehearse": Verb(
            "rlpost.cli.rehearse:main",
            "run every rank for one step without GPUs: hangs, weights, checkpoint, memory",
            takes_settings=True,
            after="plan",
        )
    },
    rehearsal="rlpost.cli.rehearse:rehearse_before_submission",
)
