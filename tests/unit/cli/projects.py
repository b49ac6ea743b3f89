"""A recipe, a model folder and prompts that have nothing wrong, for tests that submit or check."""

from __future__ import annotations

import json
from pathlib import Path

NO_TENSORS = b"\x02\0\0\0\0\0\0\0{}"
"""A file of safetensors without any."""
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "hidden_size": 32,
    "head_dim": 8,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "1+1=": 1}, "unk_token": "[UNK]"},
}
RECIPE = """\
[cluster]
job_name = 'test'
time = '20'
num_gpus_per_node = 4
actor_num_gpus_per_node = 2
rollout_num_gpus = 2
[checkpoint]
hf_checkpoint = 'model'
[rollout]
prompt_data = 'prompts.jsonl'
input_key = 'prompt'
label_key = 'label'
rollout_batch_size = 4
n_samples_per_prompt = 2
"""


def make_project(folder: Path) -> Path:
    """Write recipe.toml, model/ and prompts.jsonl into a folder; the folder."""
    model = folder / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(MODEL))
    (model / "model.safetensors").write_bytes(NO_TENSORS)
    (model / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "prompts.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n' * 3)
    (folder / "recipe.toml").write_text(RECIPE)
    return folder
