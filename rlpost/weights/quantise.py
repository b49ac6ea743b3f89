"""Weights in FP8 for engines that infer in it, from a trainer that does not: blocks with a scale each.

In: a Hugging Face folder that says in ``config.json`` how its weights are quantised, and tensors in the trainer's
precision. Out: for each weight that the folder has quantised its FP8 values and the scales of its blocks, for all
others what came in. The form is that of DeepSeek-V3's checkpoints (arXiv 2412.19437, section 3.3), which Qwen3-FP8 and
GLM-4.5-FP8 have as well: ``NAME`` in e4m3, ``NAME_scale_inv`` in float32, weight = value x scale of its block.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path

import torch

from rlpost.errors import WeightError

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max  # 448
SUFFIX = "_scale_inv"


@dataclass(frozen=True, slots=True)
class BlockFp8:
    """Quantises the weights ``names`` in blocks of ``block`` (rows, columns)."""

    names: Set[str]
    block: tuple[int, int] = (128, 128)

    def shapes(self, name: str, shape: tuple[int, ...], dtype: str) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """What becomes of a tensor: name -> (shape, torch's name of the dtype)."""
        if name not in self.names:
            return {name: (shape, dtype)}
        return {name: (shape, "float8_e4m3fn"), name + SUFFIX: (scale_shape(shape, self.block), "float32")}

    def tensors(self, name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """The same with data; shapes and dtypes are those of ``shapes``."""
        if name not in self.names:
            return {name: tensor}
        return self.named(name, *quantise(tensor, self.block))

    def named(self, name: str, values: torch.Tensor, scales: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """The two tensors of a weight, by the names that they travel under."""
        return {name: values, name + SUFFIX: scales}


def read_quantisation(folder: Path, names: Set[str]) -> BlockFp8 | None:
    """How ``config.json`` of a checkpoint says that the weights ``names`` are stored; None when as they are.

    Raises WeightError for a kind of quantisation that is not block-wise FP8.
    """
    settings = json.loads((folder / "config.json").read_text()).get("quantization_config")
    if settings is None:
        return None
    block = settings.get("weight_block_size")
    if settings.get("quant_method") != "fp8" or not block or len(block) != 2:
        raise WeightError(
            f"{folder}/config.json: quantization_config {settings} is not block-wise FP8 (quant_method 'fp8' with a "
            "weight_block_size of two numbers); take a checkpoint in bfloat16 or in block-wise FP8"
        )
    return BlockFp8(frozenset(names), (int(block[0]), int(block[1])))


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """Blocks in each direction; the last ones may be smaller."""
    rows, columns = shape
    return -(-rows // block[0]), -(-columns // block[1])


def quantise(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """[M, N] -> e4m3 [M, N] and float32 [ceil(M / rows), ceil(N / columns)]: each block's largest value becomes 448."""
    scales = _largest_of_blocks(weight.float().abs(), block) / LARGEST
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    values = weight.float() / spread(scales, weight.shape, block)
    return values.clamp_(-LARGEST, LARGEST).to(FP8), scales


def dequantise(values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The weight in float32 that an engine computes with."""
    return values.float() * spread(scales, values.shape, block)


def spread(scales: torch.Tensor, shape: torch.Size, block: tuple[int, int]) -> torch.Tensor:
    """Each block's scale at all its places."""
    whole = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return whole[: shape[0], : shape[1]]


def _largest_of_blocks(magnitude: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    rows, columns = scale_shape(tuple(magnitude.shape), block)
    padded = magnitude.new_zeros(rows * block[0], columns * block[1])
    padded[: magnitude.shape[0], : magnitude.shape[1]] = magnitude
    return padded.view(rows, block[0], columns, block[1]).amax(dim=(1, 3))
