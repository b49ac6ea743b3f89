"""Frozen parameters: weights that the model uses but that are not trained.

Input: the chunks of a model, and patterns of names. Output: parameters without ``requires_grad``.
Megatron's data-parallel wrapper and optimizers skip these: they have neither a gradient buffer nor
an optimizer state. Names are Megatron's, with layers numbered over the whole model, so that a
pattern means the same at every layout.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
import torch.distributed as dist

from rlpost.config.tree import Config
from rlpost.errors import ConfigError
from rlpost.trainer.weights.inventory import EMBEDDING, OUTPUT_LAYER, named_tensors


def freeze_by_name(chunks: Sequence[torch.nn.Module], config: Config, *, tied: bool) -> None:
    """Freeze parameters by ``only_train_params_name_list`` or ``freeze_params_name_list``.

    A pattern is searched in the name (``re.search``), as in slime. If embedding and output layer
    are ``tied``, the name of the embedding counts for both. Call it again when modules were added
    to the chunks; the result is that of one call.
    """
    trained = config.optimizer.only_train_params_name_list
    frozen = config.optimizer.freeze_params_name_list
    if not trained and not frozen:
        return
    for name, tensor in named_tensors(chunks):
        if isinstance(tensor, torch.nn.Parameter):
            name = EMBEDDING if tied and name == OUTPUT_LAYER else name
            is_trained = _matches(trained, name) if trained else not _matches(frozen, name)
            tensor.requires_grad_(is_trained)
    for chunk in chunks:
        keep_graph(chunk)


def check_frozen(chunks: Sequence[torch.nn.Module], config: Config, *, stage: int) -> None:
    """Check that patterns match and that each pipeline stage trains something. Collective.

    The number of optimizer steps in a checkpoint is that of its first rank, so each rank must have
    an optimizer state.

    Raises:
        ConfigError: a pattern matches no parameter of the model, or a stage has none to train.
    """
    patterns = {
        "--only-train-params-name-list": config.optimizer.only_train_params_name_list,
        "--freeze-params-name-list": config.optimizer.freeze_params_name_list,
    }
    if config.lora.lora_rank is None and not any(patterns.values()):
        return
    names = [name for name, _ in named_tensors(chunks)]
    trains = any(parameter.requires_grad for one in chunks for parameter in one.parameters())
    rank_records: list[tuple[int, bool, list[str]]] = [(0, True, [])] * dist.get_world_size()
    dist.all_gather_object(rank_records, (stage, trains, names))
    all_names = {name for _, _, names in rank_records for name in names}
    problems = [
        f"{flag} {pattern}: matches no parameter of this model, such as {min(all_names)}; correct the pattern"
        for flag, flag_patterns in patterns.items()
        for pattern in flag_patterns
        if not any(map(re.compile(pattern).search, all_names))
    ]
    idle = sorted({stage for stage, trains, _ in rank_records if not trains})
    if idle and not problems:
        problems.append(
            f"pipeline stages {idle} have no parameter to train; train one in each, or use fewer stages with "
            "--pipeline-model-parallel-size"
        )
    if problems:
        raise ConfigError("\n".join(problems))


def keep_graph(chunk: torch.nn.Module) -> None:
    """Let the embedding's output require a gradient, even if the embedding is frozen.

    Recomputation computes no gradients at all for a block without an input that requires one, and
    a pipeline stage must have an output that requires one.
    """
    embedding = getattr(chunk, "embedding", None)
    if embedding is not None and _require_gradient not in embedding._forward_hooks.values():
        embedding.register_forward_hook(_require_gradient)


def _require_gradient(module: torch.nn.Module, args: object, output: torch.Tensor) -> None:
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_(True)


def _matches(patterns: Sequence[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def any_frozen(chunks: Sequence[torch.nn.Module]) -> bool:
    """Return whether any rank has a frozen parameter. Collective."""
    frozen = any(not one.requires_grad for chunk in chunks for one in chunk.parameters())
    found = [False] * dist.get_world_size()
    dist.all_gather_object(found, frozen)
    return any(found)
