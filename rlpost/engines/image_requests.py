"""What a request with images has beside its tokens, and what its answer must say.

SGLang (0.5.21) answers without an error if an image has no token or a token has no image, so both
are checked before a request; and its count of prompt tokens is compared with that of this side
after it. Engines read images from the run folder, or as data URLs where they may not have it; they
are only given files that this package wrote.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass

from rlpost.columns import IntColumn
from rlpost.engines.answer import Answer
from rlpost.errors import RolloutError
from rlpost.images.processor import ImageProcessor
from rlpost.images.store import ImageStore
from rlpost.images.tokens import ImageTokens
from rlpost.types import ImageSpan

FIELD = "image_data"
"""Field of ``POST /generate`` with the images of a request, in the order of their tokens."""


@dataclass(frozen=True, slots=True)
class ImageRequests:
    """How the images of a run reach its engines.

    ``is_inline``: as data URLs instead of paths.
    """

    store: ImageStore
    processor: ImageProcessor
    tokens: ImageTokens
    is_inline: bool = False

    def input_ids(self, ids: IntColumn, images: Sequence[ImageSpan]) -> IntColumn:
        """Return the tokens to send. Raises RolloutError as ``ImageTokens.collapse``."""
        return self.tokens.collapse(ids, images)

    def fields(self, images: Sequence[ImageSpan]) -> dict[str, object]:
        """Return the further fields of a request. Blocks while a file is written for the first time.

        Raises:
            ImageError: an image is missing or damaged.
            OSError: a file could not be written.
        """
        if not images:
            return {}
        return {FIELD: [self._reference(span) for span in images]}

    def _reference(self, span: ImageSpan) -> str:
        size = self.processor.size_of(span.grid)
        path = self.store.scaled(span.hash, size, self.processor.png).absolute()
        if not self.is_inline:
            return str(path)
        return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"

    def check_answer(self, what: str, answer: Answer, num_expected: int) -> None:
        """Check that an engine read as many tokens as the request has here.

        Raises:
            RolloutError: it read other ones, so its processor cuts images in another way.
        """
        num_read = answer.meta_info.get("prompt_tokens")
        if answer.token_ids and num_read != num_expected:
            raise RolloutError(
                f"{what}: an engine read {num_read} tokens of a prompt that has {num_expected} with its images; "
                "trainer and engines need the same model folder and image processor"
            )
