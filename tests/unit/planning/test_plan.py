"""The planner's sums of what no CPU measures, against sums done by hand, and what it says of layouts.

Parameters, weights, gradients and optimizer of ranks are compared with Megatron's modules and with
transformers in tests/contract: test_plan, test_parameter_count, test_rehearsal_planned and
cuda/test_every_rank.
"""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from rlpost.cli.planned_gpus import NAMED_CARDS
from rlpost.config.checks.batch import batch_problems
from rlpost.config.checks.layout import layout_problems
from rlpost.config.load import JOBS, files_of, load
from rlpost.config.plan.hf_shape import hf_shape
from rlpost.config.plan.shape import (
    Layout,
    Parameters,
    Shape,
    layers_of,
)
from rlpost.errors import ConfigError
from rlpost.extensions.planning import plan_verb as plan
from rlpost.extensions.planning.activations import (
    Pass,
    in_flight,
    kept_and_recomputed,
    layer_bytes,
    logits_bytes,
)
from rlpost.extensions.planning.estimate import Sizes, estimate
from rlpost.extensions.planning.layout_search import nearest, suggest
from rlpost.extensions.planning.nccl_memory import idle_context
from rlpost.extensions.planning.rank_memory import RankMemory, forward_pass, held_memory, notes_of
from tests.unit.config.test_models import PUBLISHED

GB = 10**9
BIG = Shape(hidden=16, ffn=32, heads=4, groups=2, head_dim=4, vocab=30, sparse=(False,) * 6)
DENSE = Shape(hidden=8, ffn=16, heads=4, groups=2, head_dim=2, vocab=30, sparse=(False,) * 4)


def stage_bytes(shape: Shape, layout: Layout, one: Pass, stage: int) -> int:
    """What a stage keeps at its fullest, layers that are being recomputed included."""
    return sum(kept_and_recomputed(shape, layout, one, stage))


def config(nodes=1, **groups):
    cluster = {
        "actor_num_nodes": nodes,
        "actor_num_gpus_per_node": 8,
        "colocate": True,
    } | groups.pop("cluster", {})
    return load([], {"cluster": cluster, **groups}).config


def test_the_layer_for_multi_token_prediction_computes_on_the_last_stage():
    """Its parameters are compared with Megatron's modules in ``tests/contract``."""
    layout, more, one = Layout(world=4, pipeline=2), replace(DENSE, mtp=True), Pass(tokens=10)
    assert stage_bytes(more, layout, one, 0) == stage_bytes(DENSE, layout, one, 0)
    assert stage_bytes(more, layout, one, 1) > stage_bytes(DENSE, layout, one, 1)
    assert logits_bytes(more, layout, one, 0) >= 2 * logits_bytes(DENSE, layout, one, 0)


def test_engines_hold_that_layer_only_where_they_draft():
    shape = replace(DENSE, mtp=True)
    draft = {"sglang": {"sglang_speculative_algorithm": "EAGLE"}}
    plain, drafting, without = (
        estimate(config(**groups), one, gpu_bytes=80 * GB).engine.weights
        for groups, one in (({}, shape), (draft, shape), ({}, DENSE))
    )
    assert plain == without < drafting


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Layout(2, pipeline=2), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (Layout(2, pipeline=2, chunk=2), [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (Layout(3, pipeline=3, first=2, last=1), [[0, 1], [2, 3, 4, 5, 6], [7]]),
    ],
)
def test_layers_go_to_stages_as_megatron_deals_them(layout, expected):
    assert [list(layers_of(layout, 8, stage)) for stage in range(layout.pipeline)] == expected


def test_a_model_that_nothing_describes_is_named():
    with pytest.raises(ConfigError, match=r"--hf-checkpoint is not given: .* with --model"):
        plan.model_of(load([], {}).config)


def test_gradients_in_bfloat16_take_two_bytes_a_parameter():
    narrow = {"use_distributed_optimizer": False, "accumulate_allreduce_grads_in_fp32": False}
    held, _ = held_memory(config(perf=narrow), Layout(8), Parameters(1000))
    assert held == RankMemory(weights=2000, gradients=2000, optimizer=12000)


def test_fp8_adds_copies_of_weights_and_pads_each_part_of_a_row():
    fp8 = {"fp8": "hybrid", "fp8_recipe": "blockwise"}
    held, _ = held_memory(config(megatron=fp8), Layout(), Parameters(1000))
    assert held.weights == (2 + 2) * 1000
    perf = {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "context_parallel_size": 2,
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": 1100,
    }
    rollout = {"rollout_max_context_len": 1000}
    padded = forward_pass(config(megatron=fp8, perf=perf, rollout=rollout))[0].tokens
    assert padded == 5 * 128 * 2  # 1100 tokens on two tensor-parallel ranks
    assert forward_pass(config(perf=perf, rollout=rollout))[0].tokens == 1100


@pytest.mark.parametrize(
    ("perf", "rows"),
    [
        ({}, 8 * 1000),
        ({"share_prefix": True}, 8 * 400 + 2 * 600 + 6 * 600 // 8),  # a shared token: 1/8
        ({"share_prefix": True, "balance_data": True}, 8 * 1000),
        ({"share_prefix": True, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 2000}, 2000),
    ],
)
def test_answers_of_a_prompt_share_its_rows(perf, rows):
    """A fixed number of consecutive samples has at most two prompts; a limit counts rows."""
    rollout = {
        "rollout_max_prompt_len": 600,
        "rollout_max_response_len": 400,
        "n_samples_per_prompt": 8,
    }
    given = config(perf={"micro_batch_size": 8} | perf, rollout=rollout)
    assert forward_pass(given)[0].tokens == rows


def test_an_optimizer_in_host_memory_takes_sixteen_bytes_there():
    away = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.75}
    held, host = held_memory(config(optimizer=away), Layout(8), Parameters(8000))
    assert (held.optimizer, host) == (12 * 1000 // 4, 16 * 1000 * 3 // 4)


def test_recomputing_keeps_one_input_a_layer_and_one_layer():
    one = Pass(tokens=10)
    norm = 10 * 8 * 2
    layer = layer_bytes(DENSE, Layout(), one, sparse=False)
    assert stage_bytes(DENSE, Layout(), one, 0) == 4 * layer + norm
    full = replace(one, recompute="full", method="uniform")
    assert stage_bytes(DENSE, Layout(), full, 0) == 4 * 10 * 8 * 2 + layer + norm
    assert (
        stage_bytes(DENSE, Layout(), replace(full, num_recomputed=2), 0)
        == 2 * 10 * 8 * 2 + 2 * layer + norm
    )
    some = replace(full, method="block", num_recomputed=3)
    assert stage_bytes(DENSE, Layout(), some, 0) == 3 * 10 * 8 * 2 + 2 * layer + norm


def test_sequence_parallelism_cuts_everything_and_tensor_parallelism_alone_not_the_norms():
    one, alone = Pass(tokens=10), layer_bytes(DENSE, Layout(), Pass(tokens=10), sparse=False)
    cut = layer_bytes(DENSE, Layout(2, tensor=2, sequence_parallel=True), one, sparse=False)
    assert cut == alone // 2
    assert cut < layer_bytes(DENSE, Layout(2, tensor=2), one, sparse=False) < alone


def test_the_first_stage_holds_as_many_micro_batches_as_there_are_stages():
    layout = Layout(4, pipeline=4)
    assert [in_flight(layout, 1, stage) for stage in range(4)] == [4, 3, 2, 1]
    assert in_flight(replace(layout, chunk=1), 3, 0) == 4 * (1 + 3 / (4 * 3))


def test_an_interleaved_stage_holds_the_chunks_of_its_warm_up_and_one_more():
    """Megatron-core's warm-up is 2 (p - s - 1) + (v - 1) p chunks; here p = 4, v = 3."""
    chunks = [(2 * 3 + 8 + 1), (2 * 2 + 8 + 1), (2 + 8 + 1), (8 + 1)]
    found = [in_flight(Layout(4, pipeline=4, chunk=1), 3, stage) for stage in range(4)]
    assert found == pytest.approx([count / 3 for count in chunks])


def planned(name, *, gpus=None, memory=80 * GB, **groups):
    """A recipe where its model is not there yet: a file of jobs/models says what it is."""
    made = load(files_of(JOBS / "recipes" / f"{name}.toml"), groups).config
    made = made if gpus is None else plan.on_gpus(made, gpus)
    shape, width = plan.model_of(made)
    return estimate(made, shape, gpu_bytes=memory, engine_width=width)


RECIPES = sorted(path.stem for path in (JOBS / "recipes").glob("*.toml") if path.stem != "tiny")


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_fits_gpus_of_80_gb(name):
    made = planned(name)
    assert made.problems == ()
    assert all(phase.total > 2 * GB for phase in made.phases)
    names = [phase.name for phase in made.phases]
    assert [name for name in names if name != "export"] == (
        ["train", "synchronise", "generate", "save"]
        if made.config.cluster.colocate
        else ["train", "generate"]
    )


@pytest.mark.slow
def test_the_large_recipe_does_not_fit_with_its_optimizer_on_the_gpu_and_the_nearest_layout_moves_it():
    made = planned("glm45_355b", optimizer={"optimizer_cpu_offload": False})
    assert [line.split(":")[0] for line in made.problems] == ["train", "save"]
    near = nearest(made.config, suggest(made.config, made.shape, gpu_bytes=80 * GB))
    assert near is not None and near.config.optimizer.optimizer_cpu_offload
    assert (
        near.estimate.layout.tensor,
        near.estimate.layout.pipeline,
        near.estimate.layout.expert,
    ) == (2, 8, 8)
    assert plan.flags_of(near, made.config) == "--optimizer-cpu-offload true"


def test_a_checkpoint_without_the_optimizer_is_the_weights():
    parameters = planned("glm45_355b").shape.parameters.total
    assert (
        planned("glm45_355b", checkpoint={"no_save_optim": True}).checkpoint_bytes == 2 * parameters
    )
    assert planned("glm45_355b").checkpoint_bytes == 14 * parameters


@pytest.mark.parametrize(
    ("grpo", "copies"),
    [({"use_kl_loss": False}, 2), ({"use_kl_loss": True, "ref_update_interval": 1}, 3)],
)
def test_an_old_policy_is_kept_in_host_memory_and_in_the_checkpoint(grpo, copies):
    """Beside the reference it needs one more copy; alone there is that of the policy too."""
    bare = planned("qwen3_4b", grpo={**grpo, "use_kl_loss": False, "ref_update_interval": None})
    made = planned("qwen3_4b", rollout={"update_weights_interval": 2}, grpo=grpo)
    weights = bare.fullest.held.weights * bare.config.cluster.actor_num_gpus_per_node
    buffers = made.save_buffer_bytes - bare.save_buffer_bytes
    more = made.host_bytes_per_node - bare.host_bytes_per_node
    assert more == copies * weights + buffers * bare.config.cluster.actor_num_gpus_per_node
    of_checkpoint = made.checkpoint_bytes - bare.checkpoint_bytes
    assert of_checkpoint == (copies - 1) * 2 * bare.shape.parameters.total


def test_a_checkpoint_passes_through_a_bounded_buffer_a_rank():
    """64 ranks write 14 bytes a parameter, the fullest a little more than its share; the node's
    host memory grows by the buffers alone.
    """
    narrow = planned("glm45_355b", checkpoint={"save_buffer_gb": 2.0})
    wide = planned("glm45_355b", checkpoint={"save_buffer_gb": 8.0})
    share = narrow.checkpoint_bytes / 64
    assert share < narrow.checkpoint_bytes_per_rank < 1.2 * share
    assert (narrow.save_buffer_bytes, wide.save_buffer_bytes) == (2 * GB, 8 * GB)
    assert wide.host_bytes_per_node - narrow.host_bytes_per_node == 8 * 6 * GB
    assert "16.0 GB a node" in plan.save_words(
        narrow, 300.0
    ) and "--save-buffer-gb" in plan.save_words(narrow, 300.0)
    small = planned("qwen3_4b", checkpoint={"save_buffer_gb": 100.0})
    assert small.save_buffer_bytes == small.checkpoint_bytes_per_rank < 100 * GB


def test_fp8_engines_take_half_the_matrices_and_whole_embeddings():
    """Qwen3-4B has 3.63e9 elements in matrices of FP8 (a block of 128 x 128 has a scale) and an
    embedding of 0.39e9.
    """
    narrow, wide = planned("qwen3_4b_fp8"), planned("qwen3_4b")
    matrices = 36 * (2 * 2560 * 128 * (32 + 8) + 3 * 2560 * 9728)
    assert wide.update.total_bytes - narrow.update.total_bytes == matrices - 4 * matrices // (
        128 * 128
    )
    assert (
        0.5 * wide.engine.weights + 151936 * 2560 / 2
        < narrow.engine.weights
        < 0.56 * wide.engine.weights
    )
    assert narrow.engine.kv_cache > wide.engine.kv_cache


def test_fp8_engines_of_half_the_gpus_hold_what_those_in_bfloat16_hold():
    """Shared experts of GLM-4.5 stay in bfloat16 (89 layers of 3 x 5120 x 1536)."""
    bf16, fp8 = planned("glm45_355b"), planned("glm45_355b_fp8")
    gpus = [made.config.cluster.rollout_num_gpus_per_engine for made in (bf16, fp8)]
    assert gpus == [32, 16] and fp8.engine.weights < bf16.engine.weights
    assert fp8.engine.kv_cache > bf16.engine.kv_cache
    same = planned("glm45_355b", checkpoint={"hf_checkpoint": "/GLM-4.5-FP8"})
    assert 0.5 < same.engine.weights / bf16.engine.weights < 0.53
    assert 0.5 < fp8.update.total_bytes / bf16.update.total_bytes < 0.51


def test_the_plan_of_an_update_says_bytes_buckets_requests_and_memory():
    shown = io.StringIO()
    made = planned("glm45_355b")
    Console(file=shown, width=110).print(plan.table(made, plan.Speed()))
    text = " ".join(shown.getvalue().split())
    assert (
        "weight update 705.6 GB to each of 2 engines a step: 173 buckets of at most 4.3 GB" in text
    )
    assert "346 requests that the driver relays; 12.8 GB of a GPU for buckets" in text
    assert ("buffers", made.update.gpu_bytes) in made.phases[1].parts


def test_kv_cache_is_what_the_weights_leave_of_sglang_s_part_of_the_free_memory():
    """36 layers x 4 heads of 8 on each of 2 GPUs x 128 x (key and value) x 2 bytes."""
    made = planned("qwen3_4b")
    engine, config = made.engine, made.config
    assert engine.kv_bytes_per_token == 36 * 4 * 128 * 2 * 2
    free = 80 * GB - idle_context(config) - engine.context
    assert engine.weights + engine.kv_cache == pytest.approx(0.7 * free)
    assert engine.kv_tokens == int(engine.kv_cache / engine.kv_bytes_per_token)


def test_engines_that_receive_over_the_network_hold_two_buckets_beside_the_cache():
    made = planned("qwen3_4b_decoupled")
    generate = dict(made.phases[-1].parts)
    assert generate["buffers"] == 2 * made.update.largest_bytes == made.update.engine_bytes
    assert planned("qwen3_4b").update.engine_bytes == 0


def test_a_save_holds_weights_and_optimizer_beside_the_weights_of_engines():
    made = planned("qwen3_4b")
    save, rank = dict(made.phases[-1].parts), made.fullest
    assert (save["weights"], save["optimizer"]) == (rank.held.weights, rank.held.optimizer)
    assert save["engine"] == made.engine.weights


def test_cuda_graphs_are_in_host_memory_while_the_trainer_works():
    made = planned("qwen3_30b_a3b")
    without = planned("qwen3_30b_a3b", sglang={"sglang_disable_cuda_graph": True})
    assert made.engine.graphs == 256 * 2 * 2**20 and without.engine.graphs == 0
    assert made.host_bytes_per_node - without.host_bytes_per_node == 8 * made.engine.graphs


def test_a_longer_answer_than_the_limit_is_computed_whole():
    made = planned("qwen3_4b", rollout={"rollout_max_response_len": 20000})
    assert made.tokens == 20000 + 1024


def test_a_gpu_is_named_or_given_by_its_size():
    """CUDA reports less than nvidia-smi (81559 MiB of an H100, 143771 MiB of an H200)."""
    sizes = {name: plan.parse_size(name) / 2**20 for name in NAMED_CARDS}
    assert 0.985 * 81559 < sizes["H100"] < 81559 and 0.985 * 143771 < sizes["H200"] < 143771
    assert plan.parse_size("h100") == plan.parse_size("79.11GiB") == plan.parse_size("H100")


@pytest.mark.parametrize("bad", ["80", "-1GB", "80TB", "many"])
def test_a_size_that_is_none_or_has_no_unit_is_refused(bad):
    with pytest.raises(ConfigError, match="80GB or 141GB"):
        plan.parse_size(bad)


LLAMA70 = PUBLISHED["llama3_1_70b"]
LLAMA13 = LLAMA70 | {
    "hidden_size": 5120, "intermediate_size": 13824, "num_attention_heads": 40, "num_key_value_heads": 40,
    "num_hidden_layers": 40, "vocab_size": 32000,
}  # fmt: skip
MISTRAL = LLAMA70 | {
    "hidden_size": 12288,
    "num_attention_heads": 96,
    "num_hidden_layers": 88,
    "vocab_size": 32768,
}
HOST = {"optimizer_cpu_offload": True}
# (parameters, settings of the model or its name, GPUs, TP, PP, EP, optimizer): the guideline that
# users are given.
SCALING = [
    (8e9, "llama3_1_8b", 8, (2, 1, 1), {}),
    (13e9, LLAMA13, 8, (2, 1, 1), {}),
    (70e9, LLAMA70, 16, (4, 2, 1), HOST),
    (70e9, LLAMA70, 32, (4, 2, 1), HOST),
    (123e9, MISTRAL, 32, (8, 4, 1), HOST),
    (123e9, MISTRAL, 64, (8, 4, 1), {}),
    (355e9, "glm45_355b", 64, (8, 4, 16), HOST),
]  # fmt: skip


@pytest.mark.parametrize(("size", "model", "gpus", "layout", "optimizer"), SCALING)
def test_the_usual_layouts_for_a_model_s_size_fit(size, model, gpus, layout, optimizer):
    """7-13B on 8 GPUs TP 2; 30-70B on 16-32 TP 4 PP 2; 100-200B on 32-64 TP 8 PP 4; 300B+ on 64 TP
    8 PP 4 EP 16.

    Where 18 bytes a parameter do not fit, the optimizer is in host memory, which the guideline
    leaves out.
    """
    tensor, pipeline, expert = layout
    sizes = {
        "tensor_model_parallel_size": tensor, "sequence_parallel": True, "pipeline_model_parallel_size": pipeline,
        "expert_model_parallel_size": expert, "expert_tensor_parallel_size": 1, "recompute_granularity": "full",
        "recompute_method": "uniform", "recompute_num_layers": 1, "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": 8192,
    }  # fmt: skip
    engines = {"rollout_num_gpus_per_engine": 8 if size < 300e9 else 32}
    rollout = {"rollout_max_response_len": 7168}
    hf = PUBLISHED[model] if isinstance(model, str) else model
    made = load([], {"cluster": {"actor_num_nodes": gpus // 8, "colocate": True} | engines, "perf": sizes,
                        "optimizer": optimizer, "rollout": rollout}).config  # fmt: skip
    shape = hf_shape(hf)
    assert shape.parameters.total == pytest.approx(size, rel=0.05)
    assert layout_problems(made) == []
    assert estimate(made, shape, gpu_bytes=80 * GB).problems == ()


def test_suggestions_fit_divide_and_come_best_first():
    made = planned("qwen3_30b_a3b")
    choices = suggest(made.config, made.shape, gpu_bytes=80 * GB)
    assert len(choices) > 3
    assert [choice.cost for choice in choices] == sorted(choice.cost for choice in choices)
    assert all(
        choice.estimate.problems == () and layout_problems(choice.config) == []
        for choice in choices
    )
    assert len({choice.words for choice in choices}) == len(choices)


@pytest.mark.parametrize(
    "rollout",
    [
        {"n_samples_per_prompt": 1, "global_batch_size": 32},  # GRPO compares several
        {"n_samples_per_prompt": 1},  # 32 samples do not divide into steps of 256
    ],
)
def test_layouts_are_suggested_although_the_samples_are_wrong_at_every_layout(rollout):
    config = load(files_of(JOBS / "recipes/qwen3_30b_a3b.toml"), {"rollout": rollout}).config
    assert batch_problems(config)
    shape, _ = plan.model_of(config)
    assert len(suggest(config, shape, gpu_bytes=80 * GB)) > 3


def shown(*words: str) -> tuple[int, str]:
    out = io.StringIO()
    made = load(files_of(JOBS / "recipes" / words[0]), {}).config
    shape, _ = plan.model_of(made)
    memory = 24 * GB if "24GB" in words else 80 * GB
    console = Console(file=out, width=plan.WIDTH)
    wants = "--suggest" in words
    sizes = Sizes(gpu_bytes=memory, engine_width=2)
    code = plan.show(console, made, shape, sizes, plan.Speed(), wants_suggestions=wants)
    return code, out.getvalue()


def test_the_plan_says_what_fits_and_what_does_not(monkeypatch):
    monkeypatch.setenv("RLPOST_ASSETS", str(Path("/nowhere")))
    code, text = shown("qwen3_4b.toml")
    assert code == 0 and text.rstrip().endswith("fits") and "TP 2 x PP 1 x CP 1 x DP 4" in text
    code, text = shown("qwen3_4b.toml", "24GB")
    assert (
        code == plan.EXIT_NO_FIT
        and "does not fit: train" in text
        and "the nearest layout that fits: TP" in text
    )
    code, text = shown("qwen3_4b.toml", "24GB", "--suggest")
    assert code == 0 and "at its peak" in text


RECOMPUTED = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


@pytest.mark.parametrize(
    ("groups", "phase", "part", "remedy"),
    [
        (
            {"perf": {"recompute_granularity": None, "max_tokens_per_gpu": 40_000}},
            "train",
            "activations",
            "use --recompute-granularity full",
        ),
        (
            {"perf": {"max_tokens_per_gpu": 400_000, **RECOMPUTED}},
            "train",
            "logits",
            "--max-tokens-per-gpu 400000",
        ),
        ({"cluster": {"offload_rollout": False}}, "train", "engine", "use --offload-rollout"),
        (
            {"sglang": {"sglang_mem_fraction_static": 0.98}},
            "generate",
            "KV cache",
            "lower --sglang-mem-fraction-static 0.98",
        ),
    ],
)
def test_a_refusal_names_the_largest_part_the_bound_and_the_setting(groups, phase, part, remedy):
    made = planned("qwen3_4b", **groups)
    (line,) = [line for line in made.problems if line.startswith(f"{phase}: ")]
    parts = dict(next(one.parts for one in made.phases if one.name == phase))
    assert f"{parts[part] / 1e9:.1f} GB of them {part}" in line
    assert f"of {80.0} GB (--gpu-memory) {0.95 * 80:.1f} GB may be planned" in line
    assert remedy in line


def test_a_cache_without_room_for_an_answer_names_sglang_s_share_and_what_helps():
    small = {"sglang_mem_fraction_static": 0.055}
    (line,) = planned("qwen3_4b", sglang=small).problems
    assert "gives --sglang-mem-fraction-static 0.055 of the memory that is free" in line
    assert "raise --rollout-num-gpus-per-engine 2" in line


def test_a_size_that_the_model_cannot_have_does_not_fit():
    """From the published file alone: the weights are not here."""
    cluster = {"num_gpus_per_node": 16, "actor_num_gpus_per_node": 16}
    tables = {"cluster": {"colocate": True, "actor_num_nodes": 1, **cluster}}
    tables["perf"] = {"tensor_model_parallel_size": 16, "sequence_parallel": True}
    tables["checkpoint"] = {"model": "qwen3_4b"}
    settings = load([], tables).config
    problems = plan.size_problems(settings)
    (problem,) = problems
    assert "16 does not divide the model's num_key_value_heads = 8" in problem
    shape, width = plan.model_of(settings)
    sizes = Sizes(gpu_bytes=80 * GB, engine_width=width)
    content = plan.plan_object(settings, shape, sizes, plan.Speed(), wants_suggestions=False)
    assert content["fits"] is False and content["problems"] == problems


@pytest.mark.parametrize("colocate", [True, False])
def test_the_bars_of_every_phase_name_what_is_in_memory(colocate):
    """Also with a critic, whose part the bars did not know."""
    made = planned("tiny", grpo={"advantage_estimator": "ppo"}, cluster={"colocate": colocate})
    names = {name for phase in made.phases for name, size in phase.parts if size}
    assert "critic" in names and all(name in str(plan.bars(made, 1000)) for name in names)


def test_a_plan_says_that_it_does_not_count_an_encoder_of_unknown_size():
    text = PUBLISHED["gemma3_1b"]
    alone = hf_shape(text)
    whole = hf_shape({**text, "architectures": ["Gemma3ForConditionalGeneration"]})
    notes = {shape: notes_of(load([], {}).config, shape) for shape in (alone, whole)}
    assert not any("encoder of images" in note for note in notes[alone])
    assert any("does not count" in note for note in notes[whole])
