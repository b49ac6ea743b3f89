"""The token that stands for an image, and sequences with one or with all tokens of each image.

A sequence is kept *expanded*: an image has as many equal tokens as the model sees for it. An engine
is sent the *collapsed* sequence with one token for each image, and expands it itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlpost.columns import IntColumn
from rlpost.errors import ConfigError, RolloutError
from rlpost.types import ImageSpan

IMAGE, VIDEO = "image_token_id", "video_token_id"


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """Ids of a model's tokens that an engine replaces by features.

    Attributes:
        image: the token of an image.
        others: those of videos, which no sequence may have.
    """

    image: int
    others: frozenset[int] = frozenset()

    @classmethod
    def of(cls, model_folder: str | Path) -> ImageTokens:
        """Read them from config.json.

        Raises:
            ConfigError: the model has none.
        """
        file = Path(model_folder) / "config.json"
        try:
            config = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file}: cannot be read as JSON: {error}") from error
        if not isinstance(config.get(IMAGE), int):
            raise ConfigError(f"{file}: no {IMAGE}; images need a model that was made for them")
        video = config.get(VIDEO)
        return cls(config[IMAGE], frozenset([video] if isinstance(video, int) else []))

    @property
    def all(self) -> tuple[int, ...]:
        """The ids at which an answer ends: a sampled one would stand for an image that is not there."""
        return tuple(sorted({self.image, *self.others}))

    def count(self, ids: IntColumn) -> int:
        """Return how many tokens of images or videos a sequence has."""
        return int(np.isin(ids.array, self.all).sum())

    def collapse(self, ids: IntColumn, images: Sequence[ImageSpan]) -> IntColumn:
        """Return the sequence with one token for each image.

        Raises:
            RolloutError: the tokens of images are not exactly those of ``images``. An engine would
                ignore an image without a token, and read a token without an image as text.
        """
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
