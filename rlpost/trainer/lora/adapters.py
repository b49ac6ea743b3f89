"""All adapters of a rank: their initial values, and the base without them.

Input: the chunks of a model that was built with adapters. Output: frozen base weights, adapters
that start from the same values at every layout, a context in which they are off, and their part of
the sharded state of the model. Invariant: base weights never change, so the model with adapters off
is the reference, without a second copy of the weights.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer

from rlpost.config.tree import Config
from rlpost.errors import CheckpointError
from rlpost.trainer.lora.linear import AdaptedLinear, AdapterPlan, with_adapter
from rlpost.trainer.weights.inventory import Inventory
from rlpost.trainer.weights.low_rank import LowRank, is_adapter
from rlpost.trainer.weights.peft_folder import PeftSettings


def freeze_base(chunk: torch.nn.Module) -> None:
    """Exclude all parameters but adapters from training."""
    for name, parameter in chunk.named_parameters():
        if not is_adapter(name):
            parameter.requires_grad_(False)


def low_rank_updates(chunks: Sequence[torch.nn.Module]) -> dict[torch.Tensor, LowRank]:
    """Return the update of each weight of these chunks that has one."""
    return {linear.weight: linear.low_rank for linear in adapted_layers(chunks)}


class Adapters:
    """The adapters of this rank."""

    def __init__(self, chunks: Sequence[torch.nn.Module], inventory: Inventory) -> None:
        """Find the adapters; ``inventory`` has the names of their weights in the whole model."""
        self._linears = adapted_layers(chunks)
        names = {held.tensor: name for name, held in inventory.held.items()}
        self._named = {names[linear.weight]: linear for linear in self._linears}

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Set A to uniform values in [-1, 1] / sqrt(in) and B to zero, as PEFT does by default.

        PEFT's ``kaiming_uniform_(a=sqrt(5))`` has this bound. The values of a layer depend on the
        seed and the layer's name alone, and are the same at every layout.
        """
        for name, linear in self._named.items():
            low_rank = linear.low_rank
            assert low_rank is not None
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            whole = torch.rand(low_rank.a.shape[0], linear.input_size, generator=generator)
            whole = (2.0 * whole - 1.0) / math.sqrt(linear.input_size)
            num_columns = low_rank.a.shape[1]
            first = linear.tp_group.rank() * num_columns if num_columns < whole.shape[1] else 0
            low_rank.a.copy_(whole[:, first : first + num_columns])
            low_rank.b.zero_()

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Context in which the model is the reference: the base without adapters."""
        self._set(is_on=False)
        try:
            yield
        finally:
            self._set(is_on=True)

    def _set(self, *, is_on: bool) -> None:
        for linear in self._linears:
            linear.adapter_is_on = is_on


def has_adapters(chunks: Sequence[torch.nn.Module]) -> bool:
    """Return whether the model was built with adapters, also if these chunks have none."""
    return any(isinstance(module, AdaptedLinear) for one in chunks for module in one.modules())


def adapters_alone(state: Mapping[str, object]) -> dict[str, object]:
    """Return the adapters of a chunk's sharded state."""
    return {key: part for key, part in state.items() if is_adapter(key)}


def base_alone(state: Mapping[str, object]) -> dict[str, object]:
    """Return the sharded state of a chunk without its adapters."""
    return {key: part for key, part in state.items() if not is_adapter(key)}


def adapted_layers(chunks: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the linear layers that have an adapter."""
    return [
        module
        for chunk in chunks
        for module in chunk.modules()
        if isinstance(module, AdaptedLinear) and module.low_rank is not None
    ]


EXPERTS = "experts"


def adapt_layers(layers: Iterable[ModuleSpec], config: Config) -> None:
    """Replace the linear layers of the specification in place.

    ``layers`` are those of a decoder with local modules; equal layers may share a specification.
    """
    for layer in layers:
        attention = layer.submodules.self_attention.submodules
        for name in ("linear_qkv", "linear_proj"):
            _replace(attention, name, config)
        mlp = layer.submodules.mlp
        if mlp.module is not MoELayer:
            _adapt_mlp(mlp.submodules, config)
            continue
        for part in (mlp.submodules.experts, mlp.submodules.shared_experts):
            if part is not None:
                _adapt_mlp(part.submodules, config)


def _adapt_mlp(mlp: MLPSubmodules, config: Config) -> None:
    for name in ("linear_fc1", "linear_fc2"):
        _replace(mlp, name, config)


def _replace(submodules: object, name: str, config: Config) -> None:
    linear = getattr(submodules, name)
    if issubclass(linear, AdaptedLinear):  # a specification that layers or MLPs share
        return
    assert config.lora.lora_rank is not None
    plan = AdapterPlan(
        rank=config.lora.lora_rank,
        alpha=config.lora.lora_alpha,
        dropout=config.lora.lora_dropout,
        dense=name in config.lora.lora_targets,
        experts=EXPERTS in config.lora.lora_targets,
        gated=name == "linear_fc1",
    )
    if plan.dense or plan.experts:
        setattr(submodules, name, with_adapter(linear, plan))


def peft_settings(config: Config) -> PeftSettings:
    """Return the settings that the export of adapters needs."""
    assert config.lora.lora_rank is not None
    names: set[str] = set()
    for target in config.lora.lora_targets:
        if target == EXPERTS:
            names |= {f"mlp.experts.local_experts.#.linear_fc{number}" for number in (1, 2)}
        elif target in ("linear_fc1", "linear_fc2"):
            names |= {f"mlp.{target}", f"mlp.shared_experts.{target}"}
        else:
            names.add(f"self_attention.{target}")
    return PeftSettings(
        base=config.checkpoint.hf_checkpoint,
        rank=config.lora.lora_rank,
        alpha=config.lora.lora_alpha,
        dropout=config.lora.lora_dropout,
        adapted=frozenset(f"decoder.layers.#.{name}.weight" for name in names),
    )


def checkpoint_settings(config: Config) -> dict[str, object] | None:
    """Return the description of the adapters for a checkpoint; None without adapters."""
    if config.lora.lora_rank is None:
        return None
    return {
        "lora_rank": config.lora.lora_rank,
        "lora_alpha": config.lora.lora_alpha,
        "lora_targets": sorted(config.lora.lora_targets),
    }


def check_stored(folder: str | Path, stored: object, lora: Mapping[str, object] | None) -> None:
    """Raise CheckpointError if a checkpoint has other adapters than the model."""
    if stored == lora:
        return
    if stored is None:
        raise CheckpointError(
            f"{folder} has no LoRA adapters, and --lora-rank asks for them; use --ref-load to start from its weights, "
            "or --lora-rank none"
        )
    if lora is None:
        raise CheckpointError(
            f"{folder} has the LoRA adapters of {stored} and no weights of a model; use these settings and the same "
            "--hf-checkpoint or --ref-load, or merged weights that --save-hf exported"
        )
    raise CheckpointError(
        f"{folder} has LoRA adapters of {stored}, but the settings are {dict(lora)}; use those of the checkpoint"
    )
