"""The row of supervised fine-tuning."""

from rlpost.config.extensions import Extension

EXTENSION = Extension(
    name="supervised",
    examples="rlpost.extensions.supervised.tokenizer:SupervisedTokenizer",
    moved={
        "rlpost.tasks.supervised": "rlpost.extensions.supervised.tokenizer",
    },
)
