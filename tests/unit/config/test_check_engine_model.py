"""Models that the engines cannot update, or compute in another way than the trainer."""

from rlpost.config.checks.engine_model import engine_model_problems
from rlpost.config.load import load


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
