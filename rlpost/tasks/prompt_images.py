"""Images of prompts: which image each mark of a row stands for, its bytes, and its tokens.

Input: the content of a row and the values under --multimodal-keys. Output: messages with one part
``{"type": "image"}`` for each image, the sources of these in order; and token ids with all tokens of
each image, with the spans that name its file.

A source is a path, relative to the data file; a data URL; or an object with one of both, as the
data sets of Hugging Face have it. Remote addresses are refused: a run reads the same bytes each time.
"""

from __future__ import annotations

import binascii
import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlpost.columns import IntColumn
from rlpost.errors import DataError, ImageError
from rlpost.images.limits import LIMITS, open_image
from rlpost.images.processor import ImageProcessor
from rlpost.images.read_file import read_file
from rlpost.images.tokens import MARK, ImageMarks, ImageTokens
from rlpost.types import ImageSpan

IMAGE: Mapping[str, object] = {"type": "image"}
SOURCES = ("bytes", "image", "image_url", "url", "path")
"""Keys of a part, or of an object, that may have the source of an image, the first that is set."""
_DATA_URL = re.compile(r"data:[^,]*?;base64,", re.IGNORECASE)
_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")

Message = Mapping[str, object]


def with_parts(
    content: str | Sequence[Message], values: object, what: str
) -> tuple[str | Sequence[Message], tuple[object, ...]]:
    """Return content in which each mark is a part, and the source of each image in order.

    Content without an image is unchanged.

    Args:
        values: those under --multimodal-keys: a list, one source, or None.
        what: the place of the row, for messages.

    Raises:
        DataError: there are more or fewer images than marks, or a part is of another kind.
    """
    waiting = list(values) if isinstance(values, list) else [] if values is None else [values]
    num_given, sources = len(waiting), list[object]()

    def take(own: object) -> Message:
        if own is None and not waiting:
            raise DataError(
                f"{what}: more marks of images than its {num_given} images; give one for each {MARK} and "
                "each part of type image"
            )
        sources.append(waiting.pop(0) if own is None else own)
        return IMAGE

    def parts_of(message: Message) -> Message:
        written = message.get("content")
        pieces = written if isinstance(written, list) else [{"type": "text", "text": written}]
        parts: list[Message] = []
        for piece in pieces:
            if piece.get("type") == "text":
                first, *others = str(piece.get("text") or "").split(MARK)
                texts = [({"type": "text", "text": text} if text else None) for text in others]
                parts += [{"type": "text", "text": first}] if first else []
                for text in texts:
                    parts.append(take(None))
                    parts += [] if text is None else [text]
            else:
                parts.append(take(_source_of_part(piece, what)))
        has_image = any(part is IMAGE for part in parts)
        return {**message, "content": parts} if has_image else message

    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    changed = [parts_of(message) for message in messages]
    if waiting:
        raise DataError(
            f"{what}: {num_given} images and {num_given - len(waiting)} marks; write {MARK} in the prompt "
            "where each image is"
        )
    return (changed, tuple(sources)) if sources else (content, ())


def _source_of_part(part: Message, what: str) -> object:
    """Return the source in a part of a message; None where it is the next image of the row."""
    kind = part.get("type")
    if kind not in ("image", "image_url"):
        raise DataError(f"{what}: a part of type {kind!r}; parts are of type text or image")
    return next((part[key] for key in SOURCES if part.get(key) is not None), None)


def image_bytes(source: object, folder: Path) -> bytes:
    """Return the bytes of an image; ``folder`` is that of the data file.

    Raises:
        ImageError: the source is remote, missing, too large or of another kind.
        OSError: the storage failed.
    """
    if isinstance(source, dict):
        inner = next((source[key] for key in SOURCES if source.get(key)), None)
        if inner is None:
            raise ImageError(f"an image without a source: an object with {list(source)}")
        return image_bytes(inner, folder)
    if not isinstance(source, str) or not source.strip():
        raise ImageError(f"an image is {_shown(source)}; give a path, a data URL or bytes")
    if match := _DATA_URL.match(source):
        if len(source) > LIMITS.max_bytes * 4 // 3 + 1024:
            raise ImageError(
                f"a data URL of {len(source)} characters; at most {LIMITS.max_bytes} bytes"
            )
        try:
            return binascii.a2b_base64(source[match.end() :], strict_mode=True)
        except ValueError as error:
            raise ImageError(f"a data URL that is not base64: {error}") from error
    if _REMOTE.match(source) or source.startswith("data:"):
        raise ImageError(
            f"the address {_shown(source)}; images are read from files, download it and give the path"
        )
    return read_file(folder / os.path.expanduser(source))


def _shown(source: object) -> str:
    text = repr(source)
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_images(sources: Sequence[object], folder: Path, processor: ImageProcessor | None) -> None:
    """Read and decode the images of a row. Raises ImageError, which names the image by its number."""
    for number, source in enumerate(sources, 1):
        try:
            image = open_image(image_bytes(source, folder))
            if processor is not None:
                processor.grid(*image.size)
        except ImageError as error:
            raise ImageError(f"image {number}: {error}") from error


def digest_of(data: bytes) -> str:
    """Return the digest of an image that is not kept."""
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class PromptImages:
    """Reads the images of prompts and gives them their tokens.

    ``keep`` stores the bytes of an image and returns their digest; a digest that it returned is
    durable (``rlpost.images.store.ImageStore.add``).
    """

    processor: ImageProcessor
    tokens: ImageTokens
    marks: ImageMarks
    keep: Callable[[bytes], str] = digest_of
    _grids: dict[str, tuple[int, int, int]] = field(default_factory=dict)

    def expanded(
        self, ids: Sequence[int], sources: Sequence[object], folder: Path
    ) -> tuple[IntColumn, tuple[ImageSpan, ...]]:
        """Return a prompt's ids with all tokens of its images, and their spans.

        Args:
            ids: those of the chat template, with one token for each image.
            sources: of the images, in order.

        Raises:
            DataError: the template wrote another number of tokens of images, or text that an engine
                takes for one.
            ImageError: an image cannot be used; it is named by its number.
        """
        expected, written = len(sources), self.tokens.count(IntColumn.of(ids))
        if written != expected:
            raise DataError(
                f"the prompt has {written} tokens of images or videos for {expected} images; use a model whose chat "
                "template writes one for each image, and remove such tokens from its texts"
            )
        num_marks = self.marks.count(IntColumn.of(ids)) if sources else 0
        if num_marks != expected:
            raise DataError(
                f"engines find {num_marks} images in the rendered prompt, which has {expected}; remove the texts "
                f"{', '.join(sorted(self.marks.texts))} from its tools, tool calls and chat template"
            )
        whole, spans, waiting = list[int](), list[ImageSpan](), iter(enumerate(sources, 1))
        for token in ids:
            if token != self.tokens.image:
                whole.append(token)
                continue
            number, source = next(waiting)
            try:
                digest, grid = self._read(image_bytes(source, folder))
            except ImageError as error:
                raise ImageError(f"image {number}: {error}") from error
            count = self.processor.tokens_of(grid)
            spans.append(ImageSpan(digest, len(whole), count, grid))
            whole += [token] * count
        return IntColumn(whole), tuple(spans)

    def read_all(self, sources: Sequence[object], folder: Path) -> None:
        """Store images, so that ``expanded`` finds them. Raises ImageError."""
        for source in sources:
            self._read(image_bytes(source, folder))

    def _read(self, data: bytes) -> tuple[str, tuple[int, int, int]]:
        """Return digest and grid of an image; each is decoded once."""
        digest = digest_of(data)
        if digest not in self._grids:
            grid = self.processor.grid(*open_image(data).size)
            self.keep(data)
            self._grids[digest] = grid
        return digest, self._grids[digest]
