"""The encoder of images in the plan: what it adds to ranks of the first pipeline stage. Pure.

Input: settings and ``vision_config`` of config.json. Output: bytes and operations. The encoder is
frozen and replicated over all ranks of the first stage. It runs forward alone, on one image at a time;
its features are kept by hash, so a rank computes each image once in a step. Ranks that share a
group each compute its image: those of tensor and context parallelism, and data-parallel ranks that
have some of its samples.

A plan does not know the images of a run. It counts one of each prompt, as large as
--image-max-pixels and the longest prompt allow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlpost.images.limits import FEATURE_CACHE_BYTES

if TYPE_CHECKING:
    from rlpost.config.tree import Config

PIXEL_BYTES = 4
PROMPT_TOKENS = 1024
"""Longest prompt where the settings do not bound it."""


@dataclass(frozen=True, slots=True)
class VisionShape:
    """Sizes of an encoder of the kind of Qwen3-VL."""

    depth: int
    hidden: int
    ffn: int
    output: int
    """Hidden size of the language model."""
    positions: int
    side: int
    """Pixels of a side of a patch."""
    elements: int
    """Values of a patch: colours, frames, rows and columns."""
    merge: int
    """Patches of a side that become one token."""
    deep: int
    """Layers of the language model that add features."""

    @property
    def merged(self) -> int:
        """Width of the patches of a token."""
        return self.hidden * self.merge**2

    @property
    def parameters(self) -> int:
        """Weights and biases: patches, positions, layers, and a merger for each set of features."""
        hidden, ffn, merged = self.hidden, self.ffn, self.merged
        layer = 4 * hidden * hidden + 2 * hidden * ffn + 9 * hidden + ffn
        merger = merged * (merged + 1) + (merged + 1) * self.output
        norms = 2 * hidden + self.deep * 2 * merged
        first = (self.elements + 1) * hidden + self.positions * hidden
        return first + self.depth * layer + (1 + self.deep) * merger + norms

    def operations(self, patches: int) -> float:
        """Floating-point operations of one image; each patch attends to all."""
        hidden, merged = self.hidden, self.merged
        matrices = self.depth * (4 * hidden * hidden + 2 * hidden * self.ffn)
        matrices += self.elements * hidden
        merger = (1 + self.deep) * (merged * merged + merged * self.output) / self.merge**2
        return 2.0 * patches * (matrices + merger) + 4.0 * self.depth * patches**2 * hidden

    def activations(self, patches: int, width: int) -> int:
        """Most bytes while one image is encoded, values of ``width`` bytes.

        The residual and its norm, with either queries, keys and values, which are rotated in float32
        (``apply_rotary_pos_emb_vision`` of transformers), or the MLP; and what is kept for the deep
        features.
        """
        attention = width * 4 * self.hidden + 4 * 4 * self.hidden
        either = max(attention, 2 * width * self.ffn)
        deep = self.deep * width * self.output // self.merge**2
        pixels = PIXEL_BYTES * self.elements
        return patches * (2 * width * self.hidden + either + deep + pixels)


def vision_shape(vision_config: Mapping[str, Any], *, num_deep_layers: int) -> VisionShape:
    """Return the sizes in ``vision_config``. Raises KeyError for one that is missing."""
    side, frames = vision_config["patch_size"], vision_config.get("temporal_patch_size", 2)
    return VisionShape(
        depth=vision_config["depth"],
        hidden=vision_config["hidden_size"],
        ffn=vision_config["intermediate_size"],
        output=vision_config["out_hidden_size"],
        positions=vision_config["num_position_embeddings"],
        side=side,
        elements=vision_config.get("in_channels", 3) * frames * side * side,
        merge=vision_config.get("spatial_merge_size", 2),
        deep=num_deep_layers,
    )


def image_tokens(config: Config, shape: VisionShape) -> int:
    """Return the tokens of the largest image that the settings allow."""
    rollout = config.rollout
    longest = rollout.rollout_max_prompt_len or PROMPT_TOKENS
    if rollout.image_max_pixels is not None:
        longest = min(longest, rollout.image_max_pixels // (shape.side * shape.merge) ** 2)
    return max(1, longest)


@dataclass(frozen=True, slots=True)
class PlannedVision:
    """What the encoder adds to a rank of the first stage: bytes on its GPU, operations of a step."""

    weights: int = 0
    activations: int = 0
    """While an image is encoded; no layer of the language model is computed then."""
    features: int = 0
    """Of a micro-batch in flight, kept until its backward pass."""
    operations: float = 0.0
    host: int = 0
    """Features that are kept in host memory."""


NO_VISION = PlannedVision()


def planned_vision(
    config: Config, shape: VisionShape | None, *, width: int, tokens: int
) -> PlannedVision:
    """Return what the encoder adds; nothing without --multimodal-keys.

    Args:
        config: the settings.
        shape: of the encoder; None without one.
        width: bytes of a value.
        tokens: of a micro-batch on a rank.
    """
    if shape is None or not config.takes_images:
        return NO_VISION
    patches = image_tokens(config, shape) * shape.merge**2
    prompts = config.rollout.rollout_batch_size
    samples = prompts * config.rollout.n_samples_per_prompt / config.data_parallel_size
    return PlannedVision(
        weights=width * shape.parameters,
        activations=shape.activations(patches, width),
        features=tokens * (1 + shape.deep) * width * shape.output,
        operations=min(prompts, samples) * shape.operations(patches),
        host=FEATURE_CACHE_BYTES,
    )
