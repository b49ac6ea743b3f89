"""Write the models of scaled-down recipes.

Output: in ``HOME/scaled/NAME`` of each recipe a random model of its family, also in blocks of FP8 if
its engines infer in FP8, and arithmetic problems. The models have the tiny model's tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path

from rlpost.config.load import files_of, load
from rlpost.config.plan.shape import layout_of
from rlpost.extensions.converting.fp8_folder import write_fp8_folder
from rlpost.extensions.fetching.tiny_model import make_model, make_problems, make_tokenizer
from rlpost.models.model_types import HfConfig
from tests.scale_down import (
    FP8_BLOCK,
    MODEL,
    MODEL_FP8,
    folded,
    infers_in_fp8,
    published_model,
    scaled_model,
)

PREDICTS_MORE = ("glm4_moe", "glm4_moe_lite", "deepseek_v3")
"""Model types whose published checkpoints have an additional layer for multi-token prediction."""


def scaled_folder(home: Path, recipe: Path) -> Path:
    """The folder of a recipe's scaled-down model and problems."""
    return home / "scaled" / recipe.stem


def write_model(home: Path, recipe: Path, ranks: int) -> None:
    """Write the model that ``scale_down`` names, with random weights, and its problems."""
    import torch

    config = load(files_of(recipe), {}).config
    folder = scaled_folder(home, recipe)
    hf = scaled_model(published_model(config), folded(layout_of(config), ranks))
    (folder / MODEL).mkdir(parents=True)
    make_problems(folder)
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / MODEL)
    make_model(tokenizer, hf).save_pretrained(folder / MODEL)
    if hf["model_type"] in PREDICTS_MORE:
        add_prediction_layer(folder / MODEL, hf)
    if infers_in_fp8(config):
        write_fp8_folder(folder / MODEL, folder / MODEL_FP8, block=FP8_BLOCK)


def add_prediction_layer(folder: Path, hf: HfConfig) -> None:
    """Append an untrained layer for multi-token prediction, as in GLM-4.5's checkpoint."""
    import torch
    from safetensors.torch import load_file, save_file

    path, number = folder / "model.safetensors", hf["num_hidden_layers"]
    tensors = load_file(path)
    last, behind = f"model.layers.{number - 1}.", f"model.layers.{number}."
    more = {
        behind + name.removeprefix(last): value.clone()
        for name, value in tensors.items()
        if name.startswith(last)
    }
    norm = tensors["model.norm.weight"]
    more |= {
        behind + name: norm.clone()
        for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")
    }
    more[behind + "eh_proj.weight"] = torch.randn(norm.numel(), 2 * norm.numel()) * 0.02
    more[behind + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    more[behind + "shared_head.head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | more, path, metadata={"format": "pt"})
    _add_to_config(folder, num_nextn_predict_layers=1)


def _add_to_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values, indent=2) + "\n")
