"""The encoder of images in the plan: what it adds to ranks of the first pipeline stage. Pure.

Input: settings and ``vision_config`` of config.json. Output: bytes and operations. The encoder is
replicated over all ranks of the first stage, and runs on one image at a time. A frozen one runs
forward alone; its features are kept by hash, so a rank computes each image once in a step. Ranks
that share a group each compute its image: those of tensor and context parallelism, and
data-parallel ranks that have some of its samples. One that is trained runs in each pass.

A plan does not know the images of a run. What a micro-batch keeps follows from its tokens, of which all
may be images that an answer does not have: those of prompts, and with environments those of whole
conversations. What one image takes while it is encoded is that of the largest that
--image-max-pixels and these tokens allow. Time counts one such image of each prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlpost.config.plan.vision import (
    VisionShape,
    bounded_image_tokens,
    image_tokens,
    longest_sample,
    prompt_tokens,
)
from rlpost.config.tree import Config
from rlpost.images.limits import FEATURE_CACHE_BYTES

PIXEL_BYTES = 4
FLOAT32 = 4


def largest_image_tokens(config: Config, shape: VisionShape) -> int:
    """Return the tokens of the largest image that a sample may have."""
    return bounded_image_tokens(config, shape, _tokens_with_images(config))


def _tokens_with_images(config: Config) -> int:
    """Return the tokens of a sample among which images may be."""
    return longest_sample(config) if config.answers_are_episodes else prompt_tokens(config)


def activation_bytes(shape: VisionShape, patches: int, width: int) -> int:
    """Most bytes while one image is encoded, values of ``width`` bytes.

    The residual and its norm, with either queries, keys and values, which are rotated in float32
    (``apply_rotary_pos_emb_vision`` of transformers), or the MLP; and what is kept for the deep
    features.
    """
    attention = width * 4 * shape.hidden + 4 * 4 * shape.hidden
    either = max(attention, (1 + shape.ffn_inputs) * width * shape.ffn)
    deep = shape.deep * width * shape.output // shape.merge**2
    pixels = PIXEL_BYTES * shape.elements
    return patches * (2 * width * shape.hidden + either + deep + pixels)


def kept_bytes(shape: VisionShape, patches: int, width: int) -> int:
    """Bytes that the encoder keeps for its backward pass, without recomputation.

    Of each layer: the residual twice, both norms, queries, keys and values before and after they
    are rotated, what attention returns, and the MLP before and after its activation. Left out are
    GLM-V's positions in float32, which every image keeps whole: a few MB.
    """
    of_layer = 11 * shape.hidden + 2 * shape.ffn_inputs * shape.ffn
    values = shape.depth * of_layer + shape.kept_by_mergers + shape.kept_besides
    return patches * (width * values + FLOAT32 * shape.float32_norms * shape.hidden)


def kept_bytes_if_frozen(shape: VisionShape, patches: int, width: int) -> int:
    """Bytes that are kept if only what projects patches is trained."""
    return patches * width * shape.kept_by_mergers


@dataclass(frozen=True, slots=True)
class PlannedVision:
    """What the encoder adds to a rank of the first stage: bytes on its GPU, operations of a step."""

    weights: int = 0
    activations: int = 0
    """While an image is encoded; no layer of the language model is computed then."""
    features: int = 0
    """Of a micro-batch in flight, kept until its backward pass."""
    kept: int = 0
    """Activations of a micro-batch in flight, until its backward pass."""
    trained: int = 0
    """Parameters with gradients and optimizer."""
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
    patches = largest_image_tokens(config, shape) * shape.merge**2
    prompts = config.rollout.rollout_batch_size
    samples = prompts * config.rollout.n_samples_per_prompt / config.data_parallel_size
    frozen = PlannedVision(
        weights=width * shape.parameters,
        activations=activation_bytes(shape, patches, width),
        features=tokens * (1 + shape.deep) * width * shape.output,
        operations=min(prompts, samples) * _operations_of_image(config, shape),
        host=FEATURE_CACHE_BYTES,
    )
    if config.optimizer.vision_tower == "frozen":
        return frozen
    kept_patches = tokens_of_images(config, tokens) * shape.merge**2
    return _with_training(config, shape, frozen, samples=samples, kept_patches=kept_patches)


def tokens_of_images(config: Config, tokens: int) -> int:
    """Return how many tokens of images a micro-batch may have, of ``tokens`` a rank.

    A micro-batch that is packed up to a limit of tokens has more images the shorter its answers are.
    """
    tokens *= config.perf.context_parallel_size
    if config.max_tokens is not None:
        return tokens
    return min(tokens, config.perf.micro_batch_size * _tokens_with_images(config))


def _operations_of_image(config: Config, shape: VisionShape) -> float:
    return shape.operations(image_tokens(config, shape) * shape.merge**2)


def needed_operations(config: Config, shape: VisionShape | None) -> float:
    """Operations that the images of a step need, on all ranks together; see ``perf/mfu_frac``."""
    if shape is None or not config.takes_images:
        return 0.0
    patches = image_tokens(config, shape) * shape.merge**2
    which = config.optimizer.vision_tower
    prompts = config.rollout.rollout_batch_size
    images = prompts if which == "frozen" else config.samples_per_rollout
    return images * shape.needed_operations(patches, which, config.num_logprob_passes)


def _with_training(
    config: Config, shape: VisionShape, frozen: PlannedVision, *, samples: float, kept_patches: int
) -> PlannedVision:
    """Add what training takes: activations of ``kept_patches``, or of one image if recomputed.

    Features are not kept then, so each pass for log-probs computes them, too.
    """
    patches = largest_image_tokens(config, shape) * shape.merge**2
    width = frozen.weights // shape.parameters
    is_whole = config.optimizer.vision_tower == "all"
    is_recomputed = config.perf.recompute_granularity == "full"
    kept = kept_bytes if is_whole else kept_bytes_if_frozen
    trained = shape.parameters if is_whole else shape.of_mergers
    passes = 1 + config.num_logprob_passes + is_recomputed
    passes += 2 * is_whole  # the backward pass counts twice
    recomputed = kept(shape, patches, width) if is_recomputed else 0
    return replace(
        frozen,
        trained=trained,
        activations=frozen.activations + width * trained + recomputed,
        kept=0 if is_recomputed else kept(shape, kept_patches, width),
        operations=passes * samples * _operations_of_image(config, shape),
        host=0,
    )
