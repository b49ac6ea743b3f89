"""Rows with images, and rows that several sequences share, in Megatron's model.

Input: a packed micro-batch. Output: its parameters for ``GPTModel``.

Megatron rotates each sequence of a row from position 0. With images it gets the angles of all rows,
of which ``_apply_rotary_pos_emb_thd`` (``rope_utils.py`` of 0.16.1) takes those of each sequence,
and of this context-parallel rank. The encoder's rows are those of ``rlpost.trainer.vision``.

Where sequences share rows, the queries of a sequence are its own rows, the last ones of its
positions; its keys are the rows of all its tokens. Megatron gets one sequence, which is the whole
row, and the angle of each row's position. Core attention, TransformerEngine's or this
package's, gets copies of the keys and values of shared tokens, and separate boundaries of queries
and keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TypeVar

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import Attention

from rlpost.models.rope import AxisSections
from rlpost.trainer.packing import PackedMicroBatch
from rlpost.trainer.rotary import angles_of_rows
from rlpost.trainer.vision.rows import ImageRows
from rlpost.trainer.vision.trained import DeepFeatures

P = TypeVar("P", bound=PackedSeqParams)


class BottomRight(Enum):
    """The causal mask that is aligned to the last query and the last key of each sequence.

    Megatron-core passes the name to TransformerEngine, and its ``AttnMaskType`` lacks this one.
    """

    padding_causal_bottom_right = 1


@dataclass
class RowParams(PackedSeqParams):
    """Parameters of a row of T tokens whose angles, keys or embeddings are not Megatron's own.

    K: keys of all sequences, where sequences share rows.
    """

    positions: torch.Tensor | None = None  # [T] int64, or [3, T] with images
    key_rows: torch.Tensor | None = None  # [K] int64, rows of T
    of_attention: PackedSeqParams | None = None  # bounds of the sequences in T and in K
    images: ImageRows | None = None
    deep_features: DeepFeatures | None = None
    """Set by the first stage: what is added to rows after the first layers."""


def row_params(packed: PackedMicroBatch) -> PackedSeqParams:
    """Return the parameters of a micro-batch for Megatron's model."""
    images = packed.images
    if packed.key_rows is None and images is None:
        return _params(PackedSeqParams, packed, packed.cu_seqlens, packed.cu_seqlens)
    row = packed.cu_seqlens
    if packed.key_rows is not None:
        row = row[:: row.numel() - 1]  # the first and the last
    params = _params(RowParams, packed, row, row)
    params.positions = packed.positions[0] if images is None else images.positions
    params.images = images
    if packed.key_rows is not None:
        assert packed.cu_keys is not None
        params.key_rows = packed.key_rows
        params.of_attention = _params(PackedSeqParams, packed, packed.cu_seqlens, packed.cu_keys)
    return params


def _params(
    kind: type[P], packed: PackedMicroBatch, queries: torch.Tensor, keys: torch.Tensor
) -> P:
    return kind(
        qkv_format="thd",
        cu_seqlens_q=queries,
        cu_seqlens_kv=keys,
        # no more queries than keys; the exact number would need a transfer from the GPU
        max_seqlen_q=packed.max_length,
        max_seqlen_kv=packed.max_length,
    )


def use_row_params(model: GPTModel, sections: AxisSections | None) -> None:
    """Make each layer of a model know ``RowParams``; ``sections`` are those of ``angles_of_rows``."""
    for layer in model.decoder.layers:
        attention = layer.self_attention
        attention.register_forward_pre_hook(
            partial(_with_angles_of_rows, sections), with_kwargs=True
        )
        if hasattr(attention, "core_attention"):  # linear attention has none
            attention.core_attention.register_forward_pre_hook(
                _with_keys_of_all_tokens, with_kwargs=True
            )


Arguments = tuple[tuple[object, ...], dict[str, object]]


def _with_angles_of_rows(
    sections: AxisSections | None,
    attention: Attention,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> Arguments:
    """Replace the table of angles [longest sequence, 1, 1, width] by the rows' own [T, ...]."""
    packed, table = kwargs.get("packed_seq_params"), kwargs.get("rotary_pos_emb")
    if not isinstance(packed, RowParams) or not isinstance(table, torch.Tensor):
        return args, kwargs
    assert packed.positions is not None
    angles = angles_of_rows(
        table,
        packed.positions,
        sections,
        rotates_neighbours=attention.config.rotary_interleaved,
    )
    return args, {**kwargs, "rotary_pos_emb": angles}


def _with_keys_of_all_tokens(
    _: torch.nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, object]
) -> Arguments:
    """Replace keys and values [T, ...] by those of all tokens of all sequences [K, ...]."""
    packed = kwargs.get("packed_seq_params")
    if not isinstance(packed, RowParams) or packed.key_rows is None:
        return args, kwargs
    query, key, value, *others = args
    return (query, key[packed.key_rows], value[packed.key_rows], *others), {
        **kwargs,
        "attn_mask_type": BottomRight.padding_causal_bottom_right,
        "packed_seq_params": packed.of_attention,
    }
