"""Precisions that the trainer lacks, or that differ between trainer and engines, are refused."""

from __future__ import annotations

import pytest

from rlpost.config.checks.precision import precision_model_problems, precision_problems
from rlpost.config.engine_args import engine_args
from rlpost.config.groups.perf import FP8_ROWS
from rlpost.config.load import JOBS, files_of, load
from rlpost.engines.server import ON_CUDA
from rlpost.extensions.on_cpu.engine import engine_settings
from rlpost.trainer.device import weight_dtype


def problems(**groups):
    return precision_problems(load([], groups).config)


@pytest.mark.parametrize("recipe", FP8_ROWS)
def test_training_in_fp8_is_accepted(recipe):
    assert problems(megatron={"fp8": "hybrid", "fp8_recipe": recipe}) == []


def test_generating_in_fp8_is_accepted():
    """Its setting is the folder of the weights."""
    recipe = load(files_of(JOBS / "recipes" / "qwen3_4b_fp8.toml"), {}).config
    assert precision_problems(recipe) == [] == problems(megatron={"fp8": False})


@pytest.mark.parametrize("bf16", [None, True, False])
@pytest.mark.parametrize("has_cuda", [True, False])
def test_engines_have_the_trainer_s_dtype(bf16, has_cuda, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_cuda)
    chosen = engine_args(load([], {"perf": {"bf16": bf16}}).config)
    args = {**ON_CUDA, **chosen} if has_cuda else engine_settings(chosen)
    assert f"torch.{args['dtype']}" == str(weight_dtype(bf16))


@pytest.mark.parametrize(
    ("bf16", "dtype", "wanted"),
    [
        (None, "bfloat16", ""),
        (None, "auto", "bfloat16"),
        (True, "half", "bfloat16"),
        (False, "float", ""),
        (False, "bfloat16", "float32"),
    ],
)
def test_another_dtype_of_the_engines_is_refused(bf16, dtype, wanted):
    found = problems(perf={"bf16": bf16}, sglang={"sglang_dtype": dtype})
    if not wanted:
        assert found == []
    else:
        assert found[0].startswith(f"--sglang-dtype {dtype}: ")
        assert found[0].endswith(f"--sglang-dtype {wanted}")


HYBRID = {"architectures": ["Qwen3NextForCausalLM"]}


@pytest.mark.parametrize("option", ["use_precision_aware_optimizer", "optimizer_cpu_offload"])
def test_gradients_of_two_types_are_refused_where_they_are_not_converted(option):
    def refusals(hf=HYBRID, **perf):
        table = {"accumulate_allreduce_grads_in_fp32": False, **perf}
        return precision_model_problems(
            load([], {"perf": table, "optimizer": {option: True}}).config, hf
        )

    [line] = refusals()
    assert f"with --{option.replace('_', '-')} true" in line and line.endswith("in-fp32 true")
    assert refusals(bf16=False) == [] == refusals(accumulate_allreduce_grads_in_fp32=True)
    assert refusals({"architectures": ["Qwen3ForCausalLM"]}) == []
