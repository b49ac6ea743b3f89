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
from pathlib import Path

from rlpost.columns import IntColumn
from rlpost.engines.answer import Answer
from rlpost.errors import RolloutError
from rlpost.images.processor import ImageProcessor
from rlpost.images.store import ImageStore
from rlpost.images.tokens import ImageMarks, ImageTokens
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
    marks: ImageMarks
    is_inline: bool = False

    def input_ids(self, ids: IntColumn, images: Sequence[ImageSpan]) -> IntColumn:
        """Return the tokens to send. Raises RolloutError as ``ImageTokens.collapse``."""
        return self.tokens.collapse(ids, images)

    def is_readable(self, ids: IntColumn, images: Sequence[ImageSpan]) -> bool:
        """Whether an engine finds exactly these images in the text of a request.

        An answer may spell a mark of an image; an engine would refuse its continuation. Raises
        RolloutError as ``input_ids``.
        """
        return not images or self.marks.count(self.input_ids(ids, images)) == len(images)

    def files(self, images: Sequence[ImageSpan]) -> list[Path]:
        """Return the scaled files of images. Blocks while one is written for the first time.

        Raises:
            ImageError: an image is missing or damaged.
            OSError: a file could not be written.
        """
        sizes = [self.processor.size_of(span.grid) for span in images]
        return [
            self.store.scaled(span.hash, size, self.processor.png).absolute()
            for span, size in zip(images, sizes, strict=True)
        ]

    def fields(self, files: Sequence[Path]) -> dict[str, object]:
        """Return the further fields of a request. Blocks while files are read.

        A data URL has up to a third more bytes than its file: call it when the request is sent.
        """
        return {FIELD: [self._reference(path) for path in files]} if files else {}

    def _reference(self, path: Path) -> str:
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
