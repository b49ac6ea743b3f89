"""The rows of a micro-batch that stand for images, and the positions of all rows. Pure.

Input: samples with images, and the token that each row holds. Output: ``ImageRows``. A row takes its
feature by the span of an image and never by its token id: a policy may sample the id of an image
token as well.

Positions of a token are those of transformers (``get_rope_index`` in ``modeling_qwen3_vl.py`` of
5.12): frame, row and column. A text token has the same number on all three axes. The tokens of an
image begin at the next number and count frames, rows and columns from there; the token after it has
the number after the largest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch

from rlpost.errors import DataError
from rlpost.trainer import device
from rlpost.types import ImageSpan, MicroBatch, TrainSample

Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class ImageRows:
    """The images of a micro-batch with T rows on this rank, I of which stand for images.

    Attributes:
        images: each image once, in the order of their features.
        rows: [I] int64, in T.
        features: [I] int64, the feature of each of these rows, among those of all ``images``.
        positions: [3, T of all context-parallel ranks] int64: frame, row and column.
    """

    images: tuple[ImageSpan, ...]
    rows: torch.Tensor
    features: torch.Tensor
    positions: torch.Tensor

    def on_device(self) -> ImageRows:
        """Copy to the device of this rank."""
        tensors = {
            field.name: device.on_device(getattr(self, field.name))
            for field in fields(self)
            if field.name != "images"
        }
        return replace(self, **tensors)


def image_rows(
    micro_batch: MicroBatch, *, held: torch.Tensor, whole: torch.Tensor
) -> ImageRows | None:
    """Return the rows of images of a micro-batch; None if it has no image.

    Args:
        micro_batch: its samples.
        held: [T] int64, the token that each row of this rank holds, among those of all samples in
            order; -1 at padding.
        whole: the same for the rows of all context-parallel ranks, in the order of the sequences.

    Raises:
        DataError: the span of an image is not in its sample, or has another number of tokens than
            its grid.
    """
    if not any(sample.images for sample in micro_batch):
        return None
    # A row of padding reads the last token, and its values are not used.
    positions = torch.cat([token_positions(sample) for sample in micro_batch], dim=1)
    first_feature: dict[tuple[str, Grid], int] = {}
    images: list[ImageSpan] = []
    feature_rows = torch.full((positions.size(1),), -1)
    begin = num_features = 0
    for sample in micro_batch:
        for image in sample.images:
            key = image.hash, image.grid
            if key not in first_feature:
                first_feature[key] = num_features
                num_features += image.num_tokens
                images.append(image)
            first = first_feature[key]
            span = slice(begin + image.start, begin + image.end)
            feature_rows[span] = torch.arange(first, first + image.num_tokens)
        begin += len(sample.token_ids)
    features = torch.where(held >= 0, feature_rows[held], -1)
    rows = (features >= 0).nonzero()[:, 0]
    return ImageRows(tuple(images), rows, features[rows], positions[:, whole])


def token_positions(sample: TrainSample) -> torch.Tensor:
    """[3, tokens] int64: frame, row and column of each token. Raises DataError as ``image_rows``."""
    parts = []
    end = number = 0
    for image in sample.images:
        sizes = _merged(image)
        if not end <= image.start < image.end <= len(sample.token_ids):
            raise DataError(
                f"an image at tokens {image.start} to {image.end} of a sample of {len(sample.token_ids)} "
                f"tokens, after one that ends at {end}; images follow each other and are never cut"
            )
        before = image.start - end
        parts.append(_text(before, number))
        number += before
        parts.append(torch.cartesian_prod(*map(torch.arange, sizes)).T + number)
        number += max(sizes[1:])
        end = image.end
    parts.append(_text(len(sample.token_ids) - end, number))
    return torch.cat(parts, dim=1)


def _text(length: int, number: int) -> torch.Tensor:
    return torch.arange(number, number + length).expand(3, -1)


def _merged(image: ImageSpan) -> tuple[int, int, int]:
    """Return frames, rows and columns of an image's tokens: each is a square of patches."""
    frames, rows, columns = image.grid
    side = math.isqrt(max(1, frames * rows * columns // max(1, image.num_tokens)))
    merged = frames, rows // side, columns // side
    if math.prod(merged) != image.num_tokens:
        raise DataError(
            f"an image of {frames} x {rows} x {columns} patches has {image.num_tokens} tokens; give "
            "the grid of the model's processor"
        )
    return merged
