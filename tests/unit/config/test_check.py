"""Arithmetic of the settings: each contradiction is found and its message shows the numbers."""

import pytest

from rlpost.config.checks.batch import batch_problems
from rlpost.config.checks.layout import layout_problems, model_problems
from rlpost.config.checks.rollout import debug_problems, eval_problems
from rlpost.config.load import load


def config(**groups):
    base = {
        "cluster": {
            "nodes": 1,
            "num_gpus_per_node": 4,
            "actor_num_gpus_per_node": 2,
            "rollout_num_gpus": 2,
        },
        "rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 2},
    }
    for group, values in groups.items():
        base[group] = {**base.get(group, {}), **values}
    return load([], base).config


def test_settings_that_fit_have_no_problems():
    good = config(perf={"tensor_model_parallel_size": 2, "sequence_parallel": True})
    assert (
        layout_problems(good)
        == batch_problems(good)
        == eval_problems(good)
        == debug_problems(good)
        == []
    )


def test_the_batch_of_an_optimizer_step_follows_from_either_setting():
    assert config(rollout={"global_batch_size": 4}).num_steps_per_rollout == 2
    assert config(rollout={"num_steps_per_rollout": 4}).num_steps_per_rollout == 4
    assert config().num_steps_per_rollout == 1


def test_model_sizes_that_tensor_parallelism_does_not_divide_are_named():
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 1, "intermediate_size": 96}
    (problem,) = model_problems(config(perf={"tensor_model_parallel_size": 2}), sizes)
    assert "num_key_value_heads = 1" in problem
    (problem,) = model_problems(
        config(perf={"tensor_model_parallel_size": 2}), {"intermediate_size": 97}
    )
    assert "intermediate_size = 97" in problem


def test_any_vocabulary_is_padded_for_tensor_parallelism():
    assert model_problems(config(perf={"tensor_model_parallel_size": 2}), {"vocab_size": 97}) == []


@pytest.mark.parametrize(
    ("perf", "sizes", "words"),
    [
        (
            {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 2},
            {"num_hidden_layers": 6},
            ["in --num-layers-per-virtual-pipeline-stage 2", "stage 1 or 3"],
        ),
        (
            {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 6},
            {},
            [
                "5 less --decoder-first-pipeline-num-layers 6",
                "use --decoder-first-pipeline-num-layers 1, 2, 3 or 4",
            ],
        ),
        ({"expert_model_parallel_size": 2}, {"num_experts": 3}, ["num_experts = 3"]),
        (
            {"expert_tensor_parallel_size": 2},
            {"num_experts": 4, "moe_intermediate_size": 9},
            ["moe_intermediate_size"],
        ),
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
    assert "9 samples" in problem and "2 micro-batches per pipeline round" in problem


@pytest.mark.parametrize(
    ("hf_config", "perf", "is_refused"),
    [
        ({"num_experts": 8}, {}, True),
        ({"num_experts": 8}, {"sequence_parallel": True}, False),
        ({"num_experts": 8}, {"tensor_model_parallel_size": 1}, False),
        ({}, {}, False),
    ],
)
def test_experts_with_tensor_parallelism_need_sequence_parallelism(hf_config, perf, is_refused):
    """Megatron's MoELayer raises in the first training step, after a rollout."""
    groups = {
        "cluster": {"num_gpus_per_node": 2, "actor_num_gpus_per_node": 2, "colocate": True},
        "perf": {"tensor_model_parallel_size": 2, **perf},
    }
    problems = model_problems(load([], groups).config, hf_config)
    assert [problem for problem in problems if "--sequence-parallel true" in problem] == problems
    assert bool(problems) == is_refused
