"""Weights from shard to shard, for all families and layouts: every element arrives where it belongs.

Every rank of a layout is built on the meta device with the code of a run, and its shards are filled
with numbers that say which element of which tensor they are, by ``merge`` and ``shard``. What the
engines get by the plan is compared with the tensors that the numbers came from.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from rlpost.config.plan.shard_plan import SentTensor, ShardPlan, Unit, plan_shards
from rlpost.config.tree import Config
from rlpost.extensions.rehearsal.all_ranks.meta import as_rank, building
from rlpost.models.regions import Box, Region, grouped, whole, whole_box
from rlpost.trainer import parallel
from rlpost.trainer.model import build_model, inventory_of
from rlpost.trainer.model_description import description_of
from rlpost.trainer.weights import layouts
from rlpost.trainer.weights.inventory import Entry, Held, Inventory, in_order
from rlpost.trainer.weights.quantise import BlockFp8
from rlpost.trainer.weights.shard_sources import ShardSources
from tests.contract.families import (
    FAMILIES,
    LATENT_MTP,
    MTP,
    WITH_IMAGES,
    WITH_TENSOR_PARALLEL,
    make_family_config,
)
from tests.contract.layouts import LAYOUTS, ep, pp, tp
from tests.settings import rank_config

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.is_available(), reason="run with CUDA_VISIBLE_DEVICES= (empty)"),
    pytest.mark.filterwarnings("ignore"),  # Megatron repeats its warnings for every rank
]
BUCKET_BYTES = 40_000
BALANCE = 1.05


@dataclass
class Trainer:
    """All ranks of a layout."""

    units: list[Unit]
    ranks: list[ShardSources]
    full: dict[str, torch.Tensor]
    """Every Hugging Face tensor; an element is a number that no other element has."""


def build(config: Config, quantised: Sequence[str] | None = None) -> Trainer:
    """Build all ranks, one after another; with ``quantised`` without the numbers."""
    description, world = description_of(config), config.actor_world_size
    num_stages = description.num_virtual_stages(config)
    stages: dict[int, Sequence[Entry]] = {}
    inventories: list[Inventory] = []
    gathers: list[bool] = []
    for rank in range(world):
        with as_rank(rank, world, config, num_virtual_stages=num_stages):
            with building():
                chunks = build_model(description, config)
            inventory = inventory_of(chunks, description, gather=lambda mine, group: [mine])
            stages[inventory.groups.pipeline.rank()] = inventory.entries
            inventories.append(inventory)
            gathers.append(parallel.holds_first_copy())
    entries = in_order(list(stages.values()))
    shapes = {
        name: shape
        for entry in entries
        for name, shape in zip(entry.hugging_face, entry.shapes, strict=True)
    }
    full, start = {}, 0
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        full[name] = torch.arange(start, start + count).view(shape)
        start += count
    for inventory in inventories:
        inventory.entries = entries
        if quantised is None:
            inventory.held = {
                key: filled(held, full, inventory) for key, held in inventory.held.items()
            }
    fp8 = None if quantised is None else BlockFp8(frozenset(quantised), (16, 16))
    sources = [
        ShardSources(inventory, fp8, gathers=takes_part)
        for inventory, takes_part in zip(inventories, gathers, strict=True)
    ]
    return Trainer(list(sources[0].units), sources, full)


def filled(held: Held, full: dict[str, torch.Tensor], inventory: Inventory) -> Held:
    """The shard as an import fills it (``rlpost.trainer.weights.importer``)."""
    parts = [full[name] for name in held.rule.hugging_face]
    if held.rule.is_stacked:
        parts = [
            part[int(held.rule.megatron.split(".local_experts.")[1].split(".")[0])]
            for part in parts
        ]
    value = layouts.merge(parts, held.rule.layout, inventory.dims)
    if held.dim is not None:
        rank, size = held.group.rank(), held.group.size()
        value = layouts.shard(value, held.rule.layout, dim=held.dim, rank=rank, size=size)
    assert value.shape == held.tensor.shape
    return replace(held, tensor=value)


def engine_ranks(units: Sequence[Unit], size: int) -> list[list[Region]]:
    """What the ranks of an engine need: shards of most tensors, all of some, experts of a rank alone.

    Which of these is drawn for each tensor, so that every kind meets every layout.
    """
    chance = random.Random(size)
    needs: list[list[Region]] = [[] for _ in range(size)]
    for unit in units:
        for tensor in unit.tensors:
            kind = chance.choice(["rows", "columns", "copies", "by name", "one rank"])
            dim = {"rows": 0, "columns": len(tensor.shape) - 1}.get(kind)
            for rank in range(size):
                region = whole(tensor.name, tensor.shape)
                if kind != "by name":
                    region = replace(region, parameter="own")
                if kind == "one rank" and rank:
                    continue
                if dim is not None and tensor.shape and tensor.shape[dim] >= size:
                    region = region.narrow(part_of(tensor, dim, rank, size))
                needs[rank].append(region)
    return needs


def part_of(tensor: SentTensor, dim: int, rank: int, size: int) -> Box:
    """The part of a rank; the last rank has the remainder, as of a padded vocabulary."""
    box = whole_box(tensor.name, tensor.shape)
    length = -(-tensor.shape[dim] // size)
    start, sizes = list(box.start), list(box.size)
    start[dim] = min(rank * length, tensor.shape[dim] - 1)
    sizes[dim] = min(length, tensor.shape[dim] - start[dim])
    return Box(tensor.name, tuple(start), tuple(sizes))


def numpy_box(box: Box) -> tuple[slice, ...]:
    return tuple(
        slice(start, start + size) for start, size in zip(box.start, box.size, strict=True)
    )


def check(plan: ShardPlan, trainer: Trainer, needs: Sequence[Sequence[Region]]) -> None:
    """Move all bytes and compare them; nothing may arrive twice."""
    received = [
        {name: torch.full_like(one, -1) for name, one in trainer.full.items()} for _ in needs
    ]
    first_bucket: dict[tuple[int, str], int] = {}
    by_name = {region.tensor for of_rank in needs for region in of_rank if not region.parameter}
    for index, bucket in enumerate(plan.buckets):
        names = {box.tensor: None for message in bucket for box in message.boxes}
        for rank in trainer.ranks:
            rank.prepare(list(names))
        for message in bucket:
            sizes = [plan.element_bytes[box.tensor] for box in message.boxes]
            assert sizes == sorted(sizes, reverse=True), "else views of the bytes are not aligned"
            for box in message.boxes:
                target = received[message.receiver][box.tensor][numpy_box(box)]
                assert (target == -1).all(), f"{box} arrives twice"
                target.copy_(trainer.ranks[message.sender].read(box))
                if box.tensor in by_name:
                    first = first_bucket.setdefault((message.receiver, box.tensor), index)
                    assert first == index, "a tensor that is loaded by name is in one bucket"
    for of_rank, regions in zip(received, needs, strict=True):
        needed = {name: torch.full_like(one, -1) for name, one in trainer.full.items()}
        for region in regions:
            at = numpy_box(region.box)
            needed[region.tensor][at] = trainer.full[region.tensor][at]
        assert all(torch.equal(of_rank[name], needed[name]) for name in needed)


def least_busiest(trainer: Trainer, needs: Sequence[Sequence[Region]]) -> float:
    """Bytes of the busiest sender if the senders of each element could share it at will.

    A linear program over the sets of ranks that hold the same elements.
    """
    sizes: Counter[frozenset[int]] = Counter()
    element = {one.name: one.element_bytes for unit in trainer.units for one in unit.tensors}
    holders: dict[str, torch.Tensor] = {}
    for name, tensor in trainer.full.items():
        holders[name] = torch.zeros(tensor.shape, dtype=torch.int64)
    for rank, source in enumerate(trainer.ranks):
        for region in source.regions:
            holders[region.tensor][numpy_box(region.box)] |= 1 << rank
    for of_rank in needs:
        for region in of_rank:
            masks, counts = holders[region.tensor][numpy_box(region.box)].unique(return_counts=True)
            for mask, count in zip(masks.tolist(), counts.tolist(), strict=True):
                ranks = frozenset(rank for rank in range(len(trainer.ranks)) if mask >> rank & 1)
                sizes[ranks] += count * element[region.tensor]
    shares = [(held, rank) for held in sizes for rank in held]
    cost = np.zeros(len(shares) + 1)
    cost[-1] = 1  # the busiest
    whole_sets = np.array([[held == group for held, _ in shares] + [0] for group in sizes], float)
    loads = np.array(
        [[sender == rank for _, sender in shares] + [-1] for rank in range(len(trainer.ranks))],
        float,
    )
    found = linprog(
        cost, A_eq=whole_sets, b_eq=list(sizes.values()), A_ub=loads, b_ub=np.zeros(len(loads))
    )
    return float(found.x[-1])


def config_of(folder: Path, model: str, world: int, **settings: Any) -> Config:
    make_family_config(folder, model)
    return rank_config(
        folder,
        actor_num_nodes=1,
        num_gpus_per_node=world,
        actor_num_gpus_per_node=world,
        **settings,
    )


def check_layout(config: Config) -> None:
    trainer = build(config)
    needs = [rank for size in (2, 4) for rank in engine_ranks(trainer.units, size)]
    sources = [grouped(rank.regions) for rank in trainer.ranks]
    plan = plan_shards(trainer.units, sources, list(map(grouped, needs)), max_bytes=BUCKET_BYTES)
    check(plan, trainer, needs)
    ideal = least_busiest(trainer, needs)
    assert max(plan.sent.values()) <= BALANCE * ideal
    assert plan.received == {
        rank: sum(region.num_elements * plan.element_bytes[region.tensor] for region in regions)
        for rank, regions in enumerate(needs)
    }
    largest = max(sum(tensor.num_bytes for tensor in unit.tensors) for unit in trainer.units)
    assert plan.largest_bytes <= max(BUCKET_BYTES, largest * len(needs))


WAYS = {layout.name: layout for layout in LAYOUTS}
"""One layout of each way to shard: passes and optimizers do not matter here."""
CHOSEN = (
    "tp2", "pp2-uneven", "pp2-tied", "pp2-vpp2", "dp2", "tp2-sp-pp2-tied", "tp2-sp-dp2-recompute",
    "moe-ep2-dp4", "moe-tp2-sp-ep2-pp2", "moe-tp2-sp-ep2-etp2", "moe-pp4", "latent-cp2-ep2",
    "mtp-pp2-vpp2", "mtp-latent-tp2-sp-ep2", "gemma-cp2-pp2-uneven",
)  # fmt: skip


@pytest.mark.parametrize("name", CHOSEN)
def test_every_element_arrives_once_at_every_layout(name, tmp_path):
    layout = WAYS[name]
    check_layout(config_of(tmp_path, layout.model, layout.num_ranks, **layout.settings))


@pytest.mark.parametrize("model", [*FAMILIES, *WITH_IMAGES, MTP, LATENT_MTP])
def test_every_element_of_a_family_arrives_once(model, tmp_path):
    """Tensor, pipeline and expert parallelism together, and two replicas of the dense weights."""
    parallel_sizes = tp(2) | pp(2)
    if "moe" in model:
        parallel_sizes |= ep(2, 1) | WITH_TENSOR_PARALLEL.get(model, {})
    check_layout(config_of(tmp_path, model, 8, **parallel_sizes))
