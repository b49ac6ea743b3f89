"""The images of a request: bounds, decoding, storage, and their tokens.

Input: messages with images in base64. Output: the same messages with decoded images, and the bytes
of those images, which are stored once the request is admitted; the tokens of the chat template with
all tokens of each image.
"""

from __future__ import annotations

import binascii
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rlpost.columns import IntColumn
from rlpost.engines.image_requests import ImageRequests
from rlpost.errors import DataError, ImageError, RolloutError
from rlpost.extensions.agents.aside import SMALL_BYTES, run_aside, without_turn
from rlpost.extensions.agents.chat_messages import BadRequest, Message
from rlpost.extensions.agents.chat_template import TooLong
from rlpost.extensions.agents.message_images import (
    MessageImage,
    SentImage,
    known_images,
    sent_images,
)
from rlpost.extensions.agents.requests import ChatRequest
from rlpost.images.limits import LIMITS, size_of
from rlpost.images.tokens import KnownImage
from rlpost.types import ImageSpan, Sample

MAX_IMAGES = 1024
"""Of a request."""
MAX_NEW_PIXELS = 1 << 28
"""Of the images of a request that the run has not decoded before: about 3 s of a core."""
MAX_EPISODE_BYTES = 512 << 20
"""Of the different images of an episode, which stay in the run's folder."""
MAX_WEBP_PIXELS = 1 << 23
"""Of a WebP, whose decoder stops all threads of the process, the gateway's event loop too."""


@dataclass(frozen=True, slots=True)
class ReadImages:
    """Messages whose images were decoded, and the files of these images."""

    messages: tuple[Message, ...]
    files: tuple[bytes, ...] = ()


def read_images(
    messages: tuple[Message, ...], images: ImageRequests | None, *, longest: int | None
) -> ReadImages:
    """Return messages with decoded images.

    First sizes are checked for the whole request: of the texts, then of the files, then of the
    pixels that their headers name. Only then pixels are decoded.

    Args:
        images: how images reach the engines; None if the model reads text alone.
        longest: tokens of the context.

    Raises:
        BadRequest: the model reads text alone, or an image cannot be used.
        TooLong: the images have more tokens than the context.
    """
    sent = list(sent_images(messages))
    if not sent:
        return ReadImages(messages)
    if images is None:
        raise BadRequest(
            f"{sent[0].where} has an image; this model reads text only (--multimodal-keys)",
            param=sent[0].where,
        )
    if len(sent) > MAX_IMAGES:
        raise BadRequest(f"{len(sent)} images; a request may have {MAX_IMAGES}", param="messages")
    for number, one in enumerate(sent, 1):
        if len(one.base64) > (LIMITS.max_bytes + 2) // 3 * 4:
            raise _refusal(number, one, f"more than {LIMITS.max_bytes} bytes")
    files = [_bytes(number, one) for number, one in enumerate(sent, 1)]
    with without_turn():
        _check_pixels(sent, files, images, longest)
        known = list(_decoded(sent, files, images))
    waiting = iter(known)
    return ReadImages(tuple(_with(message, waiting) for message in messages), tuple(files))


def _bytes(number: int, one: SentImage) -> bytes:
    try:
        return binascii.a2b_base64(one.base64, strict_mode=True)
    except ValueError as error:  # also for characters beyond ASCII
        raise _refusal(number, one, f"its data is not base64: {error}") from error


def _check_pixels(
    sent: Sequence[SentImage], files: Sequence[bytes], images: ImageRequests, longest: int | None
) -> None:
    """Check the headers of all images: pixels of new ones, tokens of all."""
    limits = replace(images.processor.limits, max_webp_pixels=MAX_WEBP_PIXELS)
    num_pixels, num_tokens, new = 0, 0, dict[bytes, tuple[int, int]]()
    for number, (one, data) in enumerate(zip(sent, files, strict=True), 1):
        known = images.known(data)
        if known is not None:
            num_tokens += known.num_tokens
            continue
        try:
            width, height = size_of(data, limits)
            num_tokens += images.processor.num_tokens(width, height)
        except ImageError as error:
            raise _refusal(number, one, str(error)) from error
        if data not in new:
            new[data] = width, height
            num_pixels += width * height
    if longest is not None and num_tokens >= longest:
        raise TooLong(f"{num_tokens} tokens of images")
    if num_pixels > MAX_NEW_PIXELS:
        raise BadRequest(
            f"the new images of the request have {num_pixels} pixels; at most {MAX_NEW_PIXELS} are "
            "read at a time, scale them down or send fewer",
            param="messages",
        )


def _decoded(
    sent: Sequence[SentImage], files: Sequence[bytes], images: ImageRequests
) -> Iterator[KnownImage]:
    for number, (one, data) in enumerate(zip(sent, files, strict=True), 1):
        try:
            yield images.decode(data)
        except ImageError as error:
            raise _refusal(number, one, str(error)) from error


def _with(message: Message, waiting: Iterator[KnownImage]) -> Message:
    """Return a message with the next decoded images in place of those that were sent."""
    if not message.images:
        return message
    images = tuple(
        MessageImage(each.at, next(waiting)) if isinstance(each, SentImage) else each
        for each in message.images
    )
    return replace(message, images=images)


def _refusal(number: int, one: SentImage, why: str) -> BadRequest:
    return BadRequest(f"{one.where}: image {number} of the request: {why}", param=one.where)


def work_size(request: ChatRequest) -> int:
    """Return how much work a request is, in bytes of text; see ``run_aside``.

    The bytes of an image say nothing of its pixels, so a request with one is never small.
    """
    has_images = any(message.images for message in request.messages)
    return max(request.size, SMALL_BYTES + 1) if has_images else request.size


class StoredImages:
    """The images of an episode that are in the run's folder, within a bound of bytes."""

    def __init__(self) -> None:
        self._digests: set[bytes] = set()
        self._num_bytes = 0

    async def add(self, images: ImageRequests | None, files: Sequence[bytes]) -> str:
        """Store the images of a request that was admitted; from then on a record may name them.

        In a thread, however small they are: a sync of a shared file system may take seconds.

        Returns:
            Why nothing was stored; empty if all are.

        Raises:
            OSError: they could not be written and synced.
        """
        if images is None or not files:
            return ""
        return await run_aside(lambda: self._add(images, files), num_bytes=SMALL_BYTES + 1)

    def _add(self, images: ImageRequests, files: Sequence[bytes]) -> str:
        # One thread at a time counts; the files are written without the turn.
        new = {hashlib.sha256(data).digest(): len(data) for data in files}
        new = {digest: size for digest, size in new.items() if digest not in self._digests}
        num_bytes = self._num_bytes + sum(new.values())
        if num_bytes > MAX_EPISODE_BYTES:
            return (
                f"the images of the episode would have {num_bytes} bytes; at most {MAX_EPISODE_BYTES} are "
                "stored, scale them down or send fewer"
            )
        self._digests |= new.keys()
        self._num_bytes = num_bytes
        with without_turn():
            for data in files:
                images.store.add(data)
        return ""


class UnreadableImages(DataError):
    """The images of a request are not those that its tokens and its text have."""


def with_images(
    reader: ImageRequests, before: Sample | None, added_ids: IntColumn, messages: Sequence[Message]
) -> tuple[IntColumn, tuple[ImageSpan, ...]]:
    """Return ``added_ids`` with all tokens of their images, and the spans of these.

    ``before``: the sequence that is extended. ``messages``: all of the request.

    Raises:
        UnreadableImages: the chat template wrote another number of tokens of images, or a text or an
            answer has what an engine takes for one.
    """
    earlier: tuple[ImageSpan, ...] = ()
    earlier_ids = IntColumn()
    if before is not None:
        earlier, earlier_ids = before.images, before.prompt_ids + before.response_ids
    images = known_images(messages)
    try:
        is_same = [span.hash for span in earlier] == [one.hash for one in images[: len(earlier)]]
        if not is_same:
            raise DataError("the chat template moved images of earlier messages")
        new = images[len(earlier) :]
        ids, spans = reader.tokens.expand(added_ids, new, start=len(earlier_ids))
        whole = earlier_ids + ids
        reader.input_ids(whole, (*earlier, *spans))
        if not reader.is_readable(whole, (*earlier, *spans)):
            raise DataError(
                f"a text spells a mark of an image ({', '.join(sorted(reader.marks.texts))})"
            )
    except (DataError, RolloutError) as error:
        raise UnreadableImages(
            f"engines would not read the {len(images)} images of this request: {error}; send texts "
            "without such marks, and images in messages of the user or a tool"
        ) from error
    return ids, spans


def answers_spell_mark(reader: ImageRequests | None, messages: Sequence[Message]) -> bool:
    """Whether the text of an answer, or its calls, have what an engine takes for an image."""
    answers = [one for one in messages if one.role == "assistant"]
    texts = [f"{one.content}{one.reasoning}{one.tool_calls}" for one in answers]
    return reader is not None and any(mark in text for mark in reader.marks.texts for text in texts)
