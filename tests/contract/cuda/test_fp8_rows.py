"""Packed rows have the shapes that FP8 needs, by the functions of Megatron-core and the engine."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from rlpost.config.groups.perf import FP8_ROWS
from rlpost.config.tree import Config
from rlpost.trainer.packing import RowLayout, pack
from rlpost.types import TrainSample
from tests.contract.cuda.engine_source import engine_source
from tests.contract.cuda.library_source import Source
from tests.contract.layouts import CP2, DENSE, LIMIT, Comparison, Layout, tp
from tests.contract.samples import STEPS
from tests.settings import rank_config

from megatron.core.enums import Fp8Recipe  # isort: skip  (after the stand-in for CUDA)
from megatron.core.fp8_utils import get_fp8_align_size  # isort: skip

QUANTIZERS = {
    "mxfp8": ("mxfp8_tensor.py", "MXFP8Quantizer", {"MXFP8_BLOCK_SCALING_SIZE": 32}),
    "blockwise": ("float8_blockwise_tensor.py", "Float8BlockQuantizer", {}),
}
WIDTH = 1024


@pytest.fixture(scope="module")
def source() -> Source:
    return engine_source()


def settings(recipe: str, *, tensor: int, context: int) -> Config:
    return rank_config(
        "", tensor_model_parallel_size=tensor, sequence_parallel=tensor > 1, context_parallel_size=context,
        megatron={"fp8": "hybrid", "fp8_recipe": recipe},
    )  # fmt: skip


def samples(seed: int) -> tuple[TrainSample, ...]:
    draw = random.Random(seed)
    lengths = [draw.randint(2, 300) for _ in range(draw.randint(1, 5))]
    return tuple(
        TrainSample([1] * length, 1, [1] * (length - 1), [0.0] * (length - 1), advantage=1.0)
        for length in lengths
    )


def rows(recipe: str, *, tensor: int, context: int, seed: int) -> set[int]:
    """The rows of a tensor-parallel rank, for each context-parallel rank."""
    own = settings(recipe, tensor=tensor, context=context)
    found = set()
    for rank in range(context):
        layout = RowLayout(own.row_multiple, own.perf.sequence_multiple, rank, context)
        whole = pack(samples(seed), layout).input_ids.size(1)
        assert whole % tensor == 0
        found.add(whole // tensor)
    return found


@pytest.mark.parametrize("recipe", FP8_ROWS)
def test_each_rank_has_rows_of_which_every_product_is_possible(source, recipe):
    aligned = get_fp8_align_size(Fp8Recipe(recipe))
    of_engine = source.run(
        "transformer_engine/pytorch/quantization.py", "get_align_size_for_quantization"
    )
    kinds = ("mxfp8", "nvfp4")
    asked = type("Recipe", (), {kind: lambda _, kind=kind: kind == recipe for kind in kinds})()
    assert aligned == of_engine(asked) and FP8_ROWS[recipe] % aligned == 0
    accept = source.run(
        "transformer_engine/pytorch/utils.py", "assert_dim_for_fp8_exec", math=math, List=list
    )
    for tensor, context, seed in itertools.product((1, 2, 4), (1, 2), range(8)):
        for count in rows(recipe, tensor=tensor, context=context, seed=seed):
            assert count % aligned == 0
            accept(torch.empty(count, WIDTH, device="meta"))  # input
            accept(torch.empty(WIDTH, count, device="meta"))  # gradients of weights sum over rows


@pytest.mark.parametrize("recipe", QUANTIZERS)
def test_a_rank_s_rows_are_whole_blocks_so_that_sequence_parallelism_gathers_fp8(source, recipe):
    file, name, names = QUANTIZERS[recipe]
    is_quantizable = source.run(
        f"transformer_engine/pytorch/tensor/{file}", f"{name}.is_quantizable", math=math, **names
    )
    quantizer = type("Quantizer", (), {"block_len": 128})()
    for count in rows(recipe, tensor=2, context=2, seed=3):
        assert is_quantizable(quantizer, torch.empty(count, WIDTH, device="meta"))
        assert not is_quantizable(quantizer, torch.empty(count + 16, WIDTH, device="meta"))


def test_megatron_pads_the_rows_of_each_expert():
    path = "megatron/core/transformer/moe/experts.py"
    for kind, pad in (("TEGroupedMLP", "quantization_padding"), ("SequentialMLP", "_pad_tensor")):
        assert f"self.{pad}" in Source().lines(path, f"{kind}.forward")


@pytest.mark.timeout(300)
def test_padded_rows_train_as_rows_without_padding(tmp_path):
    """On a CPU, where the layers compute in float32."""
    fp8 = {"megatron": {"fp8": "hybrid", "fp8_recipe": "blockwise"}}
    layout = Layout("rows of FP8", DENSE, 4, tp(2) | CP2 | fp8)
    assert Comparison(tmp_path, steps=STEPS[:2])(layout).largest < LIMIT
