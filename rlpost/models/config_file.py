"""Read config.json of a Hugging Face folder: the keys of its language model, in one table.

Models with images are published with the keys of their language model nested in ``text_config``,
and a few of the whole model beside it. Everything in this project that reads the keys of a model
reads them through ``read_config``; an export carries the file itself. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from rlpost.models.families import family_of
from rlpost.models.model_types import HfConfig

NESTED, TIED = "text_config", "tie_word_embeddings"
OF_THE_WHOLE = (
    "architectures",
    "auto_map",
    "dtype",
    "quantization_config",
    TIED,
    "torch_dtype",
    "vision_config",
)
"""Keys that describe the whole folder; those beside ``text_config`` are valid."""


def read_config(folder: str | Path) -> HfConfig:
    """Return the keys of the language model in ``folder``.

    Raises:
        OSError: there is no config.json.
        ValueError: it is not JSON.
    """
    return language_model(json.loads((Path(folder) / "config.json").read_text()))


def language_model(config: HfConfig) -> HfConfig:
    """Return the keys of the language model of a parsed config.json; unchanged if none is nested.

    Nested ones may leave out sizes (Gemma-3): those of the family are added.
    """
    text = config.get(NESTED) if isinstance(config, Mapping) else None
    if not isinstance(text, Mapping):
        return config
    whole = {key: config[key] for key in OF_THE_WHOLE if config.get(key) is not None}
    keys = {**text, **whole}
    known = family_of(keys)
    return keys if known is None else known.resolved(keys)


def tied_problem(config: HfConfig) -> str | None:
    """Return why it is not known whether the output layer is the embedding; None if it is.

    transformers (5.12) reads the key of the whole, as false if it is missing. So does SGLang (0.5.21)
    for the models whose encoder the trainer has: transformers writes another value into the language
    model of Qwen3-VL with experts. For the others SGLang reads that of the language model.
    """
    text = config.get(NESTED) or {}
    whole, nested = config.get(TIED), text.get(TIED)
    known = family_of(language_model(config))
    if known is not None and known.vision is not None:
        is_known = whole is not None or not nested
    else:
        is_known = None in (whole, nested) or whole == nested
    if is_known:
        return None
    return (
        f"{TIED} is {whole} in config.json and {nested} in its {NESTED}; give both the value of the "
        "weights: true where they have no lm_head.weight"
    )


def with_language_model(config: HfConfig, change: Callable[[HfConfig], HfConfig]) -> HfConfig:
    """Return a parsed config.json with its language model's keys changed, where they stand."""
    if isinstance(config.get(NESTED), Mapping):
        return {**config, NESTED: change(config[NESTED])}
    return change(config)
