"""A folder of assets as after a download: models with their published config.json, without weights."""

from __future__ import annotations

import json
from pathlib import Path

from rlpost.models.fp8 import quantization_config
from tests.unit.cli.projects import NO_TENSORS
from tests.unit.config.test_models import PUBLISHED

MODELS = {
    "Qwen3-4B": "qwen3_4b",
    "Qwen3-4B-FP8": "qwen3_4b",
    "GLM-Z1-9B-0414": "glm4_9b",
    "GLM-4.5": "glm45_355b",
    "GLM-4.5-FP8": "glm45_355b",
    "GLM-4.6": "glm46_355b",
    "GLM-4.7": "glm47_355b",
    "Qwen3-30B-A3B": "qwen3_30b_a3b",
    "Qwen3-235B-A22B": "qwen3_235b_a22b",
    "SmolLM2-135M-Instruct": "smollm2_135m",
    "tiny": "qwen3_4b",
}
FP8 = {"quantization_config": quantization_config(["model.layers.3.mlp.shared_experts.up_proj"])}
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "BPE", "vocab": {"1": 0, "+": 1, "=": 2}, "merges": []},
}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def make_assets(folder: Path) -> Path:
    """Write the files that the recipes of jobs/recipes name; return the folder."""
    for name, model in MODELS.items():
        path = folder / name
        path.mkdir(parents=True)
        more = {"dtype": "bfloat16", "eos_token_id": 1} | (FP8 if name.endswith("FP8") else {})
        (path / "config.json").write_text(json.dumps(PUBLISHED[model] | more))
        (path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
        (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
        (path / "model.safetensors").write_bytes(NO_TENSORS)
        converted = folder / f"{name}_torch_dist"
        converted.mkdir()
        (converted / "model.safetensors").write_bytes(NO_TENSORS)
    line = json.dumps({"prompt": [{"role": "user", "content": "1+1="}], "label": "2"}) + "\n"
    for name in (
        "dapo-math-17k/dapo-math-17k.jsonl",
        "aime-2024/aime-2024.jsonl",
        "addition/train.jsonl",
        "addition/heldout.jsonl",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(line * 2)
    return folder
