"""The planner's engines, compared with SGLang's own models and arithmetic, run from its sources."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlpost.cli.planned_gpus import parse_size
from rlpost.config.load import JOBS, files_of, load
from rlpost.config.plan.hf_shape import hf_shape
from rlpost.config.plan.shape import Shape
from rlpost.config.plan.weight_update import RECEIVED_BUFFERS
from rlpost.config.tree import Config
from rlpost.extensions.planning.engine_memory import (
    PlannedEngine,
    attention_gpus,
    default_fraction,
    planned_engine,
)
from rlpost.extensions.planning.nccl_memory import engine_context, idle_context
from tests.contract.cuda.library_source import Source
from tests.contract.forked.engine_modules import built
from tests.contract.forked.forked_sglang import ForkedSglang
from tests.unit.config.test_models import PUBLISHED

pytestmark = pytest.mark.timeout(300)
MIB = 2**20
ON_CUDA = {"disable_shared_experts_fusion": True}
"""What SGLang chooses by itself on CUDA with expert parallelism."""
UPDATER = "sglang/srt/model_executor/model_runner_components/weight_updater.py"
BUCKET = "sglang/srt/weight_sync/tensor_bucket.py"
RECIPES = ("glm45_355b", "qwen3_235b_a22b", "qwen3_30b_a3b", "qwen3_4b")
DP_ATTENTION = {"enable_dp_attention": True, "dp_size": 8, "ep_size": 32}
DEFAULTS: dict[str, tuple[str, int, str, dict[str, object]]] = {
    # model, GPUs of an engine, kind of GPU, settings without mem_fraction_static
    "narrow vectors": ("deepseek_v3", 32, "H200", DP_ATTENTION),
    "small engine": ("qwen3_4b", 2, "H100", {}),
    "more GPUs than heads": ("qwen3_235b_a22b", 16, "B200", {"ep_size": 16}),
    "graphs of a given size": ("qwen3_30b_a3b", 8, "H100", {"cuda_graph_bs_decode": [8, 96]}),
    "with images": ("qwen3_vl_4b", 2, "H100", {}),
    "no graphs": ("qwen3_30b_a3b", 4, "H100", {"disable_cuda_graph": True}),
}


def recipe_case(name: str) -> tuple[Config, str, int]:
    config = load(files_of(JOBS / "recipes" / f"{name}.toml"), {}).config
    return config, name, parse_size("H100")


def default_case(name: str) -> tuple[Config, str, int]:
    model, gpus, card, args = DEFAULTS[name]
    cluster = {"rollout_num_gpus_per_engine": gpus, "rollout_num_gpus": gpus, "colocate": False}
    given = {f"sglang_{key}": value for key, value in args.items()}
    return load([], {"cluster": cluster, "sglang": given}).config, model, parse_size(card)


CASES = {name: recipe_case(name) for name in RECIPES}
CASES |= {name: default_case(name) for name in DEFAULTS}


def shape_of_case(model: str) -> Shape:
    return replace(hf_shape(PUBLISHED[model]), mtp=False)


def held(config: Config) -> int:
    return idle_context(config) if config.cluster.colocate else 0


def plan(name: str) -> PlannedEngine:
    config, model, gpu_bytes = CASES[name]
    return planned_engine(
        config, shape_of_case(model), gpu_bytes=gpu_bytes, width=2, held=held(config)
    )


@pytest.fixture(scope="module")
def theirs(forked: ForkedSglang) -> dict[str, dict[str, Any]]:
    """SGLang's answers by case."""
    cases = []
    for config, model, gpu_bytes in CASES.values():
        args = {"tp_size": config.cluster.rollout_num_gpus_per_engine, **config.sglang.server_args}
        # rlpost switches the graphs of prefill off where engines are offloaded
        backend = "disabled" if config.offload_rollout else "breakable"
        if not args.get("disable_cuda_graph"):
            args["cuda_graph_backend_prefill"] = backend
        free = gpu_bytes - held(config) - engine_context(config, attention_gpus(config))
        hf = json.loads((JOBS / f"models/{model}.json").read_text())  # SGLang reads nested keys
        case = {"hf": hf, "server_args": args | ON_CUDA, "free": free}
        cases.append(case | {"gpu_mib": gpu_bytes / MIB})
    return dict(zip(CASES, forked.call(built, cases), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_an_engine_s_gpu_holds_as_much_as_sglang_gives_it(name, theirs):
    """Weights and KV cache within 5 %, tokens of the cache too; bytes of a token are equal."""
    ours, found = plan(name), theirs[name]
    assert ours.weights == pytest.approx(found["weights"], rel=0.05)
    assert ours.kv_cache == pytest.approx(found["kv_cache"], rel=0.05)
    assert ours.kv_bytes_per_token == found["kv_bytes_per_token"]


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_share_of_memory_is_sglang_s_default(name, theirs):
    config, model, gpu_bytes = CASES[name]
    share = default_fraction(config, shape_of_case(model), gpu_bytes)
    assert share == pytest.approx(theirs[name]["mem_fraction_static"], abs=0.002)


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "glm45_355b"])
def test_cuda_graphs_take_sglang_s_allowance(name, theirs):
    """With DP attention SGLang's allowance also covers padded batches, which are no graphs."""
    assert plan(name).graphs == theirs[name]["graph_mib"] * MIB


def test_a_bucket_is_on_a_receiving_engine_as_often_as_planned():
    """SGLang's receiver, run from its source with a broadcast that only looks."""
    source, seen = Source(), []
    allocated: list[torch.Tensor] = []

    def empty(*sizes: Any, **options: Any) -> torch.Tensor:
        allocated.append(torch.empty(*sizes, **options))
        return allocated[-1]

    class Torch:
        distributed = type("Distributed", (), {"broadcast": lambda one, **_: seen.append(one)})

        def __getattr__(self, name: str) -> Any:
            return empty if name == "empty" else getattr(torch, name)

    names = {"List": list, "Tuple": tuple, "Optional": Any}
    described = type("Described", (), {"__init__": lambda self, **given: vars(self).update(given)})
    bucket = source.run(
        BUCKET, "FlattenedTensorBucket", **names, torch=torch, FlattenedTensorMetadata=described
    )
    receive = source.run(
        UPDATER,
        "_receive_bucketed_weights_from_distributed",
        torch=Torch(),
        FlattenedTensorBucket=bucket,
    )
    updater = type("Updater", (), {"device": "cpu", "_model_update_group": {"group": None}})()
    shapes = [(64, 32), (128,)]
    receive(
        updater,
        names=["a", "b"],
        dtypes=[torch.bfloat16, torch.float32],
        shapes=shapes,
        group_name="group",
    )
    (received,) = seen
    size = 64 * 32 * 2 + 128 * 4
    assert received.nbytes == sum(one.nbytes for one in allocated) == size
    places = {one.untyped_storage().data_ptr() for one in (received, *allocated)}
    assert len(places) == 1 + len(shapes), "the concatenated tensor is a copy"
    total = sum(one.untyped_storage().nbytes() for one in (received, *allocated))
    assert total == RECEIVED_BUFFERS * size
