"""How a model's processor cuts an image into patches: sizes and token counts as pure functions, pixels.

Engine and trainer must see the same pixels. So an image is scaled here once, and both get the
result: the engine as a PNG file whose size its own processor keeps, the trainer through
transformers' processor on PIL, which needs no torchvision. Read: ``smart_resize`` of transformers
5.12 (``image_processing_pil_qwen2_vl.py``, ``image_processing_pil_glm46v.py``). Both cut a scaled
image into the same patches.
"""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlpost.errors import ConfigError, ImageError
from rlpost.images.limits import LIMITS, ImageLimits, open_image
from rlpost.models.config_file import read_config

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

Grid = tuple[int, int, int]

FILES = (("processor_config.json", "image_processor"), ("preprocessor_config.json", None))
"""Files with the settings of the processor, and the key that has them; the first counts."""


class Bounds(NamedTuple):
    """How few and how many pixels an image has."""

    least: int
    most: int


@dataclass(frozen=True)
class Kind:
    """The arithmetic of a processor.

    Attributes:
        default: bounds where the folder has none.
        counts_frames: whether the folder's bounds count each frame of a patch.
        widens: whether an image narrower than a token is first enlarged to a token's side.
    """

    default: Bounds
    counts_frames: bool = False
    widens: bool = False


QWEN = Kind(Bounds(56 * 56, 28 * 28 * 1280))
GLM = Kind(Bounds(112 * 112, 28 * 28 * 15000), counts_frames=True, widens=True)
KINDS = {
    f"{name}ImageProcessor{backend}": kind
    for name, kind in (("Qwen2VL", QWEN), ("Glm4v", GLM), ("Glm46V", GLM))
    for backend in ("", "Fast", "Pil")
}
"""Values of ``image_processor_type``: Qwen2-VL to Qwen3.5, GLM-4.1V to GLM-4.6V."""
FIXED = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "resample": 3,
    "rescale_factor": 1 / 255,
}
"""Settings that must have these values: bicubic scaling of 8 bits."""
OLDER_KEYS = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
"""Keys of Qwen2-VL, and those in ``size`` that they replace."""
SIZES_OF_ENCODER = {
    "patch_size": "patch_size",
    "merge_size": "spatial_merge_size",
    "temporal_patch_size": "temporal_patch_size",
}
"""Keys of the processor, and those of the encoder in config.json that must be equal."""
MOST_ELONGATED = 200
"""Ratio of the sides above which transformers' processor refuses an image."""


@dataclass(frozen=True)
class ImageProcessor:
    """The settings of a processor of the families of Qwen2-VL and GLM-V.

    Attributes:
        patch_size: pixels of a side of a patch.
        temporal_patch_size: frames of a patch; an image is repeated as often.
        merge_size: patches of a side that become one token.
        min_pixels: least pixels of a scaled image.
        max_pixels: most pixels of one.
        mean: of each channel, subtracted from values between 0 and 1.
        std: of each channel, by which the difference is divided.
        widens: as ``Kind.widens``.
    """

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    widens: bool = False
    limits: ImageLimits = LIMITS

    @classmethod
    def of(cls, model_folder: str | Path, *, max_pixels: int | None = None) -> ImageProcessor:
        """Return the processor of a Hugging Face folder.

        Args:
            max_pixels: fewer pixels than the folder's maximum; None keeps it.

        Raises:
            ConfigError: the folder has no processor, one that is not known, or ``max_pixels`` does
                not fit.
        """
        file, settings = _settings(Path(model_folder))
        name = settings.get("image_processor_type")
        if name not in KINDS:
            raise ConfigError(
                f"{file}: image_processor_type {name!r} is not known; images need one of {', '.join(KINDS)}"
            )
        for key, value in FIXED.items():
            if settings.get(key, value) != value:
                raise ConfigError(f"{file}: {key} = {settings[key]}; images need {value}")
        _check_sizes(settings, Path(model_folder), file)
        kind, frames = KINDS[name], settings.get("temporal_patch_size", 2)
        least, most = _bounds(settings, kind, frames, file, max_pixels)
        if least > most:
            raise ConfigError(
                f"{file}: scales images to at least {least} and at most {most} pixels"
            )
        patch, merge = settings.get("patch_size", 14), settings.get("merge_size", 2)
        token = (patch * merge) ** 2
        fewest = max(2 * least, token)  # below, rounding down often passes the folder's minimum
        if max_pixels is not None and not fewest <= max_pixels <= most:
            raise ConfigError(
                f"--image-max-pixels {max_pixels}: {file} scales images to {least} to {most} pixels; "
                f"use {fewest} to {most}"
            )
        return cls(
            patch_size=patch,
            temporal_patch_size=frames,
            merge_size=merge,
            min_pixels=least,
            max_pixels=most if max_pixels is None else max_pixels,
            mean=_of_channels(settings, "image_mean", _CLIP_MEAN, file),
            std=_of_channels(settings, "image_std", _CLIP_STD, file, least=sys.float_info.min),
            widens=kind.widens,
        )

    def scaled_size(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height of the scaled image: multiples of a token's side, within the bounds.

        The processor of an engine, which reads the scaled image, keeps this size.

        Raises:
            ImageError: one side is too many times the other.
        """
        side = self.patch_size * self.merge_size
        sides = width, height
        if self.widens and min(sides) < side:
            widen = max(side / height, side / width)
            sides = int(width * widen), int(height * widen)
        across, down = (round(length / side) * side for length in sides)
        if across * down > self.max_pixels:
            shrink = math.sqrt(math.prod(sides) / self.max_pixels)
            across, down = (
                max(side, math.floor(length / shrink / side) * side) for length in sides
            )
        elif across * down < self.min_pixels:
            grow = math.sqrt(self.min_pixels / math.prod(sides))
            across, down = (math.ceil(length * grow / side) * side for length in sides)
        is_even = max(sides) <= MOST_ELONGATED * min(sides)
        is_even &= max(across, down) <= MOST_ELONGATED * min(across, down)
        if not is_even or not self.min_pixels <= across * down <= self.max_pixels:
            raise ImageError(
                f"an image of {width} x {height} pixels, which is {across} x {down} for the model; it takes "
                f"{self.min_pixels} to {self.max_pixels} pixels and one side of at most {MOST_ELONGATED} times "
                "the other"
            )
        return across, down

    def grid(self, width: int, height: int) -> Grid:
        """Return the patches of an image: frames (1), rows, columns. Raises as ``scaled_size``."""
        across, down = self.scaled_size(width, height)
        return 1, down // self.patch_size, across // self.patch_size

    def num_tokens(self, width: int, height: int) -> int:
        """Return the number of tokens that stand for an image. Raises as ``scaled_size``."""
        return self.tokens_of(self.grid(width, height))

    def tokens_of(self, grid: Grid) -> int:
        """Return the number of tokens of a grid of patches."""
        return math.prod(grid) // self.merge_size**2

    def scaled(self, data: bytes) -> Image:
        """Return the image as the model sees it.

        Raises:
            ImageError: it cannot be decoded, or breaks a bound.
        """
        from PIL.Image import Resampling

        image = open_image(data, self.limits)
        return image.resize(self.scaled_size(*image.size), Resampling.BICUBIC)

    def png(self, data: bytes) -> bytes:
        """Return the scaled image as PNG, which holds every pixel. Raises as ``scaled``."""
        file = io.BytesIO()
        self.scaled(data).save(file, "PNG", compress_level=1)
        return file.getvalue()

    def size_of(self, grid: Grid) -> tuple[int, int]:
        """Return width and height of the scaled image with this grid."""
        return grid[2] * self.patch_size, grid[1] * self.patch_size

    def pixel_values(self, data: bytes) -> tuple[np.ndarray, Grid]:
        """Return the patches of an image, and its grid.

        Returns:
            values: float32 [patches, channels * frames * side * side] in the order of the processor.
            grid: frames (1), rows, columns of patches.

        Raises:
            ImageError: as ``scaled``.
        """
        image = self.scaled(data)
        patches = self._of_transformers(images=[image], do_resize=False, return_tensors="np")
        frames, rows, columns = patches["image_grid_thw"][0].tolist()
        return patches["pixel_values"].astype("float32", copy=False), (frames, rows, columns)

    @cached_property
    def _of_transformers(self) -> Any:
        """The processor of transformers. Its module, because the package asks for torchvision."""
        from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as module

        return module.Qwen2VLImageProcessorPil(
            size={"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels},
            patch_size=self.patch_size,
            temporal_patch_size=self.temporal_patch_size,
            merge_size=self.merge_size,
            image_mean=list(self.mean),
            image_std=list(self.std),
        )


def write_bound(folder: str | Path, max_pixels: int) -> None:
    """Write the most pixels of a scaled image into the processor's files of an exported folder.

    A policy that was trained on smaller images than the folder's files say would else be served
    with others. Raises OSError.
    """
    for name, key in FILES:
        file = Path(folder) / name
        content = json.loads(file.read_text()) if file.is_file() else {}
        settings = content if key is None else content.get(key)
        if isinstance(settings, dict) and settings.get("image_processor_type") in KINDS:
            _bound(settings, max_pixels)
            file.write_text(json.dumps(content, indent=2) + "\n")


def _bound(settings: dict[str, Any], max_pixels: int) -> None:
    """Set the largest size under the names that readers of the file have."""
    kind = KINDS[settings["image_processor_type"]]
    if kind.counts_frames:
        max_pixels *= settings.get("temporal_patch_size", 2)
    size = settings.get("size") or {}
    least = settings.get("min_pixels") or size.get("shortest_edge", kind.default.least)
    settings["size"] = {**size, "shortest_edge": least, "longest_edge": max_pixels}
    if "max_pixels" in settings:
        settings["max_pixels"] = max_pixels


def _bounds(
    settings: Mapping[str, Any], kind: Kind, frames: int, file: Path, max_pixels: int | None
) -> Bounds:
    """Return the bounds of a scaled image in the folder, in pixels of one frame.

    An engine counts the tokens of an image of GLM-V within the default bounds, whatever the folder
    says (``get_number_of_image_patches`` of transformers 5.12, called by ``base_processor.py`` of
    SGLang 0.5.21). Where the counts differ it would tokenize the text of the request again.

    Raises:
        ConfigError: the folder's bounds are outside of those, and ``max_pixels`` is not within them;
            or ``size`` lacks one, with which no engine starts.
    """
    size = settings.get("size") or {}
    edges = set(size) | {edge for key, edge in OLDER_KEYS.items() if settings.get(key)}
    if size and not edges >= set(OLDER_KEYS.values()):
        raise ConfigError(
            f"{file}: size = {size}; give shortest_edge and longest_edge, in pixels of the whole image"
        )
    least = size.get("shortest_edge", kind.default.least)
    most = size.get("longest_edge", kind.default.most)
    if not kind.counts_frames:
        return Bounds(settings.get("min_pixels") or least, settings.get("max_pixels") or most)
    largest = most if max_pixels is None else min(most, max_pixels * frames)
    if least < kind.default.least or largest > kind.default.most:
        raise ConfigError(
            f"{file}: size = {least} to {most} pixels, and engines count the tokens of images from "
            f"{kind.default.least} to {kind.default.most}; use bounds within these, such as the model's page has, or "
            f"--image-max-pixels of at most {kind.default.most // frames}"
        )
    return Bounds(-(-least // frames), most // frames)


def _of_channels(
    settings: Mapping[str, Any],
    key: str,
    default: tuple[float, ...],
    file: Path,
    *,
    least: float = -math.inf,
) -> tuple[float, ...]:
    """Return a number for each channel.

    Raises ConfigError if there are others than three finite ones of at least ``least``.
    """
    value = settings.get(key, default)
    numbers = value if isinstance(value, list | tuple) else [value] * len(default)
    kinds = all(type(one) in (int, float) for one in numbers)
    if len(numbers) != len(default) or not kinds or not all(map(math.isfinite, numbers)):
        raise ConfigError(f"{file}: {key} = {value}; images need {len(default)} numbers")
    if min(numbers) < least:
        raise ConfigError(f"{file}: {key} = {value}; images need numbers above 0")
    return tuple(numbers)


def _check_sizes(settings: Mapping[str, Any], folder: Path, file: Path) -> None:
    """Check that sizes are integers, and those of patches the encoder's.

    Raises ConfigError: they are not. A file of another model gives each image other tokens than the
    encoder has features.
    """
    size = settings.get("size")
    bounds = {key: settings.get(key) for key in OLDER_KEYS} | (
        size if isinstance(size, dict) else {}
    )
    sizes = bounds | {key: settings.get(key) for key in SIZES_OF_ENCODER}
    for key, value in sizes.items():
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"{file}: {key} = {value!r}; images need an integer of at least 1")
    try:
        encoder = read_config(folder).get("vision_config")
    except (OSError, ValueError):  # the check of the model names it
        return
    if not isinstance(encoder, dict):
        return
    for key, name in SIZES_OF_ENCODER.items():
        ours, theirs = settings.get(key), encoder.get(name)
        if ours is not None and theirs is not None and ours != theirs:
            raise ConfigError(
                f"{file}: {key} = {ours}, and {name} = {theirs} of the encoder in config.json; copy the file from "
                "the model's page"
            )


_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


def _settings(folder: Path) -> tuple[Path, Mapping[str, Any]]:
    """Return the settings of a folder's processor and their file, in the order of transformers."""
    for name, key in FILES:
        file = folder / name
        if not file.is_file():
            continue
        try:
            content = json.loads(file.read_text())
            settings = content if key is None else content.get(key)
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(f"{file}: cannot be read: {error}") from error
        if isinstance(settings, dict):
            return file, settings
    names = " or ".join(name for name, _ in FILES)
    raise ConfigError(f"{folder}: no {names} in it; images need one, copy it from the model's page")
