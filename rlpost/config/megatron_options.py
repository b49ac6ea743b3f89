"""Options of the installed Megatron-core, read from its source without importing it.

Input: names of options. Output: whether they are fields of its dataclasses of settings, and one
line for each invalid option. Where Megatron-core is not installed (a login node) names are not
checked; the driver checks them again.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path

from rlpost.errors import suggestion

CLASSES = {
    "TransformerConfig": "transformer/transformer_config.py",
    "ModelParallelConfig": "model_parallel_config.py",
    "OptimizerConfig": "optimizer/optimizer_config.py",
    "DistributedDataParallelConfig": "distributed/distributed_data_parallel_config.py",
}
"""Dataclasses of settings and the files of ``megatron.core`` that define them."""

# types that cannot be given as text
_NOT_FROM_TEXT = (
    "Callable",
    "dtype",
    "ContextManager",
    "RecipeConfig",
)

OURS = {
    "add_bias_linear": "the model's config.json",
    "average_in_collective": "the trainer's loss, which is a sum",
    "batch_p2p_comm": "--num-layers-per-virtual-pipeline-stage",
    "fp16": "the trainer's precision",
    "gated_linear_unit": "the model's config.json",
    "grad_reduce_in_fp32": "--accumulate-allreduce-grads-in-fp32",
    "layernorm_epsilon": "the model's config.json (--norm-epsilon)",
    "moe_enable_routing_replay": "--use-rollout-routing-replay and --use-routing-replay",
    "moe_z_loss_coeff": "the trainer's loss, a sum with which Megatron would count that term once a token",
    "num_layers_in_first_pipeline_stage": "--decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "--decoder-last-pipeline-num-layers",
    "num_moe_experts": "the model's config.json (--num-experts)",
    "overlap_p2p_comm": "--num-layers-per-virtual-pipeline-stage",
    "perform_initialization": "--hf-checkpoint",
    "transformer_impl": "whether TransformerEngine is installed, and from --lora-rank",
    "use_custom_fsdp": "--use-distributed-optimizer",
    "use_megatron_fsdp": "--use-distributed-optimizer",
    "variable_seq_lengths": "--pipeline-model-parallel-size",
    "virtual_pipeline_model_parallel_size": "--num-layers-per-virtual-pipeline-stage",
}
"""Fields that the trainer sets, and the setting from which it derives them."""

NO_EFFECT = {
    "cross_entropy_fusion_impl": "the trainer computes log-probs itself",
    "cross_entropy_loss_fusion": "the trainer computes log-probs itself",
    "masked_softmax_fusion": "the attention kernels include the softmax",
    "memory_efficient_layer_norm": "norms are TransformerEngine's or the trainer's",
    "persist_layer_norm": "norms are TransformerEngine's or the trainer's",
}
"""Fields that have no effect here, and why; disabling one is accepted."""


@functools.cache
def option_names() -> frozenset[str] | None:
    """Return the fields of Megatron-core that text can set; None if it is not installed."""
    # without rlpost's import hooks, which would import torch
    spec = PathFinder.find_spec("megatron")
    if spec is None:
        return None
    folders = [Path(location) / "core" for location in spec.submodule_search_locations or ()]
    core = next((folder for folder in folders if folder.is_dir()), None)
    if core is None:
        return None
    names: set[str] = set()
    for class_name, file in CLASSES.items():
        names |= _fields(core / file, class_name)
    return frozenset(names)


def option_problems(options: Mapping[str, object]) -> list[str]:
    """Return a line for each option that is unknown, set by rlpost, or without effect."""
    problems, known = [], option_names()
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if name in OURS:
            problems.append(f"{flag}: this follows from {OURS[name]}; leave it out")
        elif name in NO_EFFECT and value:
            problems.append(
                f"{flag} {str(value).lower()}: has no effect, {NO_EFFECT[name]}; leave it out"
            )
        elif known is not None and name not in known:
            near = suggestion(name, known - OURS.keys())
            problems.append(f"{flag}: the installed Megatron-core has no such field{near}")
    return problems


def _fields(path: Path, class_name: str) -> set[str]:
    return {
        field.target.id
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == class_name
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if not field.target.id.startswith("_") and _is_from_text(ast.unparse(field.annotation))
    }


def _is_from_text(annotation: str) -> bool:
    return not any(kind in annotation for kind in _NOT_FROM_TEXT)
