"""The row of conversions of weights."""

from rlpost.config.extensions import Extension, Verb

EXTENSION = Extension(
    name="converting",
    verbs={
        "convert": Verb(
            "rlpost.extensions.converting.convert_job:main",
            "submit the job that converts a recipe's weights to torch_dist (--to fp8: for "
            "engines; --dry-run)",
            takes_settings=True,
            after="rehearse",
        )
    },
    moved={
        **{
            f"rlpost.cli.{name}": f"rlpost.extensions.converting.{name}"
            for name in ("convert", "convert_job")
        },
        "rlpost.trainer.conversion": "rlpost.extensions.converting.conversion",
    },
)
