"""What a request with images has beside its tokens, and what its answer must say.

SGLang (0.5.21) answers without an error if an image has no token or a token has no image, so both
are checked before a request; and its count of prompt tokens is compared with that of this side
after it. Engines read images from the run folder, or as data URLs where they may not have it; they
are only given files that this package wrote.
"""

from __future__ import annotations

import base64
import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlpost.columns import IntColumn
from rlpost.images.limits import open_image
from rlpost.images.processor import ImageProcessor
from rlpost.images.store import ImageStore
from rlpost.images.tokens import ImageMarks, ImageTokens, KnownImage
from rlpost.types import ImageSpan

FIELD = "image_data"
"""Field of ``POST /generate`` with the images of a request, in the order of their tokens."""
_decoding = threading.BoundedSemaphore(4)
"""Images in conversations that are decoded at a time: one may have 67 million pixels, 270 MB."""
MAX_KNOWN = 1 << 16
"""Images whose sizes are remembered: a conversation sends the same ones with each request."""


@dataclass(frozen=True, slots=True)
class ImageRequests:
    """How the images of a run reach its engines.

    ``is_inline``: as data URLs instead of paths. ``frame``: the tokens that the chat template writes
    for an image, its own included; empty if there is no template.
    """

    store: ImageStore
    processor: ImageProcessor
    tokens: ImageTokens
    marks: ImageMarks
    is_inline: bool = False
    frame: tuple[int, ...] = ()
    _known: dict[str, KnownImage] = field(default_factory=dict, repr=False, compare=False)

    def known(self, data: bytes) -> KnownImage | None:
        """Return an image that was decoded before; None for another one."""
        return self._known.get(hashlib.sha256(data).hexdigest())

    def decode(self, data: bytes) -> KnownImage:
        """Return an image that came in a conversation; it is not stored. Blocks while it is decoded.

        Raises:
            ImageError: it cannot be used.
        """
        if (known := self.known(data)) is not None:
            return known
        with _decoding:
            size = open_image(data, self.processor.limits).size
        grid = self.processor.grid(*size)
        digest = hashlib.sha256(data).hexdigest()
        image = KnownImage(digest, grid, self.processor.tokens_of(grid))
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[digest] = image
        return image

    def keep(self, data: bytes) -> KnownImage:
        """Return an image whose bytes are stored and synced, so that a record may name it. Blocks.

        Raises:
            ImageError: it cannot be used.
            OSError: it could not be written.
        """
        image = self.decode(data)
        self.store.add(data)
        return image

    def input_ids(self, ids: IntColumn, images: Sequence[ImageSpan]) -> IntColumn:
        """Return the tokens to send. Raises RolloutError as ``ImageTokens.collapse``."""
        return self.tokens.collapse(ids, images)

    def is_readable(self, ids: IntColumn, images: Sequence[ImageSpan]) -> bool:
        """Whether an engine finds exactly these images in a request.

        An answer may spell a mark of an image, or end with the token before one; an engine would
        refuse its continuation. Raises RolloutError as ``input_ids``.
        """
        if not images:
            return True
        sent = self.input_ids(ids, images)
        return ids[-1] != self.tokens.not_last and self.marks.count(sent) == len(images)

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
