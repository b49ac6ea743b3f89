"""The encoder of images: transformers' vision model.

Input: the patches of an image. Output: its features, one for each of its tokens. Every rank of the
first pipeline stage has the whole encoder. Weights that are frozen are those of the folder: they
are not sent to engines and not in checkpoints, and an export has the folder's bytes. The others are
part of Megatron's model (``rlpost.trainer.vision.trained``).
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from rlpost.errors import WeightError
from rlpost.models.family import Vision
from rlpost.models.model_types import HfConfig
from rlpost.trainer import device
from rlpost.trainer.vision.trained import trained_part
from rlpost.trainer.weights.importer import HuggingFaceFolder

Grid = tuple[int, int, int]


class Tower:
    """The encoder of one rank."""

    def __init__(
        self,
        vision: Vision,
        hf: HfConfig,
        dtype: torch.dtype,
        *,
        which: str = "frozen",
        recompute: bool = False,
    ) -> None:
        """Build it on the current device, with uninitialised weights of ``dtype``.

        Args:
            vision: the kind of encoder.
            hf: the keys of the language model and ``vision_config``.
            dtype: of all weights.
            which: the weights that are trained, see --vision-tower.
            recompute: compute an image again in the backward pass, instead of keeping activations.
        """
        self._vision = vision
        self._recompute = recompute
        self.num_deep_layers = vision.num_deep_layers(hf)
        self.module = _build(vision, hf["vision_config"]).to(device.current())
        for weight in self.module.parameters():  # buffers stay float32, as in from_pretrained
            weight.data = weight.data.to(dtype)  # e.g. the rotary frequencies
        self.module.eval().requires_grad_(False)
        self.trained = trained_part(self.module, which)
        """Its weights that are trained, by their names in the encoder; None without any."""

    @torch.no_grad()
    def read_weights(self, source: HuggingFaceFolder, *, untrained_alone: bool = False) -> None:
        """Fill the weights from a folder: all, or those outside the part ``trained``.

        Weights of that part which are frozen by name belong to Megatron's model like the others.

        Raises:
            WeightError: a tensor is missing, unused, or has another shape.
        """
        prefix = self._vision.prefix
        weights = dict(self.module.named_parameters())
        stored = {name for name in source.file_of if name.startswith(prefix)}
        if unused := sorted(stored - {prefix + name for name in weights}):
            raise WeightError(
                f"{source.folder} has {len(unused)} tensors that its encoder of images does not use, "
                f"starting with {unused[0]}; check that config.json belongs to these weights"
            )
        trained = () if self.trained is None else self.trained.parameters()
        kept = set(map(id, trained)) if untrained_alone else set()
        for name, weight in weights.items():
            if id(weight) in kept:
                continue
            tensor = source.read_weight(prefix + name)
            if tensor.shape != weight.shape:
                raise WeightError(
                    f"{prefix}{name} in {source.folder} has shape {tuple(tensor.shape)}, but the encoder "
                    f"needs {tuple(weight.shape)}; check that config.json belongs to these weights"
                )
            weight.copy_(tensor)

    def encode(self, values: np.ndarray, grid: Grid) -> torch.Tensor:
        """Return the features of one image.

        One image at a time: its features do not depend on the others of a micro-batch, and the
        encoder's activations are those of the largest image.

        Args:
            values: float32 [patches, width], as the model's processor gives them.
            grid: frames, rows and columns of patches.

        Returns:
            [tokens, 1 + deep layers, hidden]: for the embedding, and for each of the first layers.
        """
        pixels = torch.from_numpy(values).to(self.module.device)
        sizes = torch.tensor([grid], device=self.module.device)
        if self._recompute and self.trained is not None and torch.is_grad_enabled():
            features: torch.Tensor = checkpoint(
                self._features, pixels, sizes, use_reentrant=False, preserve_rng_state=False
            )
            return features
        return self._features(pixels, sizes)

    def _features(self, pixels: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        output: Any = self.module(pixels, grid_thw=sizes)
        deep = output.deepstack_features if self.num_deep_layers else ()
        return torch.stack([output.pooler_output, *deep], dim=1)

    def no_features(self) -> torch.Tensor:
        """Return the features of no image: [0, 1 + deep layers, hidden]."""
        config: Any = self.module.config
        width = config.out_hidden_size
        return torch.empty(
            0, 1 + self.num_deep_layers, width, dtype=self.module.dtype, device=self.module.device
        )


def _build(vision: Vision, config: HfConfig) -> Any:
    """transformers' class, without initial values of weights."""
    from transformers.initialization import no_init_weights

    module, _, name = vision.tower.rpartition(".")
    kind = getattr(importlib.import_module(f"transformers.models.{module}"), name)
    with no_init_weights():
        return kind._from_config(
            kind.config_class.from_dict(dict(config)), attn_implementation="sdpa"
        )
