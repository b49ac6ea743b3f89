"""Build one rank of a configuration on the meta device, with the code that builds it in a run.

Input: settings, description, rank and number of ranks. Output: ``RankFacts``. Differences from a run on GPUs: the
layers are those without TransformerEngine, and Adam's state is not offloaded; both hold the same weights and shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.optimizer import MegatronOptimizer

from rlpost.actor import host_copies, megatron_checkpoint, optimizer, parallel
from rlpost.actor.description import ModelDescription
from rlpost.actor.model import build_model
from rlpost.actor.settings import ActorSettings
from rlpost.rehearsal.facts import CheckpointPart, Memory, RankFacts, UpdateRole, Weight
from rlpost.rehearsal.meta import as_rank
from rlpost.weights.inventory import OUTPUT_LAYER, Entry, Held, Inventory

Ranges = dict[torch.nn.Parameter, tuple[int, int]]


def rehearse_rank(settings: ActorSettings, description: ModelDescription, *, rank: int, world: int) -> RankFacts:
    """Facts about one rank of ``world``.

    Raises ConfigError or PlacementError when the model or the number of ranks does not fit the layout.
    """
    settings = as_on_gpu(settings)
    description.check_layout(settings)
    with as_rank(rank, world, settings, num_virtual_stages=description.num_virtual_stages(settings)):
        chunks = build_model(description, settings)
        inventory = Inventory(
            chunks,
            family=description.family,
            dims=description.dims,
            groups=parallel.weight_groups(),
            tied=description.tied,
            gather=_own_stage_alone,
        )
        model = optimizer.wrap(chunks, settings)
        adam = optimizer.build(model, settings)
        ranges = _optimizer_ranges(adam, chunks)
        return RankFacts(
            rank=rank,
            groups={kind: tuple(dist.get_process_group_ranks(group)) for kind, group in _groups().items()},
            weights=tuple(_weight(held, ranges) for held in inventory.held.values()),
            num_parameters=sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters()),
            entries=inventory.entries,
            checkpoint=tuple(_checkpoint_parts(chunks)),
            memory=_memory(model, adam, settings),
            update=UpdateRole(
                stage=inventory.groups.pipeline.rank(),
                gathers=parallel.holds_first_copy(),
                is_source=parallel.is_source_of_stage(),
            ),
        )


def as_on_gpu(settings: ActorSettings) -> ActorSettings:
    """The settings with the precision that a GPU has by default, and without what needs CUDA to be built."""
    return replace(
        settings,
        bf16=settings.bf16 is not False,
        optimizer_cpu_offload=False,
        use_precision_aware_optimizer=False,
        main_grads_dtype="fp32",
        main_params_dtype="fp32",
        exp_avg_dtype="fp32",
        exp_avg_sq_dtype="fp32",
    )


def _own_stage_alone(mine: list[Entry], group: dist.ProcessGroup) -> list[list[Entry]]:
    """The other stages are ranks of their own here; ``rlpost.rehearsal.update_plan`` puts them together."""
    return [mine]


def _groups() -> dict[str, dist.ProcessGroup]:
    return {
        "tensor": parallel_state.get_tensor_model_parallel_group(),
        "context": parallel_state.get_context_parallel_group(),
        "data": parallel_state.get_data_parallel_group(),
        "data_with_context": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "pipeline": parallel_state.get_pipeline_model_parallel_group(),
        "model": parallel_state.get_model_parallel_group(),
        "expert_tensor": parallel_state.get_expert_tensor_parallel_group(),
        "expert": parallel_state.get_expert_model_parallel_group(),
        "expert_data": parallel_state.get_expert_data_parallel_group(),
    }


def _weight(held: Held, ranges: Ranges) -> Weight:
    is_parameter = isinstance(held.tensor, torch.nn.Parameter)
    return Weight(
        name=held.rule.megatron,
        hugging_face=held.rule.hugging_face,
        layout=held.rule.layout,
        shape=tuple(held.tensor.shape),
        dim=held.dim,
        shard=0 if held.dim is None else held.group.rank(),
        num_shards=1 if held.dim is None else held.group.size(),
        is_expert=not getattr(held.tensor, "allreduce", True),
        is_trained=is_parameter,
        is_tied_copy=held.rule.megatron == OUTPUT_LAYER and held.rule.hugging_face == ("model.embed_tokens.weight",),
        optimizer=ranges.get(held.tensor) if is_parameter else None,
    )


def _optimizer_ranges(adam: MegatronOptimizer, chunks: Sequence[torch.nn.Module]) -> Ranges:
    """The part of each parameter whose state is here, as a range of its elements; empty parts are left out."""
    parts = host_copies.each(adam)
    found: Ranges = {}
    for one in parts:
        if host_copies.is_distributed(one):
            for parameter in one.model_param_gbuf_map:
                held = one._get_model_param_range_map(parameter)["param"]
                found[parameter] = (held.start, held.end)
    if any(host_copies.is_distributed(one) for one in parts):
        return found
    every = [parameter for chunk in chunks for parameter in chunk.parameters()]
    return {parameter: (0, parameter.numel()) for parameter in every}


def _checkpoint_parts(chunks: Sequence[torch.nn.Module]) -> Iterator[CheckpointPart]:
    """The tensors of the model that this rank has in a checkpoint; the optimizer's are laid out like them."""
    state = {
        number: chunk.sharded_state_dict(metadata=dict(megatron_checkpoint.METADATA))
        for number, chunk in enumerate(chunks)
    }
    sharded, _ = save_preprocess(state, validate_access_integrity=False)
    for part in nested_values(sharded):
        if isinstance(part, ShardedTensor):
            yield CheckpointPart(
                key=part.key,
                global_shape=tuple(part.global_shape),
                offset=tuple(part.global_offset),
                shape=(1,) * part.prepend_axis_num + tuple(part.local_shape),
                is_main=is_main_replica(part.replica_id),
            )


def _memory(model: Sequence[Any], adam: MegatronOptimizer, settings: ActorSettings) -> Memory:
    buffers = [buffer for chunk in model for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    mains = [
        parameter
        for one in host_copies.each(adam)
        if one.optimizer is not None
        for group in one.optimizer.param_groups
        for parameter in group["params"]
    ]
    return Memory(
        weights=sum(parameter.nbytes for chunk in model for parameter in chunk.parameters()),
        gradients=sum(buffer.grad_data.nbytes for buffer in buffers),
        main_weights=sum(parameter.nbytes for parameter in mains) if settings.bf16 else 0,
    )
