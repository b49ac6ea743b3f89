"""The planner's sums, compared with modules of Megatron-core and memory of PyTorch."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from rlpost.config.load import JOBS, files_of, load
from rlpost.config.plan.hf_shape import hf_shape
from rlpost.config.plan.shape import Layout, Shape, layout_of, rank_parameters
from rlpost.extensions.planning.activations import Pass, kept_and_recomputed
from rlpost.extensions.planning.rank_memory import held_memory
from tests.unit.config.test_models import PUBLISHED

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).parents[2]
PP2 = {"pipeline_model_parallel_size": 2}
EP8 = {
    "tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 8,
    "expert_tensor_parallel_size": 1,
}  # fmt: skip
CP2 = {"context_parallel_size": 2}


def uneven(ends: int) -> dict[str, int]:
    return {
        "pipeline_model_parallel_size": 8,
        "decoder_first_pipeline_num_layers": ends,
        "decoder_last_pipeline_num_layers": ends,
    }


INTERLEAVED = {"pipeline_model_parallel_size": 4, "num_layers_per_virtual_pipeline_stage": 2}
DEEPSEEK = {
    "tensor_model_parallel_size": 8, "sequence_parallel": True, "pipeline_model_parallel_size": 4,
    "decoder_last_pipeline_num_layers": 13, "context_parallel_size": 2, "expert_model_parallel_size": 32,
    "expert_tensor_parallel_size": 1,
}  # fmt: skip
AS_GLM45 = ("glm46_355b", "glm47_355b")
"""Models of the same shape."""
RANKS = {  # model: settings, layout
    "qwen3_4b": ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, Layout(8, 2)),
    "qwen3_vl_4b": ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, Layout(8, 2)),
    "smollm2_135m": ({}, Layout(1)),
    "glm4_9b": ({"tensor_model_parallel_size": 2, "context_parallel_size": 2}, Layout(4, 2, 1, 2)),
    "qwen3_30b_a3b": (EP8 | CP2, Layout(8, 2, 1, 2, 8, 1)),
    "gemma3_1b": (PP2, Layout(4, 1, 2)),
    "llama3_1_8b": (INTERLEAVED, Layout(4, 1, 4, chunk=2)),
    "glm45_355b": (EP8 | CP2 | uneven(10), Layout(64, 2, 8, 2, 8, 1, first=10, last=10)),
    "qwen3_235b_a22b": (EP8 | uneven(11), Layout(128, 2, 8, 1, 8, 1, first=11, last=11)),
    "qwen3_5_35b_a3b": (EP8, Layout(8, 2, 1, 1, 8, 1)),
    "deepseek_v3": (DEEPSEEK, Layout(256, 8, 4, 2, 32, 1, last=13)),
}  # fmt: skip
SMALL = {
    "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 1000,
}  # fmt: skip
SMALL_EXPERTS = {
    "moe_intermediate_size": 128, "n_routed_experts": 8, "num_experts": 8, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}  # fmt: skip
MODELS = ("qwen3_4b", "llama3_1_8b", "glm4_9b", "glm45_355b", "qwen3_30b_a3b")
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def stage_bytes(shape: Shape, layout: Layout, one: Pass, stage: int) -> int:
    """Return the bytes that a stage keeps at its peak, including layers being recomputed."""
    return sum(kept_and_recomputed(shape, layout, one, stage))


def small(name: str) -> dict[str, Any]:
    hf = PUBLISHED[name] | SMALL
    return hf | SMALL_EXPERTS if "moe_intermediate_size" in hf else hf


COUNTS = [(name, stage) for name, (_, layout) in RANKS.items() for stage in range(layout.pipeline)]
MEASURED = [(name, bf16) for name in MODELS for bf16 in (False, True)]


@pytest.fixture(scope="module")
def found() -> dict[Any, dict[str, int]]:
    """Return counts and measurements by case, from one process, whose imports dominate its time."""
    cases: dict[Any, dict[str, Any]] = {}
    for name, stage in COUNTS:
        settings, layout = RANKS[name]
        rank = stage * layout.world // layout.pipeline
        cases[name, stage] = {
            "what": "count",
            "settings": settings,
            "world": layout.world,
            "rank": rank,
            "hf": PUBLISHED[name],
        }
    for name, bf16 in MEASURED:
        cases[name, "bf16" if bf16 else "fp32"] = {
            "what": "measure",
            "settings": {"bf16": bf16},
            "hf": small(name),
        }
    cases["full"] = {"what": "measure", "settings": FULL, "hf": small("qwen3_4b")}
    lines = "".join(json.dumps(case) + "\n" for case in cases.values())
    done = subprocess.run(
        [sys.executable, "-m", "tests.contract.plan_modules"],
        input=lines,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = [
        json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")
    ]
    return dict(zip(cases, results, strict=True))


@pytest.mark.parametrize(("name", "stage"), COUNTS)
def test_a_rank_of_the_full_size_holds_as_many_parameters_as_planned(name, stage, found):
    """The numbers are exact, with experts and float32 counted separately."""
    said = rank_parameters(hf_shape(PUBLISHED[name]), RANKS[name][1], stage)
    assert asdict(said) == found[name, stage]


def model_of(recipe):
    """The model that a recipe or its base names."""
    tables = tomllib.loads(recipe.read_text())
    return tables.get("model") or model_of(recipe.with_name(f"{tables['base']}.toml"))


@pytest.mark.parametrize(
    "recipe", [path for path in sorted((JOBS / "recipes").glob("*.toml")) if path.stem != "tiny"]
)
def test_the_layout_of_every_recipe_is_among_the_counted_ones(recipe):
    """Data parallelism may differ: it only repeats the same parameters."""
    named = model_of(recipe)
    model = "glm45_355b" if named in AS_GLM45 else named
    assert hf_shape(PUBLISHED[model]) == hf_shape(PUBLISHED[named])
    used, (_, counted) = layout_of(load(files_of(recipe), {}).config), RANKS[model]
    sizes = ("tensor", "pipeline", "context", "expert", "first", "last")
    assert [getattr(used, name) for name in sizes] == [getattr(counted, name) for name in sizes]
    assert (
        hf_shape(PUBLISHED[model]).num_experts == 0 or used.expert_tensor == counted.expert_tensor
    )


@pytest.mark.parametrize(("name", "bf16"), MEASURED)
def test_activations_are_those_that_autograd_keeps(name, bf16, found):
    """Within a tenth, measured with hooks on saved tensors."""
    one = Pass(tokens=512, width=2 if bf16 else 4, fused=False)
    kept = found[name, "bf16" if bf16 else "fp32"]["kept"]
    assert stage_bytes(hf_shape(small(name)), Layout(), one, 0) == pytest.approx(kept, rel=0.1)


def test_recomputed_layers_keep_their_inputs(found):
    """Within a tenth of the plan less what one layer needs while it is recomputed."""
    hf = hf_shape(small("qwen3_4b"))
    plain = Pass(tokens=512, width=4, fused=False)
    full = Pass(tokens=512, width=4, fused=False, recompute="full", method="uniform")
    norm = 2 * 512 * 256 * 4
    again = (stage_bytes(hf, Layout(), plain, 0) - norm) // 4
    assert stage_bytes(hf, Layout(), full, 0) - again == pytest.approx(
        found["full"]["kept"], rel=0.1
    )


@pytest.mark.parametrize(("name", "bf16"), MEASURED)
def test_weights_gradients_and_adam_take_as_many_bytes_as_planned(name, bf16, found):
    """Within 5 %, measured as the storage of the tensors after a step.

    Adam's state is main weights and both moments.
    """
    config = load([], {"perf": {"bf16": bf16}, "cluster": {"actor_num_gpus_per_node": 1}}).config
    held, _ = held_memory(config, Layout(), hf_shape(small(name)).parameters)
    measured = found[name, "bf16" if bf16 else "fp32"]
    assert held.weights == pytest.approx(measured["weights"], rel=0.05)
    assert held.gradients == pytest.approx(measured["grads"], rel=0.05)
    assert held.optimizer == pytest.approx(measured["optimizer"], rel=0.05)
