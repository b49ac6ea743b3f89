"""Arithmetic of the settings: each contradiction is found and its message shows the numbers."""

import pytest

from rlpost.config.checks.arithmetic import (
    batch_problems,
    debug_problems,
    eval_problems,
    layout_problems,
    model_problems,
)
from rlpost.config.load import load


def config(**groups):
    base = {
        "cluster": {"nodes": 1, "num_gpus_per_node": 4, "actor_num_gpus_per_node": 2, "rollout_num_gpus": 2},
        "rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 2},
    }
    for group, values in groups.items():
        base[group] = {**base.get(group, {}), **values}
    return load([], base).config


def test_settings_that_fit_have_no_problems():
    good = config(perf={"tensor_model_parallel_size": 2, "sequence_parallel": True})
    assert layout_problems(good) == batch_problems(good) == eval_problems(good) == debug_problems(good) == []


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ({"perf": {"tensor_model_parallel_size": 3}}, ["tensor_model_parallel_size = 3", "2 GPUs", "1 or 2"]),
        ({"cluster": {"actor_num_nodes": 2}}, ["actor_num_nodes = 2", "cluster.nodes = 1"]),
        ({"cluster": {"actor_num_gpus_per_node": 8}}, ["actor_num_gpus_per_node = 8", "num_gpus_per_node = 4"]),
        ({"cluster": {"rollout_num_gpus": 3, "rollout_num_gpus_per_engine": 2}}, ["does not divide", "3"]),
        ({"cluster": {"rollout_num_gpus": 3}}, ["3 engines of 1 GPUs", "room for 2"]),
        ({"perf": {"sequence_parallel": True}}, ["sequence_parallel", "2 or more"]),
        (
            {"perf": {"tensor_model_parallel_size": 2, "context_parallel_size": 2}},
            ["context_parallel_size = 2", "2 GPUs", "1 of them", "choose 1"],
        ),
        ({"perf": {"expert_model_parallel_size": 4}}, ["expert_model_parallel_size = 4", "the 2 GPUs of a pipeline"]),
        ({"perf": {"num_layers_per_virtual_pipeline_stage": 1}}, ["virtual", "pipeline_model_parallel_size of 2"]),
        ({"perf": {"decoder_last_pipeline_num_layers": 1}}, ["pipeline_model_parallel_size of 2"]),
        ({"perf": {"recompute_granularity": "full"}}, ["recompute_method and recompute_num_layers"]),
        ({"perf": {"recompute_num_layers": 1}}, ["recompute_granularity = full"]),
        ({"perf": {"overlap_param_gather": True}}, ["use_distributed_optimizer and overlap_grad_reduce"]),
        ({"perf": {"log_probs_max_tokens_per_gpu": 8}}, ["log_probs_max_tokens_per_gpu = 8", "use_dynamic_batch_size"]),
    ],
)
def test_a_layout_that_does_not_fit_is_named_with_its_numbers(groups, words):
    (problem,) = layout_problems(config(**groups))
    assert all(word in problem for word in words), problem


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ({"rollout": {"global_batch_size": 3}}, ["global_batch_size = 3", "8 samples"]),
        ({"rollout": {"num_steps_per_rollout": 3}}, ["num_steps_per_rollout = 3", "8 samples"]),
        ({"rollout": {"rollout_batch_size": 3, "n_samples_per_prompt": 3}}, ["9 samples", "2 data-parallel ranks"]),
        ({"perf": {"use_dynamic_batch_size": True}}, ["max_tokens_per_gpu"]),
        ({"rollout": {"n_samples_per_prompt": 1}}, ["n_samples_per_prompt = 1", "grpo compares", "2 or more"]),
        ({"grpo": {"kl_loss_coef": 0.1}}, ["kl_loss_coef = 0.1", "use_kl_loss"]),
    ],
)
def test_batches_that_do_not_fit_are_named_with_their_numbers(groups, words):
    (problem,) = batch_problems(config(**groups))
    assert all(word in problem for word in words), problem


def test_the_batch_of_an_optimizer_step_follows_from_either_setting():
    assert config(rollout={"global_batch_size": 4}).num_steps_per_rollout == 2
    assert config(rollout={"num_steps_per_rollout": 4}).num_steps_per_rollout == 4
    assert config().num_steps_per_rollout == 1


def test_model_sizes_that_tensor_parallelism_does_not_divide_are_named():
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 1, "intermediate_size": 96}
    (problem,) = model_problems(config(perf={"tensor_model_parallel_size": 2}), sizes)
    assert "num_key_value_heads = 1" in problem
    (problem,) = model_problems(config(perf={"tensor_model_parallel_size": 2}), {"intermediate_size": 97})
    assert "intermediate_size = 97" in problem


def test_any_vocabulary_is_padded_for_tensor_parallelism():
    assert model_problems(config(perf={"tensor_model_parallel_size": 2}), {"vocab_size": 97}) == []


@pytest.mark.parametrize(
    ("perf", "sizes", "words"),
    [
        ({"pipeline_model_parallel_size": 2}, {}, ["num_hidden_layers = 5", "2 stages"]),
        (
            {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 2},
            {"num_hidden_layers": 6},
            ["chunks of 2"],
        ),
        ({"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 6}, {}, ["5 less 6"]),
        ({"expert_model_parallel_size": 2}, {}, ["the model has no experts"]),
        ({"expert_model_parallel_size": 2}, {"num_experts": 3}, ["num_experts = 3"]),
        ({"expert_tensor_parallel_size": 2}, {"num_experts": 4, "moe_intermediate_size": 9}, ["moe_intermediate_size"]),
    ],
)
def test_a_layout_that_does_not_fit_the_model_is_named_with_its_numbers(perf, sizes, words):
    (problem,) = model_problems(config(perf=perf), {"num_hidden_layers": 5} | sizes)
    assert all(word in problem for word in words), problem


def test_stages_of_unequal_size_fit_when_they_add_up():
    first = {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 2}
    both = first | {"decoder_last_pipeline_num_layers": 3}
    assert model_problems(config(perf=first), {"num_hidden_layers": 5}) == []
    assert model_problems(config(perf=both), {"num_hidden_layers": 5}) == []


def test_samples_fill_an_interleaved_pipeline_in_whole_rounds():
    perf = {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}
    rollout = {"rollout_batch_size": 3, "n_samples_per_prompt": 3}
    (problem,) = batch_problems(config(perf=perf, rollout=rollout))
    assert "9 samples" in problem and "rounds of 2 micro-batches" in problem


def test_evaluation_sets_come_in_pairs():
    (problem,) = eval_problems(config(eval={"eval_prompt_data": ["a", "b", "c"]}))
    assert "pairs NAME PATH" in problem
    (problem,) = eval_problems(config(eval={"eval_interval": 5}))
    assert "eval.eval_prompt_data" in problem


def test_a_recording_path_needs_a_place_for_the_step():
    (problem,) = debug_problems(config(debug={"save_debug_rollout_data": "/tmp/x.jsonl"}))
    assert "{rollout_id}" in problem
