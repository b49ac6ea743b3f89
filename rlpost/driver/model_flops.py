"""Count the operations that a model needs for sequences and images, in all of a step. Pure.

A forward pass takes one multiplication and one addition for each used parameter and token, and
attention, which follows from the lengths. A backward pass takes twice that (Kaplan et al., arXiv
2001.08361, section 2.1). Recomputation does not count, as in "PaLM", arXiv 2204.02311, appendix B.
The encoder of images counts by ``VisionShape``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlpost.algorithm.schedule import break_even_length
from rlpost.algorithm.shared_prefix import has_one_prompt
from rlpost.config.plan.hf_shape import hf_shape
from rlpost.config.tree import Config
from rlpost.models.families import family
from rlpost.models.model_types import EXPERT_KEYS, HfConfig
from rlpost.types import ImageSpan, Sample, SampleGroup


@dataclass(frozen=True, slots=True)
class AttentionLayers:
    """What a model computes besides products with its weights."""

    full: int
    """Layers in which a token attends to all before it."""
    windowed: int
    window: int
    """Tokens to which a token attends in those, itself included."""
    width: int
    """Sum over heads of the widths of a key and of a value."""
    state: float
    """Operations of a token in all layers with linear attention: decay is left out."""

    def operations(self, length: int) -> float:
        """Operations of a forward pass over one sequence, two for each product of values."""
        of_windows = min(length, self.window) * length - min(length, self.window) ** 2 / 2
        pairs = self.full * length**2 / 2 + self.windowed * of_windows
        return 2.0 * self.width * pairs + self.state * length


def attention_layers(hf: HfConfig) -> AttentionLayers:
    """Return the layers that a config.json describes. Raises WeightError as ``hf_shape``."""
    known, shape = family(hf["architectures"][0]), hf_shape(hf)
    fields = known.fields(known.resolved(hf))
    linear, state = 0, 0.0
    if (net := shape.linear) is not None:
        linear = sum(net.layers)
        # key times state, its correction, and query times state (arXiv 2412.06464, eq. 10)
        state = 6.0 * linear * net.value_heads * net.key_dim * net.value_dim
    windowed = sum(fields.get("window_attn_skip_freq", ()))
    width = 2 * shape.head_dim
    if shape.latent is not None:
        width = shape.head_dim + shape.latent.position + shape.latent.value
    return AttentionLayers(
        full=shape.num_layers - linear - windowed,
        windowed=windowed,
        window=fields["window_size"][0] + 1 if windowed else 0,
        width=shape.heads * width,
        state=state,
    )


def used_parameters(hf: HfConfig) -> int:
    """Return the parameters used per token: routed experts only, no embedding lookup."""
    shape = hf_shape(hf)
    count = shape.parameters
    num_experts = next((hf[key] for key in EXPERT_KEYS if hf.get(key)), 1)
    used = hf.get("num_experts_per_tok", 0) / num_experts
    looked_up = 0 if shape.tied else hf["vocab_size"] * hf["hidden_size"]
    return round(count.dense - looked_up + count.expert * used)


def model_break_even(hf: HfConfig) -> float:
    """Return the sequence length in tokens at which attention costs as much as the weight matrices.

    Layers with windows or linear attention do not count; without others it is infinite. ``hf`` is
    the model's config.json.
    """
    layers = attention_layers(hf)
    if not layers.full:
        return math.inf
    return break_even_length(
        num_parameters=used_parameters(hf),
        num_layers=layers.full,
        attention_width=layers.width // 2,
    )


@dataclass(frozen=True, slots=True)
class Passes:
    """How often each part of the model is computed for a token: a backward pass counts twice."""

    matrices: int
    attention: int


class Flops:
    """Counts the model FLOPs of training on groups."""

    def __init__(self, config: Config, hf: Mapping[str, object]) -> None:
        """``hf`` is the model's config.json."""
        self._config = config
        self._a_token = 2.0 * used_parameters(hf)
        self._attention = attention_layers(hf)
        self._encoder = hf_shape(hf).vision if config.takes_images else None
        # otherwise a micro-batch has few samples, and not those of one prompt
        self._shares = bool(config.perf.share_prefix and config.max_tokens is not None)

    def of(self, groups: Sequence[SampleGroup], *, step: int) -> float:
        """Return the operations of training once on these groups, in step ``step`` of the run."""
        sequences, images = list[int](), list[ImageSpan]()
        for group in groups:
            prompt, shares = 0, self._shares and has_one_prompt(group)
            for number, scored in enumerate(group.samples):
                sample = scored.sample
                if number and shares:
                    prompt = len(sample.prompt_ids)
                sequences.append(_length(sample))
                if prompt:
                    sequences.append(-prompt)
                images += [span for span in sample.images if span.start >= prompt]
        passes = _passes(self._config, step)
        done = 0.0
        for length in sequences:
            tokens, sign = abs(length), math.copysign(1, length)
            done += sign * passes.matrices * self._a_token * tokens
            done += sign * passes.attention * self._attention.operations(tokens)
        return done + self._of_images(images)

    def _of_images(self, images: Iterable[ImageSpan]) -> float:
        """Of the encoder: for each distinct image while it is frozen, which computes it once."""
        if self._encoder is None:
            return 0.0
        which = self._config.optimizer.vision_tower
        if which == "frozen":
            images = {span.hash: span for span in images}.values()
        passes = self._config.num_logprob_passes
        return sum(
            self._encoder.needed_operations(math.prod(span.grid), which, passes) for span in images
        )


def _length(sample: Sample) -> int:
    return len(sample.prompt_ids) + len(sample.response_ids)


def _passes(config: Config, step: int) -> Passes:
    """Return the passes of a step: log-probs, training, and those of a critic."""
    matrices = attention = 0
    if step > config.critic.num_critic_only_steps:
        forward = 1 + config.num_logprob_passes
        # the matrices of a base that adapters train have no gradients
        matrices = forward + (2 if config.lora.lora_rank is None else 1)
        attention = forward + 2
    elif config.grpo.kl_coef:
        matrices = attention = 2  # log-probs of the policy and of the reference, for the rewards
    values = 4 if config.use_critic else 0  # forward, and training
    return Passes(matrices + values, attention + values)
