"""Decode an image from bytes that someone else wrote, within bounds.

Input: the bytes of a file. Output: an upright RGB image. Everything that is not one image of a
known format is refused here, before an engine or a trainer reads it.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.installed import is_package
from rlpost.errors import ImageError

if TYPE_CHECKING:
    from PIL.Image import Image

WEBP = "WEBP"
FORMATS = ("PNG", "JPEG", WEBP, "BMP", "GIF")
"""Formats of Pillow that are read."""
SEVERAL_PICTURES = "MPO"
"""A JPEG file with further pictures, as phones write it; its first picture is the photo."""
JPEGS = ("JPEG", SEVERAL_PICTURES)
MOST_SCANS = 64
"""Of a JPEG file. Each scan of a progressive one passes over all pixels, whatever its bytes (LJT-01-003
in libjpeg-turbo.org's TwoIssueswiththeJPEGStandard.pdf): 1,000 in 164 kB take 18 s. Encoders write
about ten.
"""
MOST_SEGMENTS = 4096
"""Of a JPEG file, its scans included."""
FILL = b"\xff" * 4096
"""Bytes before a marker of JPEG, of which a file may have any number. Pillow reads a run of them from
its start for each 64 KiB: 32 MiB take 17 s.
"""
JPEG_READS = 2048
"""Reads of a JPEG file by Pillow: three for each segment before its first scan, then 64 KiB each."""
BYTES_OF_A_READ = 64
"""Of any other file on average: a block of a GIF has 255 bytes and two reads."""
FREE_READS = 1024
START_OF_SCAN, END_OF_IMAGE = 0xDA, 0xD9
_MARKER = re.compile(rb"\xff([^\x00\x01\xd0-\xd7\xff])")
"""A marker of JPEG with a length behind it. Others are in the entropy-coded data of a scan."""
DEEP_GRAY = ("I;16", "I;16B", "I;16L")
"""Modes with 16 bits a pixel, which ``convert`` would clip instead of scale."""
KNOWN_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
WHITE = (255, 255, 255)


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Bounds of a file: its bytes, and the pixels that it decodes to."""

    max_bytes: int = 32 << 20
    max_pixels: int = 1 << 26
    max_webp_pixels: int = 1 << 26
    """Pillow 13.0 holds Python's interpreter while it decodes a WebP, but not for other formats."""


LIMITS = ImageLimits()
FEATURE_CACHE_BYTES = 1 << 30
"""Features of images kept in host memory on each rank of the first pipeline stage.

An image of 1024 x 1024 pixels has 1024 tokens: 5 MB at a hidden size of 2560, 21 MB with three deep
layers. A step reads each image in up to three passes.
"""


class _File(io.BytesIO):
    """The bytes of a file, for a bounded number of reads.

    Pillow reads headers in Python, some milliseconds for a thousand reads; a file of 32 MiB may have
    millions of empty chunks.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        is_jpeg = data.startswith(b"\xff\xd8")
        self._reads_left = JPEG_READS if is_jpeg else FREE_READS + len(data) // BYTES_OF_A_READ

    def read(self, size: int | None = -1, /) -> bytes:
        self._reads_left -= 1
        if self._reads_left < 0:
            raise ImageError(
                f"an image of {len(self.getbuffer())} bytes in too many parts; save it as PNG"
            )
        return super().read(size)


def open_image(data: bytes, limits: ImageLimits = LIMITS) -> Image:
    """Return the image in ``data``: RGB, upright by its EXIF orientation, on white if transparent.

    The size is checked before pixels are decoded.

    Raises:
        ImageError: it is too large, not of ``FORMATS``, animated, truncated or broken.
    """
    with _reading(data, limits):
        from PIL import ImageOps

        image = _opened(data, limits)
        image.load()
        return _rgb(ImageOps.exif_transpose(image))


@contextmanager
def _reading(data: bytes, limits: ImageLimits) -> Iterator[None]:
    """Check the number of bytes, and convert what Pillow raises to ImageError."""
    if len(data) > limits.max_bytes:
        raise ImageError(f"an image of {len(data)} bytes; at most {limits.max_bytes} are read")
    if not is_package("PIL"):
        raise ImageError("reading images needs Pillow: pip install pillow")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's bound on pixels; ours is checked
            yield
    except ImageError:
        raise
    except Exception as error:  # any type, from the file's content
        raise ImageError(
            f"an image that cannot be decoded: {error or type(error).__name__}"
        ) from error


def size_of(data: bytes, limits: ImageLimits = LIMITS) -> tuple[int, int]:
    """Return width and height as the file's header has them; no pixel is decoded.

    Raises:
        ImageError: as ``open_image``, for what the header says.
    """
    with _reading(data, limits):
        return _opened(data, limits).size


def _opened(data: bytes, limits: ImageLimits) -> Image:
    """Return the image with its size checked and its pixels not yet decoded."""
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(_File(data), formats=FORMATS)
    except UnidentifiedImageError:
        words = "no bytes" if not data else f"{len(data)} bytes that begin with {data[:8]!r}"
        raise ImageError(f"not an image: {words}; use one of {', '.join(FORMATS)}") from None
    width, height = image.size
    most, kind = limits.max_pixels, "an image"
    if image.format == WEBP:
        most, kind = min(most, limits.max_webp_pixels), "a WebP"
    if width * height > most:
        raise ImageError(
            f"{kind} of {width} x {height} pixels; at most {most} are read, scale it down"
        )
    if any(tile[0] in Image.DECODERS for tile in image.tile):
        # Pillow decodes it in Python: 28 s for a BMP of 17 MB. All other decoders are in C.
        raise ImageError(f"a compressed {image.format}; save it as PNG")
    if image.format in JPEGS:
        _check_scans(data)
    if image.format != SEVERAL_PICTURES and getattr(image, "is_animated", False):
        raise ImageError(f"an animated {image.format}; give one frame as a file")
    return image


def _check_scans(data: bytes) -> None:
    """Walk the segments of a JPEG file up to the end of its first picture, as libjpeg does."""
    at = len(b"\xff\xd8")
    num_segments = num_scans = 0
    while True:
        marker = _MARKER.search(data, at)
        if data.find(FILL, at, marker.end() if marker else len(data)) >= 0:
            raise ImageError(f"a JPEG with {len(FILL)} fill bytes in a row; save it as PNG")
        if marker is None or marker[1][0] == END_OF_IMAGE:
            break
        num_segments += 1
        num_scans += marker[1][0] == START_OF_SCAN
        if num_scans > MOST_SCANS or num_segments > MOST_SEGMENTS:
            raise ImageError(
                f"a JPEG of more than {MOST_SCANS} scans or {MOST_SEGMENTS} segments; save it as PNG"
            )
        end = marker.end()
        at = end + int.from_bytes(data[end : end + 2], "big")


def _rgb(image: Image) -> Image:
    """Convert to 8 bits of RGB; transparent pixels become white, as in Qwen's own reader."""
    from PIL import Image

    if image.mode in DEEP_GRAY:
        if "transparency" in image.info:  # Pillow would not compare it with 16 bits
            raise ImageError("a gray image of 16 bits with a transparent value; convert it to RGBA")
        image = image.convert("I").point(lambda value: value / 256).convert("L")
    if image.mode not in KNOWN_MODES:
        raise ImageError(f"an image of mode {image.mode}; convert it to RGB")
    if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
        image = image.convert("RGBA")
        below = Image.new("RGB", image.size, WHITE)
        below.paste(image, mask=image.getchannel("A"))
        return below
    return image.convert("RGB")
