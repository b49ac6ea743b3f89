"""Models that the engines cannot update, or compute in another way than the trainer."""

import pytest

from rlpost.config import extensions
from rlpost.config.checks.engine_model import (
    engine_model_problems,
    load_format_problems,
    update_problems,
)
from rlpost.config.engine_args import engine_args
from rlpost.config.load import load
from tests.unit.config.test_models import PUBLISHED


def problems(*, method=None, window=None, longest=4096, model=None, **options):
    config = load([], {"checkpoint": {"hf_checkpoint": "/model"}, **options}).config
    hf = model or {} if method is None else {"quantization_config": {"quant_method": method}}
    return engine_model_problems(config, hf, longest=longest, ignored_window=window)


def test_weights_in_mxfp4_are_refused_where_engines_receive_updates():
    (problem,) = problems(method="mxfp4")
    assert problem.startswith("--hf-checkpoint /model: its weights are in MXFP4")
    assert "tools/convert_torch_dist_to_hf.py" in problem
    assert problems(method="mxfp4", debug={"debug_rollout_only": True}) == []
    assert problems(method="mxfp4", debug={"debug_train_only": True}) == []
    assert problems(method="mxfp4", grpo={"loss_type": "sft_loss"}) == []


def test_bfloat16_and_fp8_are_accepted_and_other_formats_are_named():
    assert problems() == problems(method="fp8") == []
    (problem,) = problems(method="awq", grpo={"loss_type": "sft_loss"})
    assert "quantised with awq, which is not supported" in problem


def test_a_window_that_engines_ignore_is_refused_where_a_sequence_may_be_longer():
    assert problems(window=4096, longest=4096) == []
    (problem,) = problems(window=4096, longest=4097)
    assert "window of 4096 tokens" in problem and "--rollout-max-context-len 4096" in problem
    assert problems(window=4096, longest=4097, grpo={"loss_type": "sft_loss"}) == []


MIXED = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 4,
    "mlp_only_layers": [0],
    "decoder_sparse_step": 2,
}


def test_layers_without_experts_are_refused_where_engines_give_experts_to_all():
    (problem,) = problems(model=MIXED)
    assert "layers [0, 2] have no experts" in problem and "decoder_sparse_step = 1" in problem
    assert problems(model=MIXED, grpo={"loss_type": "sft_loss"}) == []
    assert problems(model={**MIXED, "architectures": ["Glm4MoeForCausalLM"]}) == []
    assert problems(model={**MIXED, "mlp_only_layers": [], "decoder_sparse_step": 1}) == []


FP8_CACHE = {"sglang_kv_cache_dtype": "fp8_e4m3"}


def test_a_cache_in_fp8_needs_its_scales_after_an_offload():
    """No update sends k_scale and v_scale (tests/contract/forked/test_engine_parameters.py)."""
    offloads = {"cluster": {"colocate": True}}
    (problem,) = problems(method="fp8", sglang=FP8_CACHE, **offloads)
    assert problem.startswith("--sglang-kv-cache-dtype fp8_e4m3 with --offload-rollout")
    kept = FP8_CACHE | {"sglang_enable_weights_cpu_backup": True}
    assert problems(method="fp8", sglang=kept, **offloads) == []
    assert problems(method="fp8", sglang=FP8_CACHE) == problems(sglang=FP8_CACHE, **offloads) == []


def test_fp8_blocks_whose_scales_sglang_ignores_are_refused():
    quantised = {"quantization_config": {"quant_method": "fp8"}}
    llama = quantised | {"architectures": ["LlamaForCausalLM"]}
    for model, wanted in ((llama, 1), (quantised | {"architectures": ["Qwen3ForCausalLM"]}, 0)):
        config = load([], {"checkpoint": {"hf_checkpoint": "/model"}}).config
        found = engine_model_problems(config, model, longest=1, ignored_window=None)
        assert len(found) == wanted
        assert not found or "does not load the scales" in found[0]


@pytest.mark.parametrize("architecture", ["Qwen3_5ForCausalLM", "Qwen3NextForCausalLM"])
@pytest.mark.parametrize(
    ("nested", "top", "is_refused"),
    [
        (0.25, None, False),
        (0.5, None, True),
        (0.5, 0.25, True),
        (0.5, 0.5, False),
        (None, 0.5, False),
    ],
)
def test_engines_read_the_rotated_part_of_a_head_at_the_top_level(
    architecture, nested, top, is_refused
):
    """SGLang's Qwen3_5TextConfig (0.5.21) has 0.25 in the rows that are refused."""
    options = {"rope_theta": 1e4} | ({"partial_rotary_factor": nested} if nested else {})
    model = {"architectures": [architecture], "rope_parameters": options}
    found = problems(model=model | ({"partial_rotary_factor": top} if top else {}))
    assert len(found) == is_refused
    assert not found or "partial_rotary_factor = 0.5 in rope_parameters" in found[0]


@pytest.mark.parametrize(
    ("lengths", "name"),
    [
        ({"head_dim": 64}, "head_dim = 64 is"),
        ({"intermediate_size": 1152}, "intermediate_size = 1152 over 2 tensor-parallel ranks"),
        ({"moe_intermediate_size": 128}, "moe_intermediate_size = 128 over 2"),
        ({"head_dim": 64, "kv_lora_rank": 512, "moe_intermediate_size": 256}, None),
    ],
)
def test_a_rank_s_weights_begin_with_a_block(lengths, name):
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    trains = {"megatron": {"fp8": "e4m3", "fp8_recipe": "blockwise"}}
    ranks = {"perf": {"tensor_model_parallel_size": 2}}
    lines = problems(model={"quantization_config": blocks, **lengths}, **trains, **ranks)
    assert (lines == []) if name is None else (name in lines[0])


GLM = PUBLISHED["glm45_355b"]
KEEPS_SHARED = {"modules_to_not_convert": ["model.layers.3.mlp.shared_experts.up_proj"]}
WHOLE = {"sglang_enable_dp_attention": True, "sglang_dp_size": 2, "sglang_ep_size": 16,
         "sglang_moe_dense_tp_size": 1}  # fmt: skip


@pytest.mark.parametrize(
    ("gpus", "sglang", "quantised", "name"),
    [
        (16, WHOLE, KEEPS_SHARED, None),
        (16, WHOLE, {}, "shared experts = 1536 over 16 GPUs"),
        (16, WHOLE | {"sglang_moe_a2a_backend": "deepep"}, {}, None),
        (16, WHOLE | {"sglang_ep_size": 2}, KEEPS_SHARED, "moe_intermediate_size = 1536 over 8"),
        (32, WHOLE | {"sglang_moe_dense_tp_size": None, "sglang_dp_size": 4, "sglang_ep_size": 32},
         KEEPS_SHARED, None),
        (7, {"sglang_ep_size": 7}, KEEPS_SHARED, "intermediate_size = 12288 over 7 GPUs"),
    ],
)  # fmt: skip
def test_the_gpus_of_an_engine_hold_whole_blocks(gpus, sglang, quantised, name):
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128], **quantised}
    cluster = {"rollout_num_gpus_per_engine": gpus, "colocate": False, "rollout_num_gpus": 64}
    sglang = {key: value for key, value in sglang.items() if value is not None}
    lines = problems(model=GLM | {"quantization_config": blocks}, cluster=cluster, sglang=sglang)
    assert (lines == []) if name is None else any(name in line for line in lines), lines
    assert all("SGLang refuses parts of FP8 blocks; " in line for line in lines)


def test_random_weights_are_no_start_for_engines_in_fp8():
    (problem,) = problems(method="fp8", sglang={"sglang_load_format": "dummy"})
    assert problem.startswith("--sglang-load-format dummy with weights in FP8")
    assert problems(sglang={"sglang_load_format": "dummy"}) == []


BACKUP = "enable_draft_weights_cpu_backup"
DRAFTING = {"sglang_speculative_algorithm": "EAGLE"}
COLOCATED = {"colocate": True}


@pytest.mark.parametrize(
    ("cluster", "sglang", "is_trained"),
    [
        (COLOCATED, {}, False),
        (COLOCATED, DRAFTING, True),
        (COLOCATED, DRAFTING | {"sglang_enable_weights_cpu_backup": True}, False),
        (COLOCATED, {"sglang_speculative_algorithm": "NGRAM"}, False),
        ({"rollout_num_gpus": 2}, DRAFTING, False),
    ],
)
def test_weights_of_a_draft_model_that_come_back_need_no_backup(cluster, sglang, is_trained):
    groups = {"cluster": cluster, "sglang": sglang, "grpo": {"enable_mtp_training": is_trained}}
    assert BACKUP not in engine_args(load([], groups).config)


@pytest.mark.parametrize(
    ("sglang", "is_trained"),
    [(DRAFTING, False), (DRAFTING | {"sglang_speculative_draft_model_path": "/other"}, True)],
)
def test_engines_keep_a_draft_model_that_an_offload_would_lose(sglang, is_trained):
    groups = {"cluster": COLOCATED, "sglang": sglang, "grpo": {"enable_mtp_training": is_trained}}
    assert engine_args(load([], groups).config)[BACKUP] is True


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        ({}, ""),
        ({"sync": {"update_weight_transport": "disk"}}, "--update-weight-transport disk"),
        ({"debug": {"debug_rollout_only": True}}, "--debug-rollout-only true"),
        ({"sglang": {"sglang_speculative_algorithm": "EAGLE"}}, "--sglang-speculative-algorithm"),
        ({"eval": {"eval_engines": "policy"}}, "--eval-engines policy"),
        ({"sglang": {"sglang_quantization": "fp8"}}, "--sglang-quantization"),
    ],
)
def test_engines_start_with_random_weights_only_where_an_update_fills_all(groups, reason):
    sglang = {"sglang_load_format": "dummy"} | groups.get("sglang", {})
    found = load_format_problems(load([], groups | {"sglang": sglang}).config)
    assert len(found) == bool(reason)
    assert all(one.startswith(f"--sglang-load-format dummy with {reason}") for one in found)
    assert load_format_problems(load([], groups).config) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("hicache_storage_backend", "file"), ("enable_lmcache", True), ("enable_flexkv", True)],
)
def test_a_cache_that_outlives_an_update_is_refused(name, value):
    """SGLang's /flush_cache leaves it, and its keys name neither weights nor run."""
    flag = f"--sglang-{name.replace('_', '-')} "
    (problem,) = update_problems(load([], {"sglang": {f"sglang_{name}": value}}).config)
    assert problem.startswith(flag) and "keys and values of earlier weights" in problem
    untrained = {"sglang": {f"sglang_{name}": value}, "debug": {"debug_rollout_only": True}}
    assert update_problems(load([], untrained).config) == []


@pytest.mark.parametrize(
    ("groups", "setting"),
    [
        ({}, None),
        ({"sync": {"update_weight_transport": "disk"}}, "--update-weight-transport disk"),
        ({"eval": {"eval_engines": "policy"}}, "--eval-engines policy"),
        ({"fleet": {"engines": 2}}, "--engines 2"),  # of an extension
    ],
)
def test_files_of_an_update_do_not_reach_another_draft_model(groups, setting):
    """SGLang 0.5.21 reads them into all models of an engine (``update_weights_from_disk``)."""
    draft = DRAFTING | {"sglang_speculative_draft_model_path": "/eagle"}
    config = load([], groups | {"sglang": draft}).config
    problems = [*update_problems(config), *extensions.problems(config)]
    assert [one.split(":")[0] for one in problems] == [
        f"--sglang-speculative-draft-model-path /eagle with {name}" for name in [setting] if name
    ]
    without = load([], groups | {"sglang": DRAFTING}).config
    assert [*update_problems(without), *extensions.problems(without)] == []
