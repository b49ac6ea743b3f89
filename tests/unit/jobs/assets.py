"""A folder of assets as after a download: models with their published config.json, without weights."""

from __future__ import annotations

import json
from pathlib import Path

from rlpost.config.model_file import MODELS as FILES
from rlpost.models.fp8 import quantization_config
from tests.image_model import PROCESSOR as IMAGES
from tests.image_model import noise
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
    "Qwen3-VL-4B-Instruct": "qwen3_vl_4b",
    "tiny": "qwen3_4b",
}
FP8 = {"quantization_config": quantization_config(["model.layers.3.mlp.shared_experts.up_proj"])}
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "BPE", "vocab": {"1": 0, "+": 1, "=": 2}, "merges": []},
}
PROCESSOR = IMAGES | {"size": {"shortest_edge": 65536, "longest_edge": 16777216}}
"""Bounds of pixels as Qwen3-VL is published with them."""
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def make_assets(folder: Path) -> Path:
    """Write the files that the recipes of jobs/recipes name; return the folder."""
    for name, model in MODELS.items():
        path = folder / name
        path.mkdir(parents=True)
        more = {"dtype": "bfloat16", "eos_token_id": 1} | (FP8 if name.endswith("FP8") else {})
        (path / "config.json").write_text(json.dumps(_whole_config(model) | more))
        (path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
        (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
        (path / "model.safetensors").write_bytes(NO_TENSORS)
        if "vision_config" in PUBLISHED[model]:
            (path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
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
    _write_geometry(folder / "geometry3k/data")
    return folder


def _whole_config(model: str) -> dict[str, object]:
    """A published config.json, with the keys of its language model nested where they are."""
    return json.loads((FILES / f"{model}.json").read_text())


def _write_geometry(folder: Path) -> None:
    """Two files with the columns that the card of hiyouga/geometry3k names."""
    import pyarrow
    from pyarrow import parquet

    folder.mkdir(parents=True)
    image = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    schema = pyarrow.schema(
        [
            ("images", pyarrow.list_(image)),
            *((name, pyarrow.string()) for name in ("problem", "answer")),
            ("id", pyarrow.int64()),
            ("choices", pyarrow.list_(pyarrow.string())),
            ("ground_truth", pyarrow.string()),
        ]
    )
    row = {
        "images": [{"bytes": noise(300, 200), "path": None}],
        **{"problem": "<image>Find x.", "answer": "12", "id": 7, "ground_truth": "B"},
        "choices": ["10", "12", "14", "16"],
    }
    for name in ("train", "test"):
        table = pyarrow.Table.from_pylist([row] * 2, schema=schema)
        parquet.write_table(table, folder / f"{name}-00000-of-00001.parquet")
