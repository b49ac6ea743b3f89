"""Frequencies of the rotary embedding, and their use in Megatron's model.

Input: the options of ``rlpost.models.rope``. Output: one frequency for each pair of a head's
rotated dimensions. All of it is computed in float32 with the operations of transformers
(``modeling_rope_utils.py``), because a rounding error of a frequency grows with the position.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention

from rlpost.models.rope import AxisSections, RopeOptions, attention_factor, rope_type


def inverse_frequencies(options: RopeOptions, width: int) -> torch.Tensor:
    """Return the angle by which a position rotates each pair: [width / 2] float32.

    ``width`` is the number of rotated dimensions of a head. The type must be supported.
    """
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    plain = 1.0 / (options["rope_theta"] ** exponents)
    kind = rope_type(options)
    if kind == "linear":
        return plain / options["factor"]
    if kind == "llama3":
        return _llama3(options, plain)
    return _yarn(options, exponents) if kind == "yarn" else plain


def _llama3(options: RopeOptions, plain: torch.Tensor) -> torch.Tensor:
    """Divide the frequencies of wavelengths beyond the old context; interpolate near its end.

    The formula is that of Llama 3.1 (``apply_scaling`` in meta-llama/llama-models, model.py).
    """
    low, high = options["low_freq_factor"], options["high_freq_factor"]
    context, factor = options["original_max_position_embeddings"], options["factor"]
    wavelength = 2 * math.pi / plain
    scaled = torch.where(wavelength > context / low, plain / factor, plain)
    share = (context / wavelength - low) / (high - low)
    between = (1 - share) * scaled / factor + share * scaled
    is_between = (wavelength >= context / high) & (wavelength <= context / low)
    return torch.where(is_between, between, scaled)


def _yarn(options: RopeOptions, exponents: torch.Tensor) -> torch.Tensor:
    """Interpolate the dimensions with long wavelengths, and keep those with short ones.

    The two are blended in between (arXiv 2309.00071, section 3.2).
    """
    base, width = options["rope_theta"], 2 * len(exponents)
    context = options["original_max_position_embeddings"]

    def dimension(rotations: float) -> float:
        """Return the dimension that rotates this often within the old context."""
        return width * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(base))

    first = dimension(options.get("beta_fast") or 32)
    last = dimension(options.get("beta_slow") or 1)
    if options.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    if first == last:
        last += 0.001  # a step instead of a division by zero
    ramp = (torch.arange(width // 2, dtype=torch.float32) - first) / (last - first)
    kept = 1 - ramp.clamp(0, 1)
    wavelengths = base**exponents
    return 1.0 / (options["factor"] * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def set_attention_factor(config: TransformerConfig, options: RopeOptions) -> None:
    """Make Megatron multiply cosine and sine with ``attention_factor``.

    Its attention reads attributes that are no fields of the class and multiplies with
    (0.1 mscale ln(scaling) + 1) / (0.1 mscale_all_dim ln(scaling) + 1). With ln(scaling) = 10 and
    these weights that is the factor.
    """
    factor = attention_factor(options)
    if factor != 1.0:
        vars(config).update(
            yarn_rotary_scaling_factor=math.exp(10.0),
            yarn_mscale=factor - 1.0,
            yarn_mscale_all_dim=0.0,
        )


def set_frequencies(table: RotaryEmbedding, options: RopeOptions) -> None:
    """Replace the frequencies of Megatron's module before its first use."""
    current = table.inv_freq
    table.inv_freq = inverse_frequencies(options, 2 * current.numel()).to(current.device)


def angles_of_rows(
    table: torch.Tensor,
    positions: torch.Tensor,
    sections: AxisSections | None = None,
    *,
    rotates_neighbours: bool = False,
) -> torch.Tensor:
    """Return the angles of each row: [T, 1, 1, width].

    Args:
        table: angles of each position: [longest sequence, 1, 1, width], each frequency twice.
        positions: [T]; or [3, T], frame, row and column.
        sections: the frequencies that rotate by each of the three (``apply_interleaved_mrope`` in
            ``modeling_qwen3_vl.py``, ``apply_multimodal_rotary_pos_emb`` in
            ``modeling_qwen2_5_vl.py``, ``apply_mrope`` in ``modeling_glm4v.py`` of transformers 5.12).
        rotates_neighbours: a frequency is in two neighbouring columns of the table, otherwise in the
            same column of each half (``rotary_interleaved`` of Megatron).
    """
    if positions.dim() == 1:
        return table[positions]
    assert sections is not None, "checked with the layout"
    angles = table[positions[0]]
    half = table.size(-1) // 2
    for axis in (1, 2):
        frequencies = torch.tensor(sections.of_axis(axis, half), device=table.device)
        if rotates_neighbours:
            columns = torch.cat([2 * frequencies, 2 * frequencies + 1])
        else:
            columns = torch.cat([frequencies, half + frequencies])
        angles[..., columns] = table[positions[axis]][..., columns]
    return angles


def use_local_rotary(model: GPTModel, local: RotaryEmbedding) -> None:
    """Give the layers with a sliding window another rotary embedding.

    Megatron computes one table of angles [longest sequence, 1, 1, width] for all layers. The
    attention of these layers gets that of ``local`` in its place.
    """
    config = model.config
    for layer in model.decoder.layers:
        if is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer.layer_number
        ):
            layer.self_attention.register_forward_pre_hook(
                partial(_with_angles_of, local), with_kwargs=True
            )


def _with_angles_of(
    local: RotaryEmbedding,
    _: torch.nn.Module,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Replace the angles among the arguments of an attention."""
    angles = kwargs["rotary_pos_emb"]
    assert isinstance(angles, torch.Tensor)
    return args, {**kwargs, "rotary_pos_emb": local(angles.size(0), packed_seq=True)}
