"""Import: Hugging Face safetensors into the parameters of this rank's Megatron model.

In: a folder with config.json and safetensors. Out: every parameter filled. Streamed: the host holds the tensors of one
parameter at a time. Invariant: every parameter is filled and every tensor of the folder is used, or WeightError says
which is not; a wrong model is never trained silently.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open

from rlpost.errors import WeightError
from rlpost.weights import layouts, names
from rlpost.weights.names import Dimensions

UNUSED_SUFFIXES = ("rotary_emb.inv_freq",)  # derived values that old exporters wrote


class HuggingFaceFolder:
    """The tensors of a folder by name, read when asked for."""

    def __init__(self, folder: str | Path) -> None:
        """Read which file holds what; raises WeightError when the folder has no safetensors."""
        self.folder = Path(folder)
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            self.file_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
            return
        single = self.folder / "model.safetensors"
        if not single.is_file():
            raise WeightError(
                f"hf_checkpoint={self.folder} has neither model.safetensors nor model.safetensors.index.json; "
                "point it at a Hugging Face folder saved in safetensors format"
            )
        with safe_open(single, framework="pt") as opened:
            self.file_of = dict.fromkeys(opened.keys(), single.name)

    def read(self, name: str) -> torch.Tensor:
        """One full tensor on the CPU; raises WeightError when the folder lacks it."""
        if name not in self.file_of:
            raise WeightError(f"{self.folder} has no tensor {name!r}; is config.json that of these weights?")
        with safe_open(self.folder / self.file_of[name], framework="pt") as opened:
            return opened.get_tensor(name)


@torch.no_grad()
def import_weights(
    model: torch.nn.Module, folder: str | Path, *, architecture: str, dims: Dimensions, tp_rank: int, tp_size: int
) -> None:
    """Fill the parameters of ``model`` with this tensor-parallel rank's part of the weights in ``folder``.

    Values are cast to the dtype of the parameters. Raises WeightError for tensors that are missing, left over, or of
    another shape.
    """
    source = HuggingFaceFolder(folder)
    rules = names.family(architecture)
    unused = set(source.file_of)
    has_output_layer = False
    for name, parameter in model.named_parameters():
        rule = names.to_hugging_face(name, rules)
        has_output_layer |= name == "output_layer.weight"
        full = layouts.merge([source.read(hf) for hf in rule.hugging_face], rule.layout, dims)
        is_sharded = getattr(parameter, "tensor_model_parallel", False)
        part = (
            layouts.shard(full, rule.layout, dim=parameter.partition_dim, rank=tp_rank, size=tp_size)
            if is_sharded
            else full
        )
        if part.shape != parameter.shape:
            raise WeightError(
                f"{' + '.join(rule.hugging_face)} in {folder} give shape {tuple(part.shape)} for {name}, the model "
                f"needs {tuple(parameter.shape)}; is config.json that of these weights?"
            )
        parameter.copy_(part)
        unused.difference_update(rule.hugging_face)
    if not has_output_layer:  # tied: some folders carry the copy
        unused.discard("lm_head.weight")
    unused = {name for name in unused if not name.endswith(UNUSED_SUFFIXES)}
    if unused:
        raise WeightError(
            f"{folder} holds {len(unused)} tensors that {architecture} has no place for, the first are "
            f"{sorted(unused)[:5]}; is config.json that of these weights?"
        )
