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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlpost.columns import IntColumn
from rlpost.errors import DataError, ImageError
from rlpost.images.limits import LIMITS, open_image
from rlpost.images.processor import ImageProcessor
from rlpost.images.read_file import read_file
from rlpost.images.tokens import MARK, ImageMarks, ImageTokens, KnownImage
from rlpost.tasks.messages import text_parts
from rlpost.types import ImageSpan

IMAGE: Mapping[str, object] = {"type": "image"}
SOURCES = ("bytes", "image", "image_url", "url", "path")
"""Keys of a part, or of an object, that may have the source of an image, the first that is set."""
DESCRIPTIONS = (
    "alt",
    "caption",
    "detail",
    "filename",
    "format",
    "height",
    "id",
    "mime_type",
    "mode",
    "name",
    "width",
)
"""Further keys of a part without a source. Any other may be a source that is not read."""
RESIZING = ("min_pixels", "max_pixels", "resized_height", "resized_width")
"""Keys with which qwen-vl-utils resizes one image. Any other beside a source describes it as it is."""
VIDEO_MARK, VIDEO_KEYS = "<video>", ("videos", "video")
"""Text and keys of a row that stand for a video in verl, ms-swift and LLaMA-Factory."""
PROBE = "a-plain-text"
PATH_MAX = 4096
"""Bytes of a path in Linux, with the one that ends it (``limits.h``)."""
_DATA_URL = re.compile(r"data:[^,]*?;base64,", re.IGNORECASE)
_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")

Message = Mapping[str, object]


def with_parts(
    content: str | Sequence[Message], values: object, what: str
) -> tuple[str | Sequence[Message], tuple[object, ...]]:
    """Return content in which each mark is a part, and the source of each image in order.

    Content without an image is unchanged.

    Args:
        values: those under --multimodal-keys: a list, one source, or None or an empty text.
        what: the place of the row, for messages.

    Raises:
        DataError: there are more or fewer images than marks, a part is of another kind, or has a
            key that would change its image.
    """
    one = [] if values is None or values == "" else [values]
    waiting = list(values) if isinstance(values, list) else one
    num_given, sources = len(waiting), list[object]()

    def take(source: object, index: object = None) -> Message:
        number = num_given - len(waiting)
        if source is None and index not in (None, number):
            raise DataError(
                f"{what}: a part with index {index!r} where image {number} of the row is next; give the "
                "images in the order of the parts"
            )
        if source is None and not waiting:
            raise DataError(
                f"{what}: more marks of images than its {num_given} images; give one for each {MARK} and "
                "each part of type image"
            )
        sources.append(waiting.pop(0) if source is None else source)
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
                parts.append(take(_source_of_part(piece, what), piece.get("index")))
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
    source = next((part[key] for key in SOURCES if part.get(key) is not None), None)
    plain = ("type", "index", *SOURCES, *DESCRIPTIONS)
    others = [key for key in part if key not in plain] if source is None else [*RESIZING, "text"]
    if lost := _lost(part, others):
        raise DataError(f"{what}: a part of type {kind} with {lost}")
    return source


def _lost(described: Mapping[str, object], keys: Iterable[str]) -> str:
    """Return those of ``keys`` that an image has, and the remedy; empty without one."""
    lost = [key for key in keys if described.get(key) not in (None, "", [], {})]
    if not lost:
        return ""
    return (
        f"{', '.join(lost)}, which would have no effect; remove it, or give the image as it is to be seen, "
        f"under one of {', '.join(SOURCES)} (--image-max-pixels bounds all images)"
    )


def check_no_video(row: Mapping[str, object], content: str | Sequence[Message], what: str) -> None:
    """Raise DataError if the row has a video and a mark of it, which a model would read as text."""
    messages = [{"content": content}] if isinstance(content, str) else content
    texts = (text for message in messages for text in text_parts(message.get("content")))
    key = next((key for key in VIDEO_KEYS if row.get(key)), None)
    if key is not None and any(VIDEO_MARK in text for text in texts):
        raise DataError(
            f"{what}: {VIDEO_MARK} in its text and {key!r} beside it; videos are not read, remove the row, or "
            f"give frames as images, each with {MARK}"
        )


def image_bytes(source: object, folder: Path) -> bytes:
    """Return the bytes of an image; ``folder`` is that of the data file.

    Raises:
        ImageError: the source is remote, missing, too large or of another kind.
        OSError: the storage failed.
    """
    source = _innermost(source)
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
    if not _is_path(source):
        raise ImageError(
            f"a text of {len(source)} characters that is neither a path nor a data URL; write "
            "data:image/png;base64, before base64"
        )
    return read_file(_path(source, folder))


def image_path(source: object, folder: Path) -> Path | None:
    """Return the file that a source names, which may be missing; None for bytes and what is refused."""
    try:
        inner = _innermost(source)
    except ImageError:
        return None
    if not isinstance(inner, str) or not inner.strip() or inner.startswith("data:"):
        return None
    is_elsewhere = _DATA_URL.match(inner) or _REMOTE.match(inner) or not _is_path(inner)
    return None if is_elsewhere else _path(inner, folder)


def _innermost(source: object) -> object:
    """Return the path, URL or data URL in a source. Raises ImageError if an object has none."""
    while isinstance(source, dict):
        if lost := _lost(source, RESIZING):
            raise ImageError(f"an object with {lost}")
        inner = next((source[key] for key in SOURCES if source.get(key)), None)
        if inner is None:
            raise ImageError(f"an image without a source: an object with {list(source)}")
        source = inner
    return source


def _is_path(text: str) -> bool:
    """Whether a file may have this name; base64 without the beginning of a data URL is longer."""
    return len(text) < PATH_MAX and "\0" not in text


def _path(source: str, folder: Path) -> Path:
    return folder / os.path.expanduser(source)


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


def image_frame(
    tokenize: Callable[[Sequence[Message]], tuple[str, Sequence[int]]],
    encode: Callable[[str], Sequence[int]],
    tokens: ImageTokens,
) -> tuple[int, ...]:
    """Return the tokens that a chat template writes for an image between two texts.

    Args:
        tokenize: returns the text of messages first.
        encode: returns the tokens of a text, special tokens included.

    Returns:
        the tokens, one of them of the image; empty if the template writes none.
    """
    text = {"type": "text", "text": PROBE}
    try:
        whole, _ = tokenize([{"role": "user", "content": [text, IMAGE, text]}])
    except DataError:
        return ()
    pieces = whole.split(PROBE)
    frame = tuple(encode(pieces[1])) if len(pieces) == 3 else ()
    return frame if frame.count(tokens.image) == tokens.count(IntColumn(frame)) == 1 else ()


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
        images = list[KnownImage]()
        for number, source in enumerate(sources, 1):
            try:
                images.append(self._read(image_bytes(source, folder)))
            except ImageError as error:
                raise ImageError(f"image {number}: {error}") from error
        return self.tokens.expand(ids, images)

    def read_all(self, sources: Sequence[object], folder: Path) -> None:
        """Store images, so that ``expanded`` finds them. Raises ImageError."""
        for source in sources:
            self._read(image_bytes(source, folder))

    def _read(self, data: bytes) -> KnownImage:
        """Return an image, which is decoded once."""
        digest = digest_of(data)
        if digest not in self._grids:
            grid = self.processor.grid(*open_image(data).size)
            self.keep(data)
            self._grids[digest] = grid
        grid = self._grids[digest]
        return KnownImage(digest, grid, self.processor.tokens_of(grid))
