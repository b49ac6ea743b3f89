"""The row of diagnoses."""

from rlpost.config.extensions import Extension, Verb

EXTENSION = Extension(
    name="doctor",
    verbs={
        "doctor": Verb(
            "rlpost.extensions.doctor.doctor_verb:main",
            "diagnose this machine, or an image (--image)",
            after="compare",
        )
    },
    moved={
        "rlpost.cli.image_doctor": "rlpost.extensions.doctor.image_job",
    },
)
