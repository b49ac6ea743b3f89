"""The row of models and data to fetch."""

from rlpost.config.extensions import Extension, Verb

EXTENSION = Extension(
    name="fetching",
    verbs={
        "fetch": Verb(
            "rlpost.extensions.fetching.fetch_verb:main",
            "download a recipe's model and data from the Hugging Face hub",
            takes_settings=True,
            after="plan",
        )
    },
    moved={
        "rlpost.cli.fetch": "rlpost.extensions.fetching.fetch_verb",
        **{
            f"rlpost.cli.{name}": f"rlpost.extensions.fetching.{name}"
            for name in ("arithmetic_data", "assets", "tiny_model", "tiny_squares")
        },
        "rlpost.assets": "rlpost.extensions.fetching.assets",
    },
)
