"""Every rank of every recipe, built at its real layout and sizes on the meta device.

The largest have fewer layers. All ranks are built in this process. They are compared with the
planner, and with the model that transformers builds from the published config.json. Megatron would
use a visible GPU, so the tests are skipped where torch has CUDA.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlpost.config.load import JOBS, files_of, load
from rlpost.config.model_file import DESCRIPTION
from rlpost.config.plan.hf_shape import hf_shape
from rlpost.config.tree import Config
from rlpost.config.wording import with_values
from rlpost.errors import ConfigError, PlacementError
from rlpost.extensions.rehearsal.all_ranks.rank import rehearse_rank
from rlpost.extensions.rehearsal.all_ranks.rank_facts import Weight
from rlpost.models.fp8 import SUFFIX
from rlpost.trainer.model_description import description_of
from rlpost.trainer.weights.inventory import Inventory
from rlpost.trainer.weights.quantise import BlockFp8
from rlpost.types import Bucket
from tests.contract.all_ranks import GPU_BYTES, Rehearsal, problems, rehearse, traffic_problems
from tests.contract.all_ranks.contradictions import (
    Expected,
    plan_problems,
    update_plans,
)
from tests.contract.all_ranks.published import published
from tests.contract.cuda.observations_table import RECIPES
from tests.unit.config.test_models import PUBLISHED

from megatron.core import parallel_state  # isort: skip  (after the stand-in for CUDA)

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.is_available(), reason="run with CUDA_VISIBLE_DEVICES= (empty)"),
    pytest.mark.filterwarnings("ignore"),  # Megatron repeats its warnings for every rank
]
TINY = {
    "model_type": "qwen3", "vocab_size": 32, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "tie_word_embeddings": True,
    "architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip


def recipe_config(
    recipe: str,
    folder: Path,
    *,
    hf: Mapping[str, Any] | None = None,
    **changed: dict[str, Any],
) -> tuple[Config, Mapping[str, Any]]:
    """Return the settings of a recipe without its assets, and the config.json of its model.

    ``hf``: keys that differ from the published file.
    """
    path = JOBS / "recipes" / f"{recipe}.toml"
    named = load(files_of(path), {}).config.checkpoint.model
    described = (TINY if named is None else _whole_file(named)) | (hf or {})
    file = folder / "described.json"
    file.write_text(json.dumps(described))
    checkpoint = {"checkpoint": {"hf_checkpoint": str(folder / "model"), "model": str(file)}}
    return load(files_of(path), checkpoint | changed).config, described


def _whole_file(model: str) -> dict[str, Any]:
    """The config.json of a model with its encoder of images; ``PUBLISHED`` has the language model alone."""
    content: dict[str, Any] = json.loads((JOBS / "models" / f"{model}.json").read_text())
    del content[DESCRIPTION]
    return content


FEWER_LAYERS = {  # recipe: layers of all stages, of the first and of the last
    "qwen3_30b_a3b": (4, None, None),
    "qwen3_235b_a22b": (9, 2, 1),
    "glm45_355b": (17, 4, 1),  # three dense ones
}
"""Depths at which each stage has every kind of layer that it has in the recipe. Parameters of each
stage at full depth are counted by ``tests/contract/test_plan.py``."""


SAME_TRAINER = {"qwen3_4b_async": "qwen3_4b_decoupled", "qwen3_4b_fp8": "qwen3_4b"}
"""Recipes that differ in their mode of generation or their checkpoint alone
(``tests/e2e/test_recipes.py`` holds that)."""


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name not in SAME_TRAINER])
def test_all_ranks_of_a_recipe_make_up_its_model(recipe, tmp_path):
    layers, first, last = FEWER_LAYERS.get(recipe, (None, None, None))
    fewer = {} if layers is None else {"num_hidden_layers": layers}
    ends = {
        "decoder_first_pipeline_num_layers": first,
        "decoder_last_pipeline_num_layers": last,
    }
    changed = {} if layers is None else {"perf": ends}
    config, hf = recipe_config(recipe, tmp_path, hf=fewer, **changed)
    made = rehearse(config, hf=hf)
    assert len(made.ranks) == config.actor_world_size
    assert made.problems[:20] == []


MANY_WAYS = {  # layouts that no recipe has: (settings of [perf], number of ranks)
    "tied across stages": ({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, 8),
    "interleaved": ({"pipeline_model_parallel_size": 4, "num_layers_per_virtual_pipeline_stage": 3}, 4),
    "uneven stages": ({"pipeline_model_parallel_size": 3, "decoder_first_pipeline_num_layers": 10,
                       "decoder_last_pipeline_num_layers": 12}, 3),
    "float32": ({"bf16": False, "tensor_model_parallel_size": 4}, 8),
    "optimizer on every rank": ({"use_distributed_optimizer": False, "overlap_param_gather": False}, 2),
}  # fmt: skip


@pytest.mark.parametrize("case", MANY_WAYS)
def test_other_layouts_make_up_the_model_too(case, tmp_path):
    perf, world = MANY_WAYS[case]
    plain = {"tensor_model_parallel_size": 1, "sequence_parallel": False}
    cluster = {
        "actor_num_gpus_per_node": world,
        "num_gpus_per_node": world,
        "rollout_num_gpus_per_engine": 1,
    }
    config, hf = recipe_config("qwen3_4b", tmp_path, perf=plain | perf, cluster=cluster)
    made = rehearse(config, hf=hf)
    assert len(made.ranks) == world
    assert made.problems[:20] == []


def test_the_update_plan_in_fp8_is_that_of_an_fp8_model_of_transformers(tmp_path):
    """Names and shapes of weights and of their block scales are compared."""
    config, hf = recipe_config("qwen3_4b_fp8", tmp_path)
    ranks = {
        rank: rehearse_rank(config, description_of(config), rank=rank, world=8) for rank in (0, 1)
    }
    expected = Expected(config, hf_shape(hf), published(hf, fp8_block=(128, 128)))
    quantised = {
        name.removesuffix(SUFFIX) for name in expected.published.tensors if name.endswith(SUFFIX)
    }
    assert len(quantised) == 7 * expected.shape.num_layers
    fp8 = BlockFp8(frozenset(quantised), (128, 128))
    plans = update_plans(ranks, config, gpu_bytes=GPU_BYTES, quantisation=fp8)
    assert list(plan_problems(ranks, plans, expected)) == []
    assert list(traffic_problems(plans[0], expected, in_fp8=True)) == []


SMALL = {
    "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 101, "n_routed_experts": 8, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "num_experts_per_tok": 2,
}  # fmt: skip
SMALL_HF = PUBLISHED["glm45_355b"] | SMALL
SIXTEEN = {
    "perf": {
        "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "context_parallel_size": 2,
        "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2,
        "decoder_first_pipeline_num_layers": None, "decoder_last_pipeline_num_layers": None,
    },
    "cluster": {"actor_num_nodes": 2, "rollout_num_gpus_per_engine": 8},
    "sync": {"update_weight_buffer_size": 50_000},
}  # fmt: skip
"""Every kind of parallel group has more than one member."""


def small(folder: Path) -> Rehearsal:
    config, _ = recipe_config("glm45_355b", folder, hf=SMALL, **SIXTEEN)
    return rehearse(config, hf=SMALL_HF)


@pytest.fixture(scope="module")
def sixteen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearsal]:
    yield small(tmp_path_factory.mktemp("sixteen"))


def test_a_layout_with_two_of_everything_has_no_problem(sixteen):
    assert sixteen.problems == []


def test_buckets_fit_into_the_memory_of_the_gpu(sixteen):
    expected, small_gpu = sixteen.expected, 10**5
    plans = update_plans(sixteen.ranks, expected.config, gpu_bytes=small_gpu)
    assert len(plans[0]) > len(sixteen.plans[0])
    assert list(traffic_problems(plans[0], expected, gpu_bytes=small_gpu)) == []


def test_the_layer_for_multi_token_prediction_is_on_the_last_stage(tmp_path):
    """It is built, planned, saved and sent exactly once; nothing else changes."""
    on = {"grpo": {"enable_mtp_training": True}}
    config, _ = recipe_config("glm45_355b", tmp_path, hf=SMALL, **SIXTEEN, **on)
    made = rehearse(config, hf=SMALL_HF)
    assert made.problems == []
    holders = {
        rank
        for rank, facts in made.ranks.items()
        for one in facts.weights
        if ".4.eh_proj" in one.name
    }
    assert holders == set(range(8, 16))


def test_a_folder_with_config_json_describes_the_model(tmp_path, sixteen):
    """Without ``hf``, the ranks are compared with the config.json of that folder."""
    settings = with_values(sixteen.expected.config, hf_checkpoint=str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(SMALL_HF))
    made = rehearse(settings)
    assert made.problems == []
    assert made.ranks == sixteen.ranks
    (tmp_path / "config.json").write_text(json.dumps(SMALL_HF | {"n_routed_experts": 16}))
    with pytest.raises(ConfigError, match=r"--num-experts 8, but the model's config.json says 16"):
        rehearse(with_values(settings, model_args={"num_experts": 8}))


def test_a_model_that_nothing_describes_is_named(sixteen):
    settings = with_values(sixteen.expected.config, model=None)
    with pytest.raises(ConfigError, match=r"--hf-checkpoint .*config.json is not there; bring it"):
        rehearse(settings)


def changed(made: Rehearsal, rank: int, **facts: Any) -> Rehearsal:
    """Return the rehearsal with some facts of one rank replaced, and plans made from them."""
    ranks = {**made.ranks, rank: replace(made.ranks[rank], **facts)}
    plans = update_plans(ranks, made.expected.config, gpu_bytes=GPU_BYTES)
    return Rehearsal(ranks, plans, made.expected)


def with_weight(made: Rehearsal, rank: int, ending: str, **fields: Any) -> Rehearsal:
    """Replace fields of the first weight of a rank whose name has this ending."""
    weights = made.ranks[rank].weights
    index = next(number for number, one in enumerate(weights) if one.name.endswith(ending))
    return changed(
        made,
        rank,
        weights=(*weights[:index], replace(weights[index], **fields), *weights[index + 1 :]),
    )


def without(weights: tuple[Weight, ...], part: str) -> tuple[Weight, ...]:
    return tuple(weight for weight in weights if part not in weight.name)


def swapped_groups(made: Rehearsal) -> Rehearsal:
    groups = made.ranks[3].groups
    return changed(made, 3, groups={**groups, "context": groups["data"], "data": groups["context"]})


def lost_expert(made: Rehearsal) -> Rehearsal:
    weights = made.ranks[15].weights
    expert = next(weight for weight in weights if "local_experts" in weight.name)
    return changed(made, 15, weights=without(weights, expert.name.rpartition(".linear")[0] + "."))


def lost_layer(made: Rehearsal) -> Rehearsal:
    """Remove it on every rank of its stage, so that these agree."""
    for rank in range(8, 16):
        made = changed(
            made, rank, weights=without(made.ranks[rank].weights, "layers.3.mlp.router.weight")
        )
    return made


def lost_entry(made: Rehearsal) -> Rehearsal:
    """Remove it on all ranks of the first stage, so that their plans are equal."""
    for rank in range(8):
        made = changed(made, rank, entries=made.ranks[rank].entries[:-1])
    return made


def other_plan_on_one_rank(made: Rehearsal) -> Rehearsal:
    return changed(made, 6, entries=made.ranks[6].entries[::-1])


def optimizer_gap(made: Rehearsal) -> Rehearsal:
    facts = made.ranks[5]
    index = next(number for number, one in enumerate(facts.weights) if one.optimizer is not None)
    start, end = facts.weights[index].optimizer
    weights = list(facts.weights)
    weights[index] = replace(weights[index], optimizer=(start, end - 1))
    return changed(made, 5, weights=tuple(weights))


def second_writer(made: Rehearsal) -> Rehearsal:
    mine = made.ranks[15].checkpoint
    return changed(made, 15, checkpoint=(*mine, made.ranks[0].checkpoint[0]))


def lost_part(made: Rehearsal) -> Rehearsal:
    kept = tuple(part for part in made.ranks[0].checkpoint if "experts" not in part.key)
    return changed(made, 0, checkpoint=kept)


def wide_gradients(made: Rehearsal) -> Rehearsal:
    memory = made.ranks[2].memory
    return changed(made, 2, memory=replace(memory, gradients=2 * memory.gradients))


def second_source(made: Rehearsal) -> Rehearsal:
    return changed(made, 1, update=replace(made.ranks[1].update, is_source=True))


def idle_holder(made: Rehearsal) -> Rehearsal:
    return changed(made, 1, update=replace(made.ranks[1].update, gathers=False))


def expert_twice_in_plan(made: Rehearsal) -> Rehearsal:
    plan = made.plans[0]
    number, bucket = next(
        (n, b) for n, b in enumerate(plan) if any(".experts.1." in name for name in b.names)
    )
    name = next(name for one in plan for name in one.names if ".experts.0." in name)
    again = Bucket(
        tuple(name if ".experts.1." in each else each for each in bucket.names),
        bucket.shapes,
        bucket.dtypes,
        bucket.stage,
    )
    plan = (*plan[:number], again, *plan[number + 1 :])
    return Rehearsal(made.ranks, dict.fromkeys(made.plans, plan), made.expected)


BROKEN: dict[str, tuple[Callable[[Rehearsal], Rehearsal], str]] = {
    "groups": (swapped_groups, "rank 3: its context group is"),
    "an expert on too few ranks": (lost_expert, r"rank 15: it lacks model.layers.2.mlp.experts.4.down_proj.weight"),
    "a weight on no rank": (lost_layer, r"model.layers.3.mlp.gate.weight of shape \(8, 64\): its shards are \[\]"),
    "a shard of another rank": (
        lambda made: with_weight(made, 1, "linear_proj.weight", shard=0), "rank 1: it holds shard 0 of"
    ),
    "a weight with too few rows": (
        lambda made: with_weight(made, 2, "linear_fc2.weight", shape=(63, 48)),
        r"rank 2: .*linear_fc2.weight of shape \(63, 48\) is no shard of",
    ),
    "a weight whose optimizer is missing": (optimizer_gap, r"ranks \(1, 3, 5, 7\): the optimizer has"),
    "a part written twice": (second_writer, "checkpoint: .*: the box at .* is written by several ranks"),
    "a part written by no rank": (lost_part, "checkpoint: .*experts"),
    "gradients that the planner does not know": (wide_gradients, "stage 0: gradients take"),
    "parameters outside of the weights": (
        lambda made: changed(made, 9, num_parameters=made.ranks[9].num_parameters + 1), "rank 9: its modules have"
    ),
    "a tensor that is not sent": (lost_entry, "weight update: model.layers.1.* is in 0 buckets"),
    "an expert sent in place of another": (expert_twice_in_plan, r"experts.1.* is in 0 buckets"),
    "plans that differ": (other_plan_on_one_rank, "rank 6: its weight-update plan differs"),
    "two senders of a stage": (second_source, r"stage 0: the ranks \[0, 1\] send its weights"),
    "a holder that does not gather": (idle_holder, r"stage 0: the ranks \[1\] hold shards but take no part"),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_contradictory_facts_are_reported(what, sixteen):
    damage, said = BROKEN[what]
    found = damage(sixteen).problems
    assert any(re.search(said, line) for line in found), found[:10]


def test_groups_in_another_order_are_reported(tmp_path, monkeypatch):
    """Adjacent ranks are context-parallel instead of tensor-parallel."""
    form = partial(parallel_state.initialize_model_parallel, order="cp-tp-ep-dp-pp")
    monkeypatch.setattr(parallel_state, "initialize_model_parallel", form)
    found = small(tmp_path).problems
    assert any(
        "rank 1: its tensor group is (1, 3), the layout requires (0, 1)" in line for line in found
    ), found[:10]


def test_a_family_that_loses_experts_is_reported(tmp_path, monkeypatch):
    """Every rank names its experts as the first rank does."""
    monkeypatch.setattr(Inventory, "_first_expert", lambda self, expert_rank: 0)
    found = small(tmp_path).problems
    assert any(
        line.startswith("rank 15: it lacks model.layers.") and ".experts.4." in line
        for line in found
    )
    assert any(".experts.4." in line and "is in 0 buckets" in line for line in found)


def test_a_planner_that_counts_differently_is_reported(sixteen):
    """The planner does not count the shared expert."""
    expected = replace(sixteen.expected, shape=replace(sixteen.expected.shape, shared_ffn=0))
    found = problems(sixteen.ranks, sixteen.plans, expected)
    assert any("are built, the planner counts" in line for line in found)
    assert any("the planner counts" in line and "transformers has" in line for line in found)


def test_a_rank_outside_of_the_world_or_a_layout_that_does_not_divide_it_is_refused(sixteen):
    settings = sixteen.expected.config
    with pytest.raises(PlacementError, match="rank 16 is not one of the 16 ranks"):
        rehearse_rank(settings, description_of(settings), rank=16, world=16)
    with pytest.raises(PlacementError, match="does not divide"):
        rehearse_rank(settings, description_of(settings), rank=0, world=12)


def test_a_process_that_already_belongs_to_groups_is_refused(sixteen):
    settings = sixteen.expected.config
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match="has already joined process groups"):
            rehearse_rank(settings, description_of(settings), rank=0, world=16)
        assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()
