"""The row of supervised fine-tuning."""

from rlpost.config.extensions import Extension

EXTENSION = Extension(
    name="supervised", examples="rlpost.extensions.supervised.tokenizer:SupervisedTokenizer"
)
