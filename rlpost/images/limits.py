"""Decode an image from bytes that someone else wrote, within bounds.

Input: the bytes of a file. Output: an upright RGB image. Everything that is not one image of a
known format is refused here, before an engine or a trainer reads it.
"""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlpost.errors import ImageError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
"""Formats of Pillow that are read."""
SEVERAL_PICTURES = "MPO"
"""A JPEG file with further pictures, as phones write it; its first picture is the photo."""
DEEP_GRAY = ("I;16", "I;16B", "I;16L")
"""Modes with 16 bits a pixel, which ``convert`` would clip instead of scale."""
KNOWN_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
WHITE = (255, 255, 255)


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Bounds of a file: its bytes, and the pixels that it decodes to."""

    max_bytes: int = 32 << 20
    max_pixels: int = 1 << 26


LIMITS = ImageLimits()
FEATURE_CACHE_BYTES = 1 << 30
"""Features of images kept in host memory on each rank of the first pipeline stage.

An image of 1024 x 1024 pixels has 1024 tokens: 5 MB at a hidden size of 2560, 21 MB with three deep
layers. A step reads each image in up to three passes.
"""


def open_image(data: bytes, limits: ImageLimits = LIMITS) -> Image:
    """Return the image in ``data``: RGB, upright by its EXIF orientation, on white if transparent.

    The size is checked before pixels are decoded.

    Raises:
        ImageError: it is too large, not of ``FORMATS``, animated, truncated or broken.
    """
    if len(data) > limits.max_bytes:
        raise ImageError(f"an image of {len(data)} bytes; at most {limits.max_bytes} are read")
    try:
        from PIL import ImageOps
    except ImportError:
        raise ImageError("reading images needs Pillow: pip install pillow") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's bound on pixels; ours is checked
            image = _opened(data, limits)
            image.load()
            return _rgb(ImageOps.exif_transpose(image))
    except ImageError:
        raise
    except Exception as error:  # any type, from the file's content
        raise ImageError(
            f"an image that cannot be decoded: {error or type(error).__name__}"
        ) from error


def _opened(data: bytes, limits: ImageLimits) -> Image:
    """Return the image with its size checked and its pixels not yet decoded."""
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        words = "no bytes" if not data else f"{len(data)} bytes that begin with {data[:8]!r}"
        raise ImageError(f"not an image: {words}; use one of {', '.join(FORMATS)}") from None
    width, height = image.size
    if width * height > limits.max_pixels:
        raise ImageError(
            f"an image of {width} x {height} pixels; at most {limits.max_pixels} are read, scale it down"
        )
    if image.format != SEVERAL_PICTURES and getattr(image, "is_animated", False):
        raise ImageError(f"an animated {image.format}; give one frame as a file")
    return image


def _rgb(image: Image) -> Image:
    """Convert to 8 bits of RGB; transparent pixels become white, as in Qwen's own reader."""
    from PIL import Image

    if image.mode in DEEP_GRAY:
        image = image.convert("I").point(lambda value: value / 256).convert("L")
    if image.mode not in KNOWN_MODES:
        raise ImageError(f"an image of mode {image.mode}; convert it to RGB")
    if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
        image = image.convert("RGBA")
        below = Image.new("RGB", image.size, WHITE)
        below.paste(image, mask=image.getchannel("A"))
        return below
    return image.convert("RGB")
