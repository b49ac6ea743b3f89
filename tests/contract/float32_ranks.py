"""A folder with float32 weights among bfloat16, and what ranks show of the weights they hold."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rlpost.types import TrainSample
from tests.contract.actor_ranks import Files, logits, train
from tests.contract.families import load_folder, make_family

FLOAT32 = ("linear_attn.A_log", "linear_attn.norm.weight")
"""Ends of the names of tensors that published Qwen3.5 folders store in float32."""
A_LOG, DT_BIAS = 40.0, -40.0
"""exp(A_log) softplus(dt_bias) is one, and bfloat16 rounds such an A_log by up to 0.125: the decay
changes by up to 13 %, many times the rounding errors of a layer."""


def make_published(folder: Path, name: str, *, dtype: torch.dtype = torch.float32) -> None:
    """Save the model of a family in bfloat16, with the tensors of ``FLOAT32`` in ``dtype``."""
    make_family(folder, name)
    tensors = {}
    for key, tensor in load_folder(folder).items():
        if key.endswith("A_log"):
            tensor = A_LOG + torch.rand_like(tensor)
        if key.endswith("dt_bias"):
            tensor = DT_BIAS + 0.1 * tensor
        tensors[key] = tensor.to(dtype if key.endswith(FLOAT32) else torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(config))


def round_all() -> None:
    """Let the ranks hold all weights in bfloat16, as older versions; the process ends soon."""
    from rlpost.trainer import model

    model.is_float32 = lambda name, rules: False


def look(actor: Any, samples: Sequence[TrainSample], *, export: str) -> dict[str, Any]:
    """Import and export; return the logits of the samples, and types and bytes of the weights."""
    from rlpost.trainer import parallel

    actor.import_weights()
    actor.export(export)
    buffers = [buffer for chunk in actor.model for buffer in chunk.buffers]
    return {
        "logits": logits(actor, samples),
        "types": {entry.hugging_face[0]: entry.dtype for entry in actor.inventory.entries},
        "hash": actor.weights_hash(),
        "sums": {(buffer.param_dtype, buffer.grad_dtype) for buffer in buffers},
        "sent": sum(entry.num_bytes for entry in actor.inventory.entries),
        "held": sum(one.nbytes for chunk in actor.chunks for one in chunk.parameters()),
        "stage": parallel.weight_groups().pipeline.rank(),
    }


def gradients(actor: Any, samples: Sequence[TrainSample], factors: torch.Tensor) -> dict[str, Any]:
    """Return the gradients of the float32 weights for the sum of all logits times ``factors``.

    Whole ones by Hugging Face name; those of the weights on one data-parallel rank.
    """
    from rlpost.trainer import parallel, step
    from rlpost.trainer.packing import pack
    from rlpost.trainer.weights.exporter import gather_whole

    actor.import_weights()
    packed = pack(tuple(samples), actor.row_layout)
    group = parallel.weight_groups().tensor

    def loss(_: int, __: Any, sharded: torch.Tensor) -> tuple[torch.Tensor, None]:
        mine = factors.chunk(group.size(), dim=1)[group.rank()]
        return (sharded[0, : len(mine)].float() * mine).sum(), None

    for chunk in actor.model:
        chunk.zero_grad_buffer()
    step.run(actor.model, [packed], loss_of=loss, forward_only=False, stop_points=actor.stop_points)
    return {
        one.rule.hugging_face[0]: gather_whole(
            dataclasses.replace(one, tensor=one.tensor.main_grad)
        ).clone()
        for one in actor.inventory.held.values()
        if one.rule.is_float32
    }


def train_and_hold(
    actor: Any,
    steps: Sequence[Sequence[TrainSample]],
    *,
    files: Files,
    max_tokens: int | None = 64,
) -> dict[str, Any]:
    """Train the remaining steps; also return what this rank holds.

    ``before`` and ``after``: the float32 weights. ``mains``: all main weights afterwards, by name and
    first element of the part.
    """
    from rlpost.trainer.torch_dist import optimizer_state

    if files.load is None:
        actor.import_weights()
    else:
        actor.load(files.load)
    found: dict[str, Any] = {"before": held(actor)}
    found |= train(actor, steps, files=files, max_tokens=max_tokens)
    names = {one.tensor: name for name, one in actor.inventory.held.items()}
    mains = {
        (names[state.parameter], state.start): state.tensors()["param"].clone().numpy()
        for state in optimizer_state.parameter_states(actor.optimizer)
    }
    return found | {"after": held(actor), "mains": mains}


def held(actor: Any) -> dict[str, Any]:
    """Return this rank's weights that are float32 by their rules, as they are held."""
    return {
        name: one.tensor.detach().float().clone().numpy()
        for name, one in actor.inventory.held.items()
        if one.rule.is_float32
    }
