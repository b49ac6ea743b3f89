"""The token that stands for an image, and sequences with one or with all tokens of each image.

A sequence is kept *expanded*: an image has as many equal tokens as the model sees for it. An engine
is sent the *collapsed* sequence with one token for each image, and expands it itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from rlpost.columns import IntColumn
from rlpost.errors import ConfigError, DataError, RolloutError
from rlpost.images.processor import Grid, ImageProcessor
from rlpost.types import ImageSpan

IMAGE = "image_token_id"
VIDEO_START = "video_start_token_id"
"""GLM-V's: an engine takes tokens of images that follow it for frames of a video."""
VIDEOS = ("video_token_id", VIDEO_START)
WITH_VIDEO_START = ("glm4v", "glm4v_moe")
"""Values of ``model_type`` for which SGLang (0.5.21) reads it (``get_rope_index_glm4v``)."""
IMAGE_START = "vision_start_token_id"
NOT_LAST = ("qwen2_5_vl",)
"""Values of ``model_type`` for which SGLang (0.5.21) answers 500 to a request with images that ends with
this token: it reads the one after each (``mrope_rope_index.py``)."""
MARK = "<image>"
"""SGLang reads this text as an image in any prompt, beside the tokens of the model."""

SAME_SIZES = (
    ("patch_size", "patch_size"),
    ("temporal_patch_size", "temporal_patch_size"),
    ("spatial_merge_size", "merge_size"),
)
"""Sizes in ``vision_config`` and in the settings of the processor."""
DEEP_LAYERS = "deepstack_visual_indexes"
NUM_DEEP_LAYERS = {"qwen3_vl_moe": 3}
"""What SGLang (0.5.21) assumes by ``model_type``, whatever config.json has (``qwen3_vl_moe.py``)."""
NOT_PADDED = ("qwen3_vl", "qwen3_vl_moe")
"""Values of ``model_type`` whose images an engine reads one by one
(``uses_media_artifacts_without_cache`` of ``qwen_vl.py``). It pads requests of all others
(``padding=True`` in ``base_processor.py``)."""
WITH_DEEP_LAYERS = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Values of ``model_type`` for which SGLang (0.5.21) has deep layers where config.json names none."""


def check_encoder(model_folder: str | Path, processor: ImageProcessor) -> None:
    """Check that config.json and the processor of a folder describe the same patches and tokens.

    Raises:
        ConfigError: they differ, or config.json lacks what an engine would assume.
    """
    file = Path(model_folder) / "config.json"
    ImageTokens.of(model_folder)
    config = _read(file)
    vision = config.get("vision_config") or {}
    for name, processor_name in SAME_SIZES:
        size = getattr(processor, processor_name)
        if vision.get(name, size) != size:
            raise ConfigError(
                f"{file}: {name} of vision_config is {vision[name]}, and {processor_name} of the processor is "
                f"{size}; use the files of one model"
            )
    if config.get("model_type") in WITH_DEEP_LAYERS and DEEP_LAYERS not in vision:
        raise ConfigError(
            f"{file}: its vision_config has no {DEEP_LAYERS}, and the first image would end an engine, which "
            "assumes three layers; copy the file from the model's page, or add an empty list if the model has none"
        )
    deep, depth = vision.get(DEEP_LAYERS) or [], vision.get("depth") or math.inf
    if deep != sorted({*deep}) or any(not 0 <= layer < depth for layer in deep):
        raise ConfigError(
            f"{file}: {DEEP_LAYERS} of its vision_config is {deep}, with depth = {depth}; engines give its mergers to "
            "different layers of the encoder in rising order, each below depth; copy the file from the model's page"
        )
    num_deep = NUM_DEEP_LAYERS.get(config.get("model_type", ""))
    if num_deep not in (None, len(vision.get(DEEP_LAYERS, ()))):
        raise ConfigError(
            f"{file}: {DEEP_LAYERS} of its vision_config has {len(vision[DEEP_LAYERS])} layers, and the first image "
            f"would end an engine, which assumes {num_deep}; copy the file from the model's page"
        )
    if config.get("model_type") in WITH_VIDEO_START and not isinstance(
        config.get(VIDEO_START), int
    ):
        raise ConfigError(
            f"{file}: no {VIDEO_START}, which engines compare with each token of a prompt with images; copy the "
            "file from the model's page"
        )


def check_padding(model_folder: str | Path, pad_token: object) -> None:
    """Check that the tokenizer can pad where engines need it.

    SGLang (0.5.21) calls the processors of most models with ``padding=True``, and transformers'
    tokenizers then refuse each request, with status 400, if they have no token for it.

    Raises:
        ConfigError: the tokenizer has none.
    """
    kind = _read(Path(model_folder) / "config.json").get("model_type")
    if kind not in NOT_PADDED and pad_token is None:
        raise ConfigError(
            f"--hf-checkpoint {model_folder}: its tokenizer has no pad_token, and engines refuse each prompt "
            f"with images of {kind} without one; add pad_token to tokenizer_config.json, such as the "
            "model's page has it"
        )


def _read(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as JSON: {error}") from error
    return config if isinstance(config, dict) else {}


def _is_id(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True, slots=True)
class KnownImage:
    """An image that was decoded: the SHA-256 digest of its file, its patches and its tokens."""

    hash: str
    grid: Grid
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """Ids of a model's tokens that an engine replaces by features.

    Attributes:
        image: the token of an image.
        others: those of videos, which no sequence may have.
        not_last: one that no request with images may end with; None if there is none.
    """

    image: int
    others: frozenset[int] = frozenset()
    not_last: int | None = None

    @classmethod
    def of(cls, model_folder: str | Path) -> ImageTokens:
        """Read them from config.json.

        Raises:
            ConfigError: the model has none.
        """
        file = Path(model_folder) / "config.json"
        config = _read(file)
        if not _is_id(config.get(IMAGE)):
            raise ConfigError(f"{file}: no {IMAGE}; images need a model that was made for them")
        others = (config.get(key) for key in VIDEOS)
        not_last = config.get(IMAGE_START) if config.get("model_type") in NOT_LAST else None
        return cls(config[IMAGE], frozenset(filter(_is_id, others)), not_last)

    @property
    def all(self) -> tuple[int, ...]:
        """The ids at which an answer ends: a sampled one would stand for an image that is not there."""
        return tuple(sorted({self.image, *self.others}))

    def count(self, ids: IntColumn) -> int:
        """Return how many tokens of images or videos a sequence has."""
        import numpy as np  # here: settings are checked without it

        return int(np.isin(ids.array, self.all).sum())

    def expand(
        self, ids: Sequence[int], images: Sequence[KnownImage], *, start: int = 0
    ) -> tuple[IntColumn, tuple[ImageSpan, ...]]:
        """Return all tokens of each image, and their spans; the inverse of ``collapse``.

        Args:
            ids: with one token for each image.
            start: tokens of the sequence before ``ids``, for the positions of the spans.

        Raises:
            DataError: there are more or fewer tokens of images or videos than images.
        """
        written = self.count(IntColumn.of(ids))
        if written != len(images):
            raise DataError(f"{written} tokens of images or videos for {len(images)} images")
        whole, spans, waiting = list[int](), list[ImageSpan](), iter(images)
        for token in ids:
            if token not in self.all:
                whole.append(token)
                continue
            if token != self.image:
                raise DataError("a token of a video in place of an image")
            image = next(waiting)
            at = start + len(whole)
            spans.append(ImageSpan(image.hash, at, image.num_tokens, image.grid))
            whole += [token] * image.num_tokens
        return IntColumn(whole), tuple(spans)

    def collapse(self, ids: IntColumn, images: Sequence[ImageSpan]) -> IntColumn:
        """Return the sequence with one token for each image.

        Raises:
            RolloutError: the tokens of images are not exactly those of ``images``. An engine would
                ignore an image without a token, and read a token without an image as text.
        """
        import numpy as np  # here: settings are checked without it

        array = ids.array
        kept = np.ones(len(array), dtype=bool)
        end = 0
        for span in images:
            is_image = array[span.start : span.end] == self.image
            if span.start < end or len(is_image) != span.num_tokens or not is_image.all():
                raise RolloutError(
                    f"the tokens {span.start} to {span.end - 1} of a request are not those of image {span.hash}"
                )
            kept[span.start + 1 : span.end] = False
            end = span.end
        extra = self.count(ids) - sum(span.num_tokens for span in images)
        if extra:
            raise RolloutError(
                f"a request has {extra} tokens of images or videos beside those of its {len(images)} images"
            )
        return IntColumn.view(array[kept])


@dataclass(frozen=True, slots=True)
class ImageMarks:
    """Texts that an engine takes for images.

    SGLang (0.5.21) decodes the ids of a request with images, special tokens included, and splits
    the text at these marks (``load_mm_data`` in ``base_processor.py``; not for Qwen3-VL with its
    images in a cache). It answers 500 if there are more of them than images, also if ordinary
    tokens spell them.

    Attributes:
        texts: the marks.
        decode: returns the text of ids with special tokens.
    """

    texts: frozenset[str]
    decode: Callable[[Sequence[int]], str]

    @classmethod
    def of(cls, tokens: ImageTokens, decode: Callable[[Sequence[int]], str]) -> ImageMarks:
        """Return the marks of a model; ``decode`` is its tokenizer's."""
        return cls(frozenset([MARK, *(decode([token]) for token in tokens.all)]), decode)

    def count(self, collapsed: IntColumn) -> int:
        """Return how many images an engine finds in a sequence with one token for each."""
        text = self.decode(collapsed.array.tolist())
        return sum(text.count(mark) for mark in self.texts)
