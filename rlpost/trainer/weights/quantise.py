"""Block-wise FP8 quantisation of weights, for updates of FP8 engines and for folders.

Input: a Hugging Face folder whose ``config.json`` describes the quantisation, and tensors in the
trainer's precision. Output: FP8 values and block scales (the format of ``rlpost.models.fp8``) for
each weight that is quantised in the folder; all other tensors unchanged. ``unpack_mxfp4`` reads
MXFP4, which is never written.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path

import torch

from rlpost.errors import WeightError
from rlpost.models.config_file import read_config
from rlpost.models.fp8 import SIDE, SUFFIX

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max  # 448
BLOCKS, SCALES = "_blocks", "_scales"
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_POSITIVE, *(-value for value in _POSITIVE))
_BIAS = 127
_EXPONENT_BITS = -0x800000  # 0xFF800000: sign and exponent of a float32


@dataclass(frozen=True, slots=True)
class BlockFp8:
    """Quantises the weights ``names`` in blocks of ``block`` (rows, columns)."""

    names: Set[str]
    block: tuple[int, int] = (SIDE, SIDE)
    has_powers_of_two: bool = False
    """Scales are powers of two (``fp8.GRIDS``)."""

    def shapes(
        self, name: str, shape: tuple[int, ...], dtype: str
    ) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Describe the tensors of a weight after quantisation.

        Name -> (shape, torch's name of the dtype).
        """
        if name not in self.names:
            return {name: (shape, dtype)}
        return {
            name: (shape, "float8_e4m3fn"),
            name + SUFFIX: (scale_shape(shape, self.block), "float32"),
        }

    def tensors(self, name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Quantise a weight [rows, columns]; shapes and dtypes are those of ``shapes``."""
        if name not in self.names:
            return {name: tensor}
        values, scales = quantise(tensor, self.block, has_powers_of_two=self.has_powers_of_two)
        return {name: values, name + SUFFIX: scales}


def read_quantisation(
    folder: Path, names: Set[str], *, has_powers_of_two: bool = False
) -> BlockFp8 | None:
    """Quantisation of the weights ``names`` by ``config.json``.

    Returns:
        None for weights that are not quantised, and for MXFP4 (``unpack_mxfp4``), in which
        no weights are sent.

    Raises:
        WeightError: the quantisation is neither of the two.
    """
    settings = read_config(folder).get("quantization_config")
    if settings is None or settings.get("quant_method") == "mxfp4":
        return None
    block = settings.get("weight_block_size")
    if settings.get("quant_method") != "fp8" or not block or len(block) != 2:
        raise WeightError(
            f"{folder}/config.json: quantization_config {settings} is not block-wise FP8 (quant_method 'fp8' with a "
            "weight_block_size of two numbers); use a checkpoint in bfloat16 or in block-wise FP8"
        )
    return BlockFp8(frozenset(names), (int(block[0]), int(block[1])), has_powers_of_two)


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """Number of blocks along each axis; the last ones may be smaller."""
    rows, columns = shape
    return -(-rows // block[0]), -(-columns // block[1])


def quantise(
    weight: torch.Tensor, block: tuple[int, int], *, has_powers_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """[M, N] -> e4m3 [M, N] and float32 scales [ceil(M / rows), ceil(N / columns)].

    The largest value of each block maps to 448, with ``has_powers_of_two`` to more than 224. The
    bits are those of TransformerEngine 2.11 (``compute_scale_from_amax`` of recipe_common.cuh,
    ``quantize_transpose_square_blockwise.cu``), so that the trainer's products in FP8 blocks have
    the weights of the engines: a factor is 448 / amax, and a scale its inverse. SGLang's own
    quantiser has the same bits with powers of two (``per_block_cast_to_fp8``, 0.5.21). Without,
    SGLang (``input_to_float8``) and slime round the quotient elsewhere: scales may differ in the
    last bit, and values between two numbers become the other.
    """
    blocks = _in_blocks(weight, block)
    largest = torch.maximum(blocks.amax(dim=(1, 3)), -blocks.amin(dim=(1, 3)))
    # A Python number as the dividend would be multiplied by a reciprocal, of other bits.
    factors = torch.full_like(largest, LARGEST) / largest
    factors[factors.isinf()] = torch.finfo(weight.dtype).max  # of a block with tiny values alone
    if has_powers_of_two:
        factors = (factors.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    factors[(largest == 0) | ~largest.isfinite()] = 1.0
    values = blocks.mul_(factors[:, None, :, None]).clamp_(-LARGEST, LARGEST).to(FP8)
    rows, columns = weight.shape
    values = values.view(values.shape[0] * block[0], -1)[:rows, :columns].contiguous()
    return values, torch.ones_like(factors) / factors


def dequantise(values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The weight [rows, columns] in float32, as the engine uses it; ``scales`` as ``spread``."""
    return values.float() * spread(scales, values.shape, block)


def spread(scales: torch.Tensor, shape: torch.Size, block: tuple[int, int]) -> torch.Tensor:
    """Expand the scale of each block, [blocks, blocks], to all elements of a weight of ``shape``."""
    whole = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return whole[: shape[0], : shape[1]]


def _in_blocks(weight: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return a copy in float32 of shape [blocks, rows, blocks, columns], padded with zeros."""
    rows, columns = scale_shape(tuple(weight.shape), block)
    padded = weight.new_zeros(rows * block[0], columns * block[1], dtype=torch.float32)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    return padded.view(rows, block[0], columns, block[1])


def unpack_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the weight [..., blocks x 32] in float32 of MXFP4, the format of gpt-oss checkpoints.

    Args:
        blocks: ``NAME_blocks`` [..., blocks, 16] uint8, two values of four bits in each byte, the low
            bits first. A value is e2m1 (one sign bit, two bits of exponent, one of mantissa).
        scales: ``NAME_scales`` [..., blocks] uint8; the scale of a block is 2^(scale - 127) (OCP
            Microscaling Formats Specification 1.0, sections 5.3.3, 5.4.1 and 6.3). The conversion is
            exact.
    """
    values = torch.tensor(E2M1)
    pairs = torch.stack([values[(blocks & 15).long()], values[(blocks >> 4).long()]], dim=-1)
    exponents = scales.to(torch.int32)[..., None] - _BIAS
    return torch.ldexp(pairs.flatten(-2), exponents).flatten(-2)
