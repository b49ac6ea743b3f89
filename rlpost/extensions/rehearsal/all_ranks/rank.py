"""Build one rank of a configuration on the meta device, with the code that builds it in a run.

Input: settings, description, rank and number of ranks. Output: ``RankFacts``. Differences from a
run on GPUs: the layers are those without TransformerEngine, and Adam's state is not offloaded; both
hold the same weights and shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer

from rlpost.config.tree import Config
from rlpost.config.wording import with_values
from rlpost.extensions.rehearsal.all_ranks.meta import as_rank, building
from rlpost.extensions.rehearsal.all_ranks.rank_facts import Memory, RankFacts, UpdateRole, Weight
from rlpost.models import names
from rlpost.trainer import muon, optimizer, parallel
from rlpost.trainer.critic import of_critic
from rlpost.trainer.lora.adapters import adapted_layers
from rlpost.trainer.model import build_model, inventory_of
from rlpost.trainer.model_description import ModelDescription
from rlpost.trainer.torch_dist import optimizer_state
from rlpost.trainer.value_model import build_value_model, value_inventory
from rlpost.trainer.weights.inventory import OUTPUT_LAYER, Entry, Held, Inventory
from rlpost.trainer.weights.low_rank import ADAPTER_A, ADAPTER_B

Ranges = dict[torch.nn.Parameter, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class BuiltRank:
    """The modules of a policy or critic on one rank, on the meta device, and what trains them."""

    rank: int
    config: Config
    """The settings as on a GPU; those of a critic for the critic."""
    chunks: Sequence[GPTModel]
    inventory: Inventory
    model: Sequence[Any]
    """The chunks with their gradient buffers."""
    adam: MegatronOptimizer


def rehearse_rank(
    config: Config, description: ModelDescription, *, rank: int, world: int
) -> RankFacts:
    """Facts about one rank of ``world``.

    Raises ConfigError or PlacementError when the model or the number of ranks does not fit the
    layout.
    """
    with built_rank(config, description, rank=rank, world=world) as built:
        policy, *critics = map(facts_of, built)
    return replace(policy, critic=critics[0]) if critics else policy


@contextmanager
def built_rank(
    config: Config, description: ModelDescription, *, rank: int, world: int
) -> Iterator[tuple[BuiltRank, ...]]:
    """Build the policy of a rank, and its critic in a run with PPO; within, it is that rank.

    Raises as ``rehearse_rank``.
    """
    config = as_on_gpu(config)
    description.check_layout(config)
    num_stages = description.num_virtual_stages(config)
    with as_rank(rank, world, config, num_virtual_stages=num_stages):
        with building():
            chunks = build_model(description, config)
        inventory = inventory_of(chunks, description, gather=_own_stage_alone)
        policy = _with_optimizer(rank, config, chunks, inventory)
        if not config.use_critic:
            yield (policy,)
            return
        critic = of_critic(config)
        with building():
            chunks = build_value_model(description, critic)
        inventory = value_inventory(chunks, description, gather=_own_stage_alone)
        yield policy, _with_optimizer(rank, critic, chunks, inventory)


def _with_optimizer(
    rank: int, config: Config, chunks: Sequence[GPTModel], inventory: Inventory
) -> BuiltRank:
    with building():
        model = optimizer.wrap(chunks, config)
        adam = optimizer.build(model, config)
        if config.optimizer.optimizer == "muon":
            muon.install(adam, inventory, config)
    return BuiltRank(rank, config, chunks, inventory, model, adam)


def facts_of(built: BuiltRank) -> RankFacts:
    """List what a rank holds; call it within ``built_rank``."""
    ranges = _optimizer_ranges(built.adam)
    return RankFacts(
        rank=built.rank,
        groups={
            kind: tuple(dist.get_process_group_ranks(group))
            for kind, group in (_other_groups() | _groups()).items()
        },
        weights=tuple(_weight(held, ranges) for held in built.inventory.held.values()),
        num_parameters=sum(
            parameter.numel() for chunk in built.chunks for parameter in chunk.parameters()
        ),
        entries=built.inventory.entries,
        memory=_memory(built.model, built.adam, built.config),
        update=UpdateRole(
            stage=built.inventory.groups.pipeline.rank(),
            gathers=parallel.holds_first_copy(),
            is_source=parallel.is_source_of_stage(),
        ),
        adapters=tuple(_adapters(built.chunks, built.inventory, ranges)),
    )


def as_on_gpu(config: Config) -> Config:
    """The settings with the precision of a GPU, without what cannot be built without CUDA."""
    return with_values(
        config,
        bf16=config.perf.bf16 is not False,
        optimizer_cpu_offload=False,
        use_precision_aware_optimizer=False,
        main_grads_dtype="fp32",
        main_params_dtype="fp32",
        exp_avg_dtype="fp32",
        exp_avg_sq_dtype="fp32",
    )


def _own_stage_alone(mine: list[Entry], group: dist.ProcessGroup) -> list[list[Entry]]:
    """Return the entries of this stage."""
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


def _other_groups() -> dict[str, dist.ProcessGroup]:
    """The other groups of Megatron, by their names there, and the world."""
    found = {
        name: group
        for name, group in vars(parallel_state).items()
        if isinstance(group, dist.ProcessGroup)
    }
    assert dist.group.WORLD is not None
    return found | {"world": dist.group.WORLD}


def _weight(held: Held, ranges: Ranges) -> Weight:
    is_parameter = isinstance(held.tensor, torch.nn.Parameter)
    hugging_face = held.rule.hugging_face
    if held.rule.is_stacked:
        hugging_face = (f"{hugging_face[0]}[{names.expert_number(held.rule.megatron)}]",)
    return Weight(
        name=held.rule.megatron,
        hugging_face=hugging_face,
        layout=held.rule.layout,
        shape=tuple(held.tensor.shape),
        dim=held.dim,
        shard=0 if held.dim is None else held.group.rank(),
        num_shards=1 if held.dim is None else held.group.size(),
        is_expert=names.expert_number(held.rule.megatron) is not None,
        is_parameter=is_parameter,
        is_trained=is_parameter and held.tensor.requires_grad,
        is_tied_copy=held.rule.megatron == OUTPUT_LAYER
        and held.rule.hugging_face[0].endswith("embed_tokens.weight"),
        optimizer=ranges.get(held.tensor) if is_parameter else None,
        is_float32=held.rule.is_float32,
    )


def _adapters(
    chunks: Sequence[torch.nn.Module], inventory: Inventory, ranges: Ranges
) -> Iterator[Weight]:
    """Both factors of each adapter, by the name of the weight that they belong to."""
    weight_names = {held.tensor: name for name, held in inventory.held.items()}
    for linear in adapted_layers(chunks):
        prefix = weight_names[linear.weight].removesuffix("weight")
        factors = {ADAPTER_A: linear.low_rank.a, ADAPTER_B: linear.low_rank.b}
        for name, factor in factors.items():
            dim = linear.shard_axis.get(name) if linear.tp_group.size() > 1 else None
            yield Weight(
                name=prefix + name,
                hugging_face=(),
                layout="plain",
                shape=tuple(factor.shape),
                dim=dim,
                shard=0 if dim is None else linear.tp_group.rank(),
                num_shards=1 if dim is None else linear.tp_group.size(),
                is_expert=names.expert_number(prefix) is not None,
                is_parameter=True,
                is_trained=factor.requires_grad,
                is_tied_copy=False,
                optimizer=ranges.get(factor),
            )


def _optimizer_ranges(adam: MegatronOptimizer) -> Ranges:
    """The range of elements of each parameter whose optimizer state is here; no empty ranges."""
    return {
        state.parameter: (state.start, state.end)
        for state in optimizer_state.parameter_states(adam)
    }


def _memory(model: Sequence[Any], adam: MegatronOptimizer, config: Config) -> Memory:
    weights = gradients = 0
    for chunk in model:
        weights += sum(parameter.nbytes for parameter in chunk.parameters())
        buffers = (*chunk.buffers, *chunk.expert_parallel_buffers)
        gradients += sum(buffer.grad_data.nbytes for buffer in buffers)
    mains = 0
    for one in optimizer_state.inner(adam):
        for group in one.optimizer.param_groups:
            mains += sum(parameter.nbytes for parameter in group["params"])
    return Memory(
        weights=weights,
        gradients=gradients,
        main_weights=mains if config.perf.bf16 else 0,
    )
