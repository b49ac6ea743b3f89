"""Sizes of an encoder of images, and of the images that a run's settings allow. Pure.

Input: settings and ``vision_config`` of config.json. Output: parameters, sizes, and tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from rlpost.models.family import EncoderLayers
from rlpost.models.model_types import HfConfig

if TYPE_CHECKING:
    from rlpost.config.tree import Config

PROMPT_TOKENS = 1024
"""Longest prompt where the settings do not bound it."""


@dataclass(frozen=True, slots=True)
class VisionShape:
    """Sizes of an encoder whose patches attend to each other in layers, and are then merged."""

    depth: int
    hidden: int
    ffn: int
    """Width of a layer's MLP."""
    of_inputs: int
    """Parameters before the layers, and of norms after them: patches and positions."""
    of_layer: int
    """Parameters of a layer."""
    of_mergers: int
    """Parameters of what projects patches to the language model, norms included."""
    output: int
    """Hidden size of the language model."""
    side: int
    """Pixels of a side of a patch."""
    elements: int
    """Values of a patch: colours, frames, rows and columns."""
    merge: int
    """Patches of a side that become one token."""
    deep: int
    """Layers of the language model that add features."""
    kept_by_mergers: int
    """Values of each patch that what projects them keeps for its backward pass."""
    kept_besides: int
    """Values of each patch that are kept outside the layers and beside those."""
    float32_norms: int
    """Norms that also keep their input in float32: all RMSNorms of transformers."""
    ffn_inputs: int = 1
    """Matrices from the hidden size to that of the MLP: 2 if it is gated."""
    windowed: int = 0
    """Layers whose patches attend within a window alone."""
    window: int = 0
    """Patches of a window."""

    @property
    def parameters(self) -> int:
        """All weights and biases."""
        return self.of_inputs + self.depth * self.of_layer + self.of_mergers

    def operations(self, patches: int) -> float:
        """Floating-point operations of the forward pass of one image.

        Two for each parameter and patch, or token of a merger, and attention of all patches.
        """
        weights = self.elements * self.hidden + self.depth * self.of_layer
        attended = (self.depth - self.windowed) * patches
        attended += self.windowed * min(patches, self.window)
        attention = 4.0 * patches * attended * self.hidden  # scores, and sums of values
        return 2.0 * patches * weights + attention + self.merger_operations(patches)

    def merger_operations(self, patches: int) -> float:
        """The part of ``operations`` of what projects patches to the language model."""
        return 2.0 * patches * self.of_mergers / self.merge**2

    def needed_operations(self, patches: int, vision_tower: str, num_logprob_passes: int) -> float:
        """Operations that a step needs for one image, recomputation aside.

        Args:
            patches: of the image.
            vision_tower: see --vision-tower. Features of a frozen encoder are computed once; a
                trained one runs in every pass, and backward through its trained part alone.
            num_logprob_passes: beside training.
        """
        forward = self.operations(patches)
        if vision_tower == "frozen":
            return forward
        backward = forward if vision_tower == "all" else self.merger_operations(patches)
        return (1 + num_logprob_passes) * forward + 2 * backward


def vision_shape(
    vision_config: HfConfig, *, layers: EncoderLayers, num_deep_layers: int
) -> VisionShape:
    """Return the sizes in ``vision_config``, of an encoder with such layers.

    Raises KeyError for one that is missing.
    """
    side, frames = vision_config["patch_size"], vision_config.get("temporal_patch_size", 2)
    elements = vision_config.get("in_channels", 3) * frames * side * side
    merge = vision_config.get("spatial_merge_size", 2)
    count = {"plain": _plain, "gated": _gated, "glm": _glm}[layers]
    return VisionShape(
        depth=vision_config["depth"],
        hidden=vision_config["hidden_size"],
        output=vision_config["out_hidden_size"],
        side=side,
        elements=elements,
        merge=merge,
        deep=num_deep_layers,
        ffn_inputs=1 if layers == "plain" else 2,
        **_windows(vision_config, side),
        **count(vision_config, elements, merge**2, num_deep_layers),
    )


class _Counts(TypedDict):
    """The fields of ``VisionShape`` whose formula depends on the kind of encoder."""

    ffn: int
    of_inputs: int
    of_layer: int
    of_mergers: int
    kept_by_mergers: int
    kept_besides: int
    float32_norms: int


class _Windows(TypedDict):
    windowed: int
    window: int


def _windows(sizes: HfConfig, side: int) -> _Windows:
    """Layers with windows: those that Qwen2.5-VL's ``fullatt_block_indexes`` leaves out."""
    if (whole := sizes.get("fullatt_block_indexes")) is None:
        return {"windowed": 0, "window": 0}
    return {
        "windowed": sizes["depth"] - len(set(whole)),
        "window": (sizes.get("window_size", 112) // side) ** 2,  # pixels of a side
    }


def _plain(sizes: HfConfig, elements: int, merged: int, deep: int) -> _Counts:
    """Qwen3-VL: an MLP of two matrices, biases everywhere, a merger for each set of features."""
    hidden, ffn, output = sizes["hidden_size"], sizes["intermediate_size"], sizes["out_hidden_size"]
    wide = merged * hidden
    merger = wide * wide + wide + wide * output + output
    return {
        "ffn": ffn,
        "of_inputs": (elements + 1 + sizes["num_position_embeddings"]) * hidden,
        "of_layer": 4 * hidden * (hidden + 1) + 2 * hidden * ffn + ffn + hidden + 4 * hidden,
        "of_mergers": (1 + deep) * merger + 2 * hidden + deep * 2 * wide,
        # input, norm, and the first matrix before and after its activation
        "kept_by_mergers": (1 + deep) * 4 * hidden,
        "kept_besides": elements - deep * hidden,  # layers keep the inputs of deep mergers
        "float32_norms": 0,
    }


def _gated(sizes: HfConfig, elements: int, merged: int, deep: int) -> _Counts:
    """Qwen2.5-VL: a gated MLP, no positions; norms and the embedding of patches without biases."""
    hidden, ffn, output = sizes["hidden_size"], sizes["intermediate_size"], sizes["out_hidden_size"]
    wide = merged * hidden
    return {
        "ffn": ffn,
        "of_inputs": elements * hidden,
        "of_layer": 4 * hidden * (hidden + 1) + 3 * hidden * ffn + 2 * ffn + hidden + 2 * hidden,
        "of_mergers": wide * wide + wide + wide * output + output + hidden,
        "kept_by_mergers": 4 * hidden,
        "kept_besides": elements,
        "float32_norms": 2 * sizes["depth"] + 1,
    }


def _glm(sizes: HfConfig, elements: int, merged: int, deep: int) -> _Counts:
    """GLM-V: an MLP as wide as the language model, and ``intermediate_size`` in the merger alone.

    Patches are merged by a convolution, which counts as a merger. Biases have the embedding of
    patches, the convolution and the merger's norm, and queries, keys and values if config.json says.
    """
    hidden, output = sizes["hidden_size"], sizes["out_hidden_size"]
    ffn = sizes.get("intermediate_size", 13696)  # transformers' defaults
    positions = (sizes.get("image_size", 336) // sizes["patch_size"]) ** 2
    biases = 3 * hidden if sizes.get("attention_bias") else 0
    convolution = merged * hidden * output + output
    merger = output * output + 2 * output + 3 * output * ffn
    return {
        "ffn": output,
        "of_inputs": (elements + 1 + positions) * hidden + 2 * hidden,
        "of_layer": 4 * hidden * hidden + biases + 3 * hidden * output + 2 * hidden,
        "of_mergers": convolution + merger,
        # input of the convolution; of each token its output, projection, norm, activation, and the MLP
        "kept_by_mergers": hidden + 4 * (output + ffn) // merged,
        "kept_besides": elements + 2 * hidden,  # the norms before and after the layers
        "float32_norms": 2 * sizes["depth"] + 2,
    }


def image_tokens(config: Config, shape: VisionShape) -> int:
    """Return the tokens of the largest image that a prompt may have."""
    return bounded_image_tokens(config, shape, prompt_tokens(config))


def prompt_tokens(config: Config) -> int:
    """Return the tokens of the longest prompt."""
    return config.rollout.rollout_max_prompt_len or PROMPT_TOKENS


def longest_sample(config: Config) -> int:
    """Return the tokens of the longest prompt and answer together."""
    rollout = config.rollout
    in_context = rollout.rollout_max_context_len
    return in_context or prompt_tokens(config) + rollout.rollout_max_response_len


def bounded_image_tokens(config: Config, shape: VisionShape, tokens: int) -> int:
    """Return the tokens of the largest image among ``tokens``, which --image-max-pixels bounds."""
    pixels = config.rollout.image_max_pixels
    if pixels is not None:
        tokens = min(tokens, pixels // (shape.side * shape.merge) ** 2)
    return max(1, tokens)
