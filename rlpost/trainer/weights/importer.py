"""Import Hugging Face safetensors into this rank's Megatron model, at any layout.

Input: a folder with config.json and safetensors, in block-wise FP8 or not. Output: all weights of
this rank, filled. Streamed: the host holds the tensors of one parameter at a time. Invariant: every
parameter is filled and every tensor of the folder is used; otherwise WeightError names the tensors.
"""

from __future__ import annotations

import logging
import math
import re
import time
from pathlib import Path

import torch
from safetensors import safe_open

from common.units import counted
from rlpost.errors import WeightError
from rlpost.models.fp8 import SUFFIX, has_powers_of_two
from rlpost.models.layout_rows import TRANSPOSED
from rlpost.models.names import Rule, expert_number, renamed
from rlpost.trainer import device
from rlpost.trainer.weights import layouts
from rlpost.trainer.weights.inventory import EMBEDDING, Held, Inventory
from rlpost.trainer.weights.quantise import (
    BLOCKS,
    SCALES,
    dequantise,
    read_quantisation,
    unpack_mxfp4,
)
from rlpost.trainer.weights.safetensors_files import tensor_files

logger = logging.getLogger(__name__)

PROGRESS_S = 5.0
WIDTHS = {"F64": 8, "I64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I8": 1, "U8": 1}
"""Bytes of a value, by safetensors' names."""
UNUSED_SUFFIXES = ("rotary_emb.inv_freq",)  # derived values in folders of old exporters


class HuggingFaceFolder:
    """The tensors of a folder by name, read on demand."""

    def __init__(self, folder: str | Path) -> None:
        """Read the file of each tensor. Raises WeightError as ``tensor_files``."""
        self.folder = Path(folder)
        self._stored_in = tensor_files(self.folder)
        self.file_of: dict[str, str] = {}
        """The file of each weight, without the tensors that encode a weight."""
        quantised = set()
        for name, file in self._stored_in.items():
            if name.endswith(SUFFIX):
                quantised.add(name.removesuffix(SUFFIX))
            elif name.endswith(BLOCKS):
                self.file_of[name.removesuffix(BLOCKS)] = file
            elif not name.endswith(SCALES):
                self.file_of[name] = file
        self.quantisation = read_quantisation(
            self.folder,
            quantised,
            has_powers_of_two=has_powers_of_two(device.capability()),
        )

    def read(self, name: str, *, expert: int | None = None) -> torch.Tensor:
        """One full tensor, of any shape, on the CPU; FP8 and MXFP4 weights become float32.

        With ``expert`` only this index of the first dimension is read.

        Raises:
            WeightError: the folder has no such tensor.
        """
        if name not in self.file_of:
            nested = NESTED + name.removeprefix("model.")
            remedy = "check that config.json belongs to these weights"
            if nested in self.file_of:
                remedy = (
                    f"it has {nested!r}: rename model.language_model. to model. and model.visual. to "
                    "visual., as the model's page has them; engines need these names as well"
                )
            raise WeightError(f"{self.folder} has no tensor {name!r}; {remedy}")
        if name + BLOCKS in self._stored_in:
            blocks, scales = (self._stored(name + end, expert) for end in (BLOCKS, SCALES))
            return unpack_mxfp4(blocks, scales).mT
        tensor = self._stored(name, expert)
        if self.quantisation is None or name not in self.quantisation.names:
            return tensor
        scales = self._stored(name + SUFFIX)
        return dequantise(tensor, scales, self.quantisation.block)

    def read_weight(self, name: str, *, expert: int | None = None) -> torch.Tensor:
        """``read`` for a weight of the model (any shape), whose numbers are its values.

        Raises:
            WeightError: also for integers, or FP8 without scales.
        """
        tensor = self.read(name, expert=expert)
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise WeightError(
                f"{self.folder}: {name} is stored as {str(tensor.dtype).removeprefix('torch.')} without the scales of "
                "its values; use a folder in bfloat16, float16 or float32"
            )
        return tensor

    def is_quantised(self, name: str) -> bool:
        """Whether ``read`` computes the tensor from quantised values."""
        is_fp8 = self.quantisation is not None and name in self.quantisation.names
        return is_fp8 or name + BLOCKS in self._stored_in

    def num_bytes(self, name: str) -> int:
        """Return the bytes of a tensor as it is stored; values of two bytes where it is quantised."""
        stored = name + BLOCKS if name + BLOCKS in self._stored_in else name
        with safe_open(self.folder / self._stored_in[stored], framework="pt") as opened:
            part = opened.get_slice(stored)
            width = 2 if self.is_quantised(name) else WIDTHS.get(part.get_dtype(), 4)
            return width * math.prod(part.get_shape())

    def _stored(self, name: str, index: int | None = None) -> torch.Tensor:
        with safe_open(self.folder / self._stored_in[name], framework="pt") as opened:
            if index is not None:
                return opened.get_slice(name)[index]
            return opened.get_tensor(name)


NESTED = "model.language_model."
"""Prefix of transformers' modules, with which 4.52 saved Qwen2.5-VL; SGLang 0.5.21 does not load it."""
SHARED = {
    "embed_tokens.weight": "model.embed_tokens.weight",
    "shared_head.head.weight": "lm_head.weight",
}
"""Tensors that a layer for multi-token prediction shares with the model.

Name in the layer -> name in the model.
"""
MTP_PROJECTION = "eh_proj.weight"
"""A tensor of each layer for multi-token prediction, and of no other layer."""
_OF_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def shared_tensors(source: HuggingFaceFolder, inventory: Inventory) -> dict[str, str]:
    """Return the copies of embedding and output layer in layers for multi-token prediction.

    Only trained layers count. Name of the copy -> name of the original. Megatron and SGLang use the
    originals.
    """
    found: dict[str, str] = {}
    layers = inventory.mtp_layers
    for name in source.file_of:
        match = _OF_LAYER.fullmatch(name)
        if match and int(match[1]) in layers and match[2] in SHARED:
            found[name] = SHARED[match[2]]
    return found


def carried_tensors(source: HuggingFaceFolder, inventory: Inventory) -> list[str]:
    """Return the tensors that are kept but not trained.

    They are those of the encoder of images, unless it is trained, and of layers after the model's
    last. Such a layer has what predicts a further token: without it, config.json has fewer layers than
    the model.
    """
    num_layers, family = inventory.num_layers, inventory.family
    trained = inventory.hugging_face
    matches = map(_OF_LAYER.search, source.file_of)
    extra = {match[1] for match in matches if match is not None and match[2] == MTP_PROJECTION}

    def is_carried(name: str) -> bool:
        if name.startswith(family.carried):
            return name not in trained
        match = _OF_LAYER.search(name)
        is_extra = name.startswith("mtp.") or (
            match is not None and int(match[1]) >= num_layers and match[1] in extra
        )
        return family.carries_extra_layers and is_extra

    return sorted(filter(is_carried, source.file_of))


@torch.no_grad()
def import_weights(inventory: Inventory, source: HuggingFaceFolder) -> None:
    """Fill this rank's parameters from ``source``, cast to the dtype of the parameters.

    Raises:
        WeightError: a tensor is missing, unused, or has another shape.
    """
    folder, total = source.folder, len(inventory.held)
    logged_at = time.monotonic()
    rounded: dict[torch.dtype, list[str]] = {}
    stored: set[torch.dtype] = set()
    _check_mtp_layers(source, inventory)
    for number, (name, held) in enumerate(inventory.held.items(), start=1):
        rule, tensor = held.rule, held.tensor
        part = layouts.merge(_tensors_of(source, rule), rule.layout, inventory.dims)
        _check_not_transposed(part, held, folder)
        if rule.layout == "vocabulary" and len(part) != inventory.dims.vocab_size:
            # A few rows more or fewer would be padding of the tensor-parallel ranks.
            raise WeightError(
                f"{rule.hugging_face[0]} in {folder} has {len(part)} rows, and config.json vocab_size = "
                f"{inventory.dims.vocab_size}; check that config.json belongs to these weights"
            )
        if held.dim is not None:
            part = layouts.shard(
                part, rule.layout, dim=held.dim, rank=held.group.rank(), size=held.group.size()
            )
        if part.shape != tensor.shape:
            raise WeightError(
                f"{' + '.join(rule.hugging_face)} in {folder} give shape {tuple(part.shape)} for {name}, but the model "
                f"needs {tuple(tensor.shape)}; check that config.json belongs to these weights"
            )
        tensor.copy_(part)
        stored.add(part.dtype)
        is_finer = torch.finfo(part.dtype).eps < torch.finfo(tensor.dtype).eps
        is_stored = source.file_of.keys() >= set(rule.hugging_face)  # a new value head is not
        is_quantised = any(source.is_quantised(one) for one in rule.hugging_face)
        if is_finer and is_stored and not is_quantised:
            rounded.setdefault(tensor.dtype, []).append(rule.hugging_face[0])
        if number == total or time.monotonic() - logged_at > PROGRESS_S:
            logged_at = time.monotonic()
            logger.info("%s: loaded %d of %d parameters of this rank", folder, number, total)
    for dtype in rounded.keys() & stored:  # the others are stored as they are trained
        logger.warning(
            "%s: %s of this rank, %s first, are stored with more bits than --bf16 trains, sends and exports; "
            "they are rounded to %s",
            folder,
            counted(len(rounded[dtype]), "weight"),
            rounded[dtype][0],
            str(dtype).removeprefix("torch."),
        )
    unused = set(source.file_of) - inventory.hugging_face - set(carried_tensors(source, inventory))
    unused -= shared_tensors(source, inventory).keys()
    if inventory.tied:
        unused.discard(_checked_copy(source, inventory))
    unused = {name for name in unused if not name.endswith(UNUSED_SUFFIXES)}
    if unused:
        raise WeightError(
            f"{folder} has {len(unused)} tensors that the model does not use, starting with "
            f"{sorted(unused)[:5]}; check that config.json belongs to these weights"
        )


def _checked_copy(source: HuggingFaceFolder, inventory: Inventory) -> str:
    """Return the name of the output layer of a tied model; some folders contain it as a copy.

    Engines do not load it. The ranks that have the embedding compare the two.

    Raises:
        WeightError: the folder's output layer is another than its embedding.
    """
    head, embedding = (
        renamed(name, inventory.family.renamed)
        for name in ("lm_head.weight", "model.embed_tokens.weight")
    )
    is_here = EMBEDDING in inventory.held and head in source.file_of
    if is_here and not torch.equal(source.read(head), source.read(embedding)):
        raise WeightError(
            f"{source.folder} has a {head} that differs from {embedding}, and tie_word_embeddings = true in "
            "config.json would leave it out; set it to false there, or remove the tensor"
        )
    return head


def _check_not_transposed(part: torch.Tensor, held: Held, folder: Path) -> None:
    """Raise WeightError if a tensor that is stored input before output is stored the other way."""
    whole = list(held.tensor.shape)
    if held.dim is not None:
        whole[held.dim] *= held.group.size()
    if held.rule.layout not in TRANSPOSED or list(part.shape) == whole:
        return
    if list(part.mT.shape) == whole:
        (name,) = held.rule.hugging_face
        raise WeightError(
            f"{name} in {folder}: each expert is {tuple(part.mT.shape)}, output before input, as transformers 5 saves "
            f"it, but the model and SGLang need {tuple(part.shape)}, as published; use the published folder, or "
            "transpose the last two dimensions of experts.gate_up_proj and experts.down_proj in all layers"
        )


def _tensors_of(source: HuggingFaceFolder, rule: Rule) -> list[torch.Tensor]:
    """The Hugging Face tensors of a parameter; of a stacked tensor only this expert's part."""
    if not rule.is_stacked:
        return [source.read_weight(name) for name in rule.hugging_face]
    expert = expert_number(rule.megatron)
    return [source.read_weight(name, expert=expert) for name in rule.hugging_face]


def _check_mtp_layers(source: HuggingFaceFolder, inventory: Inventory) -> None:
    """Raise WeightError if ``source`` lacks a trained layer for multi-token prediction."""
    for layer in sorted(inventory.mtp_layers):
        name = f"model.layers.{layer}.{MTP_PROJECTION}"
        if name not in source.file_of:
            raise WeightError(
                f"{source.folder} has no tensor {name!r}: the layer for multi-token prediction is not in these "
                "weights, and --enable-mtp-training does not start one from random values; use a checkpoint that "
                "has it, or --enable-mtp-training false"
            )
