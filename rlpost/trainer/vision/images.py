"""Give the rows of images their features, in Megatron's model.

Input: the packed rows of a micro-batch, which name its images by their hash. Output: embeddings with
the features of images, and hidden states of the first layers with their deep features. Pixels are
read from the run folder by each rank of the first pipeline stage; they are never in a batch.

Invariant: an image has the same features in all passes and micro-batches with the same weights,
since the encoder runs on one image at a time. They are kept while the encoder is frozen.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from rlpost.config.tree import Config
from rlpost.errors import DataError
from rlpost.images.limits import FEATURE_CACHE_BYTES
from rlpost.images.processor import ImageProcessor
from rlpost.images.store import ImageStore
from rlpost.trainer import device, parallel
from rlpost.trainer.model_description import ModelDescription
from rlpost.trainer.shared_rows import Arguments, RowParams
from rlpost.trainer.vision.tower import Grid, Tower
from rlpost.trainer.vision.trained import attach, put_features, with_gradients
from rlpost.trainer.weights.importer import HuggingFaceFolder
from rlpost.types import ImageSpan

PixelsOf = Callable[[str], tuple[np.ndarray, Grid]]
"""The patches and the grid of the image with a hash."""


def build_images(
    config: Config, description: ModelDescription, run_folder: str | Path | None
) -> Images | None:
    """Build the encoder of this rank, with uninitialised weights. Needs parallel state.

    Returns:
        None without --multimodal-keys, and on all pipeline stages but the first.
    """
    if not config.takes_images or not parallel_state.is_pipeline_first_stage():
        return None
    vision = description.family.vision
    assert vision is not None, "checked with the layout"
    tower = Tower(
        vision,
        description.hf_config,
        device.weight_dtype(config.perf.bf16),
        which=config.optimizer.vision_tower,
        recompute=config.perf.recompute_granularity == "full",
    )

    def pixels_of(digest: str) -> tuple[np.ndarray, Grid]:
        assert run_folder is not None, "the ranks of a run have its folder"
        processor = ImageProcessor.of(
            description.path.parent, max_pixels=config.rollout.image_max_pixels
        )
        return processor.pixel_values(ImageStore(run_folder).read(digest))

    return Images(tower, pixels_of)


class Images:
    """The features of images on a rank of the first pipeline stage."""

    def __init__(
        self, tower: Tower, pixels_of: PixelsOf, *, cache_bytes: int = FEATURE_CACHE_BYTES
    ) -> None:
        self.tower = tower
        self._pixels_of = pixels_of
        self._cache_bytes = cache_bytes
        self._kept: OrderedDict[str, torch.Tensor] = OrderedDict()  # the last used is the last
        self._kept_bytes = 0

    def read_weights(self, folder: str | Path, *, untrained_alone: bool = False) -> None:
        """Load the encoder's weights from a Hugging Face folder; see ``Tower.read_weights``."""
        self.tower.read_weights(HuggingFaceFolder(folder), untrained_alone=untrained_alone)
        self.forget()

    def install(self, chunk: GPTModel) -> None:
        """Add the features of images in every forward pass of the model's first chunk.

        What is trained of the encoder becomes a part of the chunk.
        """
        if self.tower.trained is not None:
            attach(self.tower.trained, chunk)
        chunk.register_forward_pre_hook(self._embed, with_kwargs=True)
        for number in range(self.tower.num_deep_layers):
            # A layer that is recomputed adds them again, from the parameters of its micro-batch.
            chunk.decoder.layers[number].register_forward_hook(
                partial(_add_deep_features, number), with_kwargs=True
            )

    def features(self, images: Sequence[ImageSpan]) -> torch.Tensor:
        """Return the features of images, one after the other: [F, 1 + deep layers, hidden].

        The result is on the device.

        Raises:
            ImageError: a file is missing or damaged.
            DataError: an image has other patches than its span says.
        """
        part = self.tower.trained
        if part is None:
            return torch.cat([device.on_device(self._features_of(image)) for image in images])
        if not torch.is_grad_enabled():
            return self._all_encoded(images)
        return with_gradients(lambda: self._all_encoded(images), part)

    def forget(self) -> None:
        """Drop the features that are kept."""
        self._kept.clear()
        self._kept_bytes = 0

    def _features_of(self, image: ImageSpan) -> torch.Tensor:
        """[tokens, 1 + deep layers, hidden], in host memory."""
        features = self._kept.get(image.hash)
        if features is None:
            return self._keep(image.hash, self._encoded(image))
        self._kept.move_to_end(image.hash)
        return _checked(features, image)

    def _all_encoded(self, images: Sequence[ImageSpan]) -> torch.Tensor:
        if not images:
            return self.tower.no_features()
        return torch.cat([self._encoded(image) for image in images])

    def _encoded(self, image: ImageSpan) -> torch.Tensor:
        """[tokens, 1 + deep layers, hidden], on the device of the encoder."""
        values, grid = self._pixels_of(image.hash)
        if grid != image.grid:
            raise DataError(
                f"image {image.hash} has {grid} patches now and had {image.grid} when its prompt was "
                "tokenized; keep the processor of the model folder and --image-max-pixels"
            )
        return _checked(self.tower.encode(values, grid), image)

    def _keep(self, digest: str, features: torch.Tensor) -> torch.Tensor:
        """Keep features within the bound, and return them in host memory."""
        on_host = self._kept[digest] = features.cpu()
        self._kept_bytes += on_host.nbytes
        while self._kept_bytes > self._cache_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= oldest.nbytes
        return on_host

    def _embed(
        self, chunk: GPTModel, args: tuple[torch.Tensor, ...], kwargs: dict[str, object]
    ) -> Arguments:
        """Compute the embeddings of a row, and replace those of images by their features."""
        params, part = kwargs["packed_seq_params"], self.tower.trained
        images = params.images if isinstance(params, RowParams) else None
        gives_gradients = part is not None and torch.is_grad_enabled()
        if images is None and not gives_gradients:
            return args, kwargs
        ids, positions, *_ = args
        embedded = chunk.embedding(input_ids=ids, position_ids=positions)  # [T (/ tp), 1, hidden]
        spans: Sequence[ImageSpan] = ()
        rows, features = [torch.empty(0, dtype=torch.int64, device=ids.device)] * 2
        if images is not None:
            spans, rows, features = images.images, images.rows, images.features
        if chunk.config.sequence_parallel:  # this rank has an equal part of the row
            begin = parallel.tensor_parallel_group().rank() * embedded.size(0)
            is_here = (rows >= begin) & (rows < begin + embedded.size(0))
            rows, features = rows[is_here] - begin, features[is_here]
        image_features = self.features(spans)[features].to(embedded.dtype)
        embedded, deep = put_features(embedded, rows, image_features)
        if isinstance(params, RowParams):
            params.deep_features = deep
        return args, {**kwargs, "decoder_input": embedded}


def _checked(features: torch.Tensor, image: ImageSpan) -> torch.Tensor:
    if features.size(0) != image.num_tokens:
        raise DataError(
            f"image {image.hash} has {features.size(0)} features for {image.num_tokens} tokens"
        )
    return features


def _add_deep_features(
    number: int,
    layer: torch.nn.Module,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    output: tuple[torch.Tensor, ...],
) -> tuple[torch.Tensor, ...]:
    """Add the deep features of layer ``number`` to its hidden states [T, 1, hidden]."""
    params = kwargs["packed_seq_params"]
    if not isinstance(params, RowParams) or params.deep_features is None:
        return output
    hidden, *others = output
    return params.deep_features.add(hidden, number), *others
