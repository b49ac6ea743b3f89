"""The row of the rehearsal."""

from rlpost.config.extensions import Extension, Verb

EXTENSION = Extension(
    name="rehearsal",
    verbs={
        "rehearse": Verb(
            "rlpost.extensions.rehearsal.command:main",
            "run every rank for one step without GPUs: hangs, memory, placement",
            takes_settings=True,
            after="plan",
        )
    },
    rehearsal="rlpost.extensions.rehearsal.command:rehearse_before_submission",
    moved={
        "rlpost.rehearsal": "rlpost.extensions.rehearsal.all_ranks",
    },
)
