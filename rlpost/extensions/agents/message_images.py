"""Images in messages: how the three APIs write them, and their places in the text. Pure.

A request has the bytes of its images. A path or an address is refused here, so that no program that
talks to the gateway makes it, or an engine, read a file or ask a server.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlpost.images.tokens import KnownImage

_DATA_URL = re.compile(r"data:image/[a-z0-9.+-]+;base64,", re.IGNORECASE)
IMAGE_PART: Mapping[str, str] = {"type": "image"}
"""An image for a chat template."""


@dataclass(frozen=True, slots=True)
class SentImage:
    """An image of a request that was not decoded.

    Attributes:
        at: characters of the message's text before it.
        base64: its bytes.
        where: the message in the request.
    """

    at: int
    base64: str = field(repr=False)
    where: str


@dataclass(frozen=True, slots=True)
class MessageImage:
    """An image of a message; ``at``: characters of the message's text before it."""

    at: int
    image: KnownImage


@dataclass(frozen=True, slots=True)
class TextAndImages:
    """The content of a message that was read."""

    text: str
    images: tuple[SentImage, ...] = ()


class HasImages(Protocol):
    """A message."""

    @property
    def images(self) -> tuple[SentImage | MessageImage, ...]: ...


def known_images(messages: Iterable[HasImages]) -> list[KnownImage]:
    """Return the images of messages, which were decoded, in order."""
    images = list[KnownImage]()
    for message in messages:
        for each in message.images:
            assert isinstance(each, MessageImage), "an image that was not decoded"
            images.append(each.image)
    return images


def sent_images(messages: Iterable[HasImages]) -> Iterator[SentImage]:
    """Yield the images of messages that were not decoded."""
    for message in messages:
        yield from (each for each in message.images if isinstance(each, SentImage))


def parts_of(text: str, images: Iterable[SentImage | MessageImage]) -> list[Mapping[str, str]]:
    """Return the content of a message as parts of text and images, as chat templates expect it."""
    parts, begin = list[Mapping[str, str]](), 0
    for image in images:
        if image.at > begin:
            parts.append({"type": "text", "text": text[begin : image.at]})
        parts.append(IMAGE_PART)
        begin = image.at
    return parts if begin == len(text) else [*parts, {"type": "text", "text": text[begin:]}]


def base64_of(part: Mapping[str, Any]) -> str:
    """Return the bytes of an image as base64, from a part of any of the three APIs.

    ``image_url`` of OpenAI's chat completions and ``input_image`` of its responses have a data URL,
    ``image`` of Anthropic's messages a source of type base64.

    Raises:
        ValueError: it has something else, such as an address or the id of a file.
    """
    source: Any = part.get("source") if part.get("type") == "image" else part.get("image_url")
    if part.get("type") == "image":
        kind = source.get("type") if isinstance(source, Mapping) else source
        data = source.get("data") if isinstance(source, Mapping) else None
        if kind != "base64" or not isinstance(data, str):
            raise ValueError(
                f"the source of an image is of type {_shown(kind)}; send type base64 with data, "
                "the gateway reads no addresses and no files"
            )
        return data
    url = source.get("url") if isinstance(source, Mapping) else source
    if not isinstance(url, str):
        raise ValueError(f"an image without a data URL in image_url; it has {sorted(part)[:8]}")
    match = _DATA_URL.match(url)
    if match is None:
        raise ValueError(
            f"the address {_shown(url)} of an image; send data:image/png;base64,..., the gateway "
            "reads no addresses and no files"
        )
    return url[match.end() :]


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
