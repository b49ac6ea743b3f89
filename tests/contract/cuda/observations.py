"""Print as JSON what the trainer builds on CUDA.

Usage: ``python -m tests.contract.cuda.observations ASSETS FAMILIES``. For every recipe of
jobs/recipes at its own layout, and every family at several layouts, the output has Megatron's
configurations, the keys of the checkpoint, and the names of tensors left on the CPU.

This runs in a separate process because Megatron-core looks for TransformerEngine only when it is
imported. With ``stub/`` in PYTHONPATH it finds the stub.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

# isort: off
from tests.contract.cuda import fakes  # before the first import of Megatron-core
# isort: on


from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch import nn

from rlpost.config.load import JOBS, files_of, load
from rlpost.config.tree import Config
from rlpost.extensions.converting.conversion import Converter
from rlpost.trainer import optimizer, parallel
from rlpost.trainer.layer_specs import implementation_name
from rlpost.trainer.model import build_model, inventory_of
from rlpost.trainer.model_description import ModelDescription, read_description
from rlpost.trainer.model_state import METADATA
from rlpost.trainer.parallel import Rendezvous
from rlpost.trainer.weights.exporter import Exporter
from tests.contract.cuda.observations_table import (
    EXPERT_LAYOUTS,
    GPUS,
    LAYOUTS,
    LOCAL_LAYERS,
    OF_EXPERTS,
    ON_GPUS,
    RECIPES,
    SETTINGS,
    WITHOUT_ENGINE,
)
from tests.contract.families import WITH_MTP, WITH_TENSOR_PARALLEL
from tests.contract.local_layers import local_layers
from tests.rare_collections import collect_rarely
from tests.settings import rank_config

Found = dict[str, Any]
ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def observe_recipe(name: str, given: dict[str, Any]) -> Found:
    """Build a recipe's trainer on its first rank."""
    config = load(files_of(JOBS / "recipes" / f"{name}.toml"), given).config
    return built(config, config.actor_world_size)


def observe_gpu(capability: tuple[int, int], has_flash_attention: bool, folder: Path) -> list[str]:
    """The attention of a family with TransformerEngine's layers on a GPU."""
    settings = rank_config(str(folder), bf16=True)
    gpu = fakes.faked_cuda(capability, has_flash_attention=has_flash_attention)
    with gpu, fakes.faked_world(0, 1):
        parallel.initialise(Rendezvous(0, 1, "127.0.0.1", 1), settings, num_virtual_stages=None)
        return attended(build_model(read_description(str(folder), None), settings))


def observe_family(folder: Path) -> dict[str, Found]:
    """Build a family at several layouts, and its converter."""
    layouts = LAYOUTS | (EXPERT_LAYOUTS if "moe" in folder.name else {})
    if not has_transformer_engine():  # with it, Megatron's own layers are built at all of them
        layouts = {name: layouts[name] for name in WITHOUT_ENGINE}
    layouts = {
        name: (size, layout | (WITH_TENSOR_PARALLEL.get(folder.name, {}) if "tp" in name else {}))
        for name, (size, layout) in layouts.items()
    }
    if "linear_attention_freq" in read_description(str(folder), None).fields:
        layouts.pop("cp", None)  # refused
    # with pipeline stages, the CPU stand-in for CUDA adds both copies of a tied embedding on the
    # CPU, which is impossible for "meta" tensors
    if read_description(str(folder), None).tied:
        layouts = {name: layout for name, layout in layouts.items() if name != "pp"}
    implementations: list[str] = (
        ["local", "transformer_engine"] if has_transformer_engine() else ["local"]
    )
    common: dict[str, Any] = {"bf16": True, "enable_mtp_training": folder.name.endswith(WITH_MTP)}
    return {
        f"{kind}, {name}": built(
            rank_config(str(folder), **common, **layout), size, has_local_layers=kind == "local"
        )
        for kind in implementations
        for name, (size, layout) in layouts.items()
    } | {"converter": converted(rank_config(str(folder), **common))}


def observe_settings(folder: Path, settings: dict[str, Any]) -> Found:
    """Build a family with these settings of [perf] and [optimizer]."""
    given = {"bf16": None} | settings
    has_local_layers = given.pop(LOCAL_LAYERS, False)
    return built(rank_config(str(folder), **given), 1, has_local_layers=has_local_layers)


def has_transformer_engine() -> bool:
    """Whether Megatron-core has found the stub."""
    from megatron.core.models.gpt import gpt_layer_specs

    return bool(gpt_layer_specs.HAVE_TE)


def built(settings: Config, size: int, *, has_local_layers: bool = False) -> Found:
    """Describe model, wrapped model, optimizer and exporter of rank 0, or the error."""
    layers = local_layers() if has_local_layers else nullcontext()
    with layers, fakes.faked_cuda(), fakes.faked_world(0, size), fakes.listening("rlpost") as said:
        try:
            description = read_description(settings.checkpoint.hf_checkpoint, settings.checkpoint)
            description.check_layout(settings)
            stages = description.num_virtual_stages(settings)
            parallel.initialise(
                Rendezvous(0, size, "127.0.0.1", 1), settings, num_virtual_stages=stages
            )
            chunks = build_model(description, settings)
            kept = keys(chunks)
            wrapped = optimizer.wrap(chunks, settings)
            adam = optimizer.build(wrapped, settings)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {
            "model": plain(chunks[0].config),
            "optimizer": plain(adam.config),
            "ddp": plain(wrapped[0].ddp_config),
            "keys": kept,
            "implementation": implementation_name(chunks),
            "attention": attended(chunks),
            "modules": sorted({type(module).__name__ for module in chunks[0].modules()}),
            "exported": exported(chunks, description),
            "adam": [type(one.optimizer).__name__ for one in each(adam) if one.optimizer],
            "warnings": said,
            "on_cpu": {
                "model": left_behind(chunks),
                "optimizer": sorted({kind for kind, tensor in state_of(adam) if on_cpu(tensor)}),
                "buffers": sorted({kind for kind, tensor in buffers_of(wrapped) if on_cpu(tensor)}),
            },
        }


def attended(chunks: list[Any]) -> list[str]:
    """Kinds of the attention modules, each of which gets rows; the stub refuses what it cannot do.

    A module of this package is not called: it computes with the boundaries of sequences.
    """
    kinds = set()
    for chunk in chunks:
        for module in chunk.modules():
            kind = type(module).__name__
            if kind == "PackedAttention":
                kinds.add(kind)
            if kind == "TEDotProductAttention":
                module(*rows_of(module), None, AttnMaskType.causal, packed_seq_params=PACKED)
                kinds.add(f"{kind} {module.options.get('cp_comm_type', '')}".strip())
    return sorted(kinds)


PACKED = PackedSeqParams(qkv_format="thd")


def rows_of(module: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of one token for an attention module of TransformerEngine."""
    size, widths = module.options["tp_size"], module.widths
    key_width, value_width = (widths, widths) if isinstance(widths, int) else widths
    groups = module.options["num_gqa_groups"] or module.heads
    if key_width != value_width or module.config.multi_latent_attention:
        groups = module.heads
    made = ((module.heads, key_width), (groups, key_width), (groups, value_width))
    query, key, value = (
        torch.empty(1, heads // size, width, dtype=module.config.params_dtype, device="meta")
        for heads, width in made
    )
    return query, key, value


def converted(settings: Config) -> Found:
    """Describe what the converter builds; it wraps no model."""
    with fakes.faked_cuda(), fakes.faked_world(0, 1):
        try:
            converter = Converter(settings, Rendezvous(0, 1, "127.0.0.1", 1))
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        left = left_behind(converter.chunks)
        return {
            "on_cpu": {"model": left},
            "exported": exported(converter.chunks, converter.description),
        }


def exported(chunks: list[Any], description: ModelDescription) -> dict[str, Any]:
    """Shapes of the tensors that the exporter gathers on this rank; names of those on the CPU."""
    exporter = Exporter(inventory_of(chunks, description))
    shapes, on_the_cpu = {}, []
    for bucket in exporter.plan(1 << 40):
        for name, tensor in exporter.gather(bucket, on_all_stages=False).items():
            shapes[name] = list(tensor.shape)
            on_the_cpu += [name] if on_cpu(tensor) else []
    return {"shapes": shapes, "on_cpu": on_the_cpu}


def keys(chunks: list[Any]) -> dict[str, list[int]]:
    """Key and global shape of every part in the checkpoint."""
    found = {}
    for chunk in chunks:
        state = chunk.sharded_state_dict(metadata=dict(METADATA))
        apply_factories(state)
        for part in nested_values(state):
            kind = "tensor" if isinstance(part, ShardedTensor) else "object"
            found[f"{kind} {part.key}"] = list(part.global_shape)
    return found


def left_behind(chunks: list[Any]) -> list[str]:
    """Names of tensors on the CPU: parameters, buffers, and plain attributes of modules."""
    return sorted(
        {name for chunk in chunks for name, tensor in tensors_of(chunk) if on_cpu(tensor)}
    )


def tensors_of(chunk: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, tensor) of parameters, buffers and plain attributes."""
    yield from chunk.named_parameters()
    yield from chunk.named_buffers()
    for path, module in chunk.named_modules():
        yield from (
            (f"{path}.{name}", value)
            for name, value in vars(module).items()
            if torch.is_tensor(value)
        )


def each(adam: Any) -> list[Any]:
    """The optimizers of a chain."""
    return getattr(adam, "chained_optimizers", [adam])


def state_of(adam: Any) -> Iterator[tuple[str, Any]]:
    """Yield (kind, tensor) of all tensors that the optimizers of a chain update."""
    for one in each(adam):
        for group in one.optimizer.param_groups if one.optimizer else ():
            yield from (("parameters", tensor) for tensor in group["params"])
        for kind in ("shard_float16_groups", "shard_fp32_groups", "shard_fp32_from_float16_groups"):
            yield from (
                (kind, tensor)
                for group in getattr(one, kind, ())
                for tensor in group
                if tensor is not None
            )


def buffers_of(wrapped: list[Any]) -> Iterator[tuple[str, Any]]:
    """Yield (kind, tensor) of the DDP buffers that hold weights and gradients."""
    for chunk in wrapped:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield "gradients", buffer.grad_data
            yield from (("weights", tensor) for tensor in [buffer.param_data] if tensor is not None)


def on_cpu(tensor: Any) -> bool:
    """Whether a tensor is on the CPU instead of "meta"."""
    return bool(tensor.device.type == "cpu")


def plain(config: Any) -> dict[str, Any]:
    """Fields of a dataclass; others than JSON scalars are converted to text, without addresses."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    simple = (bool, int, float, str, type(None))
    return {
        name: value if isinstance(value, simple) else ADDRESS.sub("", str(value))
        for name, value in values.items()
    }


def main(assets: str, families: str) -> None:
    """Print all observations as one line of JSON after OBSERVED."""
    collect_rarely()
    logging.getLogger("megatron").setLevel(logging.CRITICAL)
    os.environ["RLPOST_ASSETS"] = assets
    without_kernels = {"perf": {"moe_grouped_gemm": False, "moe_permute_fusion": False}}
    on_gpus = {
        f"{family}, {name}": observe_gpu(*gpu, Path(families) / family)
        for family in ON_GPUS
        for name, gpu in (GPUS.items() if has_transformer_engine() else ())
    }
    found = {
        "gpus": on_gpus,
        "recipes": {name: observe_recipe(name, {}) for name in RECIPES},
        "recipes without kernels": {
            name: observe_recipe(name, without_kernels) for name in OF_EXPERTS
        },
        "settings": {
            name: observe_settings(Path(families) / family, settings)
            for name, (family, settings) in SETTINGS.items()
        },
        "families": {
            folder.name: observe_family(folder) for folder in sorted(Path(families).iterdir())
        },
    }
    print("OBSERVED " + json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
