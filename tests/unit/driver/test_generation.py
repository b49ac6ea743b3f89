"""The route format that generation reads from the model's configuration at startup."""

import json

from rlpost.config.load import load
from rlpost.driver.generation import Generation, route_format
from rlpost.driver.preemption import StopRequest
from rlpost.tasks.tokenizer import PromptTokenizer
from tests.unit.tasks.sets import byte_tokenizer

GLM_4_5 = {
    "architectures": ["Glm4MoeForCausalLM"],
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151552,
    "num_hidden_layers": 92,
    "first_k_dense_replace": 3,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
}


def test_routes_of_glm_4_5_leave_out_its_dense_layers(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GLM_4_5))
    checkpoint = {"hf_checkpoint": str(tmp_path)}
    found = route_format(
        load([], {"checkpoint": checkpoint, "grpo": {"use_rollout_routing_replay": True}}).config
    )
    assert found.layers == tuple(range(3, 92))
    assert (found.num_layers, found.num_experts, found.topk) == (92, 160, 8)
    assert route_format(load([], {"checkpoint": checkpoint}).config) is None


def test_answers_end_at_the_end_token_of_the_tokenizer_too(tmp_path):
    """Engines end them there: a run in one process must not generate on."""
    byte_tokenizer(tmp_path, "{{ messages[0].content }}")
    (tmp_path / "config.json").write_text(json.dumps({**GLM_4_5, "eos_token_id": 7}))
    (tmp_path / "held.jsonl").write_text('{"input": "a"}\n')
    values = {
        "checkpoint": {"hf_checkpoint": str(tmp_path)},
        "rollout": {"prompt_data": [str(tmp_path / "held.jsonl")]},
        "eval": {"eval_prompt_data": ["held", str(tmp_path / "held.jsonl")]},
    }
    generation = Generation(load([], values).config, StopRequest(tmp_path / "STOP"))
    (evaluation,) = generation._evaluations
    end = PromptTokenizer(tmp_path).end_ids - {7}
    assert evaluation.writer.keywords["sampling"].stop_token_ids == (7, *end) and end
