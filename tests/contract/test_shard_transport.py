"""Weights from shard to shard between real ranks, bit for bit those of gather and broadcast.

The trainer's ranks are processes with Megatron's models. What the rank of an engine on their GPU
would get is read from the handle; the ranks of an engine elsewhere are processes of their own.
"""

from __future__ import annotations

import base64
import itertools
import json
import pickle
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from common.attempt import attempt_secret
from rlpost.config.plan.shard_plan import ShardPlan, plan_shards
from rlpost.config.plan.shard_roles import BoxesByRank, rank_plans, receiver_plans
from rlpost.config.tree import Config
from rlpost.models.regions import Box, Region, grouped
from rlpost.trainer.weights.exporter import Exporter
from rlpost.trainer.weights.low_rank import ADAPTER_B
from rlpost.trainer.weights.quantise import BlockFp8
from rlpost.trainer.weights.shard_sources import ShardSources
from rlpost.trainer.weights.shard_transport import ShardTransport
from tests.contract.actor_ranks import run_ranks, start_context
from tests.contract.families import LATENT_MTP, make_family
from tests.contract.layouts import LAYOUTS, ep, pp, tp
from tests.contract.test_shard_plan import engine_ranks
from tests.ports import free_ports
from tests.settings import rank_config

pytestmark = pytest.mark.timeout(600)
BUCKET_BYTES = 40_000
BLOCK = (16, 16)
TIMEOUT_S = 90.0
NAME = "shards"


def transport_of(actor: Any, quantisation: BlockFp8 | None) -> ShardTransport:
    from rlpost.trainer import parallel
    from rlpost.trainer.weights.engine_group import TrainerRank

    sources = ShardSources(actor.inventory, quantisation, gathers=parallel.holds_first_copy())
    return ShardTransport(
        sources,
        rank=TrainerRank(dist.get_rank(), dist.get_world_size()),
        backend="gloo",
        timeout_s=TIMEOUT_S,
        secret=attempt_secret(),
    )


def plan_of(
    transport: ShardTransport, num_engine_ranks: int, beside: Mapping[int, int]
) -> tuple[ShardPlan, list[list[Region]]]:
    """The same plan on every rank; it also takes this rank's part into use."""
    described: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(described, transport.describe())
    units = described[0][0]
    needs = engine_ranks(units, num_engine_ranks)
    plan = plan_shards(
        units,
        [one[1] for one in described],
        list(map(grouped, needs)),
        max_bytes=BUCKET_BYTES,
        beside=beside,
    )
    rank = dist.get_rank()
    transport.use(rank_plans(plan, [one[2] for one in described])[rank])
    return plan, needs


def placed(
    flat: torch.Tensor,
    boxes: Sequence[Box],
    dtypes: Mapping[str, torch.dtype],
    into: dict[str, Any],
) -> None:
    """Copy the boxes of a message to where they belong in tensors of bytes for each element."""
    start = 0
    for box in boxes:
        stop = start + box.num_elements * dtypes[box.tensor].itemsize
        at = tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))
        values = flat[start:stop].view(-1, dtypes[box.tensor].itemsize)
        target = into[box.tensor][at]
        target.copy_(values.view(*box.size, -1))
        start = stop
    assert start == flat.numel()


def element_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """[...] -> [..., bytes of an element]."""
    flat = tensor.contiguous().view(-1)
    return flat.view(torch.uint8).view(*tensor.shape, tensor.itemsize)


def fill_adapters(actor: Any) -> None:
    """Give the factor B of every adapter, which is zero at first, values that its name decides."""
    for chunk in actor.chunks:
        for name, parameter in chunk.named_parameters():
            if name.endswith(ADAPTER_B):
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator))


def share_merged_adapters(actor: Any) -> tuple[int, list[str]]:
    """Like ``share_and_compare`` with adapters; also return the tensors that they change."""
    actor.import_weights()
    base = {name: one.clone() for name, one in gathered(actor, None).items()}
    fill_adapters(actor)
    count, _ = share_and_compare(actor, imports=False)
    merged = gathered(actor, None)
    return count, [name for name, one in merged.items() if not torch.equal(one, base[name])]


def gathered(actor: Any, quantisation: BlockFp8 | None) -> dict[str, torch.Tensor]:
    """All tensors as gather and broadcast would send them, by name."""
    exporter = Exporter(actor.inventory)
    full: dict[str, torch.Tensor] = {}
    for bucket in exporter.plan(10**9, quantisation=quantisation):
        full |= exporter.gather(bucket, quantisation=quantisation)
    return full


def share_and_compare(
    actor: Any, quantised: Sequence[str] = (), *, imports: bool = True
) -> tuple[int, int]:
    """Exchange all weights twice for an engine on these GPUs; compare them with ``gather``.

    Returns the number of buckets, and of tensors that this rank helped to gather.
    """
    if imports:
        actor.import_weights()
    fp8 = BlockFp8(frozenset(quantised), BLOCK) if quantised else None
    transport = transport_of(actor, fp8)
    rank, world = dist.get_rank(), dist.get_world_size()
    plan, needs = plan_of(transport, world, {each: each for each in range(world)})
    full = gathered(actor, fp8)
    dtypes = {name: tensor.dtype for name, tensor in full.items()}
    for _ in range(2):
        received = {name: torch.zeros_like(element_bytes(one)) for name, one in full.items()}
        for index, messages in enumerate(receiver_plans(plan, world)[rank]):
            handle = transport.share(index, {"bucket": index})
            ((text, flat),) = pickle.loads(base64.b64decode(handle))
            assert json.loads(text) == {"bucket": index}
            ((_, boxes),) = messages
            placed(flat, boxes, dtypes, received)
        for region in needs[rank]:
            at = tuple(slice(a, a + n) for a, n in zip(region.start, region.size, strict=True))
            ours, theirs = received[region.tensor][at], element_bytes(full[region.tensor])[at]
            assert torch.equal(ours, theirs), region
    transport.release()
    return len(plan.buckets), len(transport.sources.gathered)


def settings(folder: Path, model: str, **values: Any) -> Config:
    make_family(folder, model)
    return rank_config(folder, update_weight_buffer_size=BUCKET_BYTES, **values)


@pytest.mark.parametrize("name", ["tp2-sp-pp2-tied", "moe-tp2-sp-ep2-pp2", "mtp-latent-tp2-sp-ep2"])
def test_engines_on_the_trainers_gpus_get_what_gather_gives(name, tmp_path):
    layout = next(one for one in LAYOUTS if one.name == name)
    config = settings(tmp_path, layout.model, **layout.settings)
    outcomes = run_ranks(share_and_compare, layout.num_ranks, config)
    assert outcomes[0][0] > 3


def test_experts_whose_elements_are_moved_singly_are_computed(tmp_path):
    """In gpt-oss gate and up alternate, and one tensor has all experts."""
    config = settings(tmp_path, "gpt-oss-moe", **(tp(2) | ep(2, 1)))
    run_ranks(share_and_compare, 2, config)


def test_fp8_values_and_scales_are_those_of_the_full_tensors(tmp_path):
    """Some shards are whole blocks, which ranks quantise alone; others are gathered."""
    config = settings(tmp_path, LATENT_MTP, **(tp(2) | pp(2) | ep(2, 1)))
    quantised = [
        f"model.layers.{layer}.{name}.weight"
        for layer in range(5)
        for name in (
            *("self_attn.o_proj", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa"),
            *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
            *(f"mlp.experts.{expert}.down_proj" for expert in range(8)),
        )
    ]
    outcomes = run_ranks(share_and_compare, 4, config, quantised=quantised)
    assert all(gathered for _, gathered in outcomes)


def test_engines_get_the_weights_with_the_adapters_merged(tmp_path):
    config = settings(tmp_path, "qwen3", lora_rank=2, **tp(2))
    for count, changed in run_ranks(share_merged_adapters, 2, config):
        assert count > 1
        assert {"q_proj", "o_proj", "gate_proj", "down_proj"} <= {n.split(".")[-2] for n in changed}


def send_twice(
    actor: Any, ports: Sequence[int], num_engine_ranks: int, results: Sequence[Any]
) -> None:
    """Send all weights to the ranks of an engine elsewhere, over two groups."""
    actor.import_weights()
    transport = transport_of(actor, None)
    plan, needs = plan_of(transport, num_engine_ranks, {})
    dtypes = {one.name: one.dtype for unit in transport.sources.units for one in unit.tensors}
    if dist.get_rank() == 0:
        for rank in range(num_engine_ranks):
            results[rank].put((receiver_plans(plan, num_engine_ranks)[rank], needs[rank], dtypes))
    for connection, port in enumerate(ports):
        transport.connect("127.0.0.1", port, num_engine_ranks, f"{NAME}-{connection}", TIMEOUT_S)
        transport.meet(TIMEOUT_S)
        for index in range(len(plan.buckets)):
            transport.pack(index)
            transport.send(index)
        transport.disconnect()


def receive_twice(rank: int, world: int, ports: Sequence[int], given: Any, answers: Any) -> None:
    """A rank of an engine: receive what the plan says and answer with the tensors."""
    from common.torch_store import replace_rendezvous
    from tests.contract.test_actor_sync import join_as

    replace_rendezvous(attempt_secret())
    buckets, regions, dtypes = given.get(timeout=120)
    shapes: dict[str, list[int]] = {}
    for region in regions:
        edges = [a + n for a, n in zip(region.start, region.size, strict=True)]
        before = shapes.get(region.tensor, [0] * len(edges))
        shapes[region.tensor] = [max(pair) for pair in zip(before, edges, strict=True)]
    types = {name: getattr(torch, dtypes[name]) for name in shapes}
    for connection, port in enumerate(ports):
        name = f"{NAME}-{connection}"
        group = join_as(port, name, rank=rank, world_size=world, joined_as=name)
        dist.all_reduce(torch.zeros(1), group=group)
        found = {
            name: torch.zeros(*shape, types[name].itemsize, dtype=torch.uint8)
            for name, shape in shapes.items()
        }
        for messages in buckets:
            receive(messages, types, found, group)
        dist.destroy_process_group(group)
        answers.put({name: tensor.numpy() for name, tensor in found.items()})


def receive(
    messages: BoxesByRank, types: Mapping[str, torch.dtype], into: dict[str, Any], group: Any
) -> None:
    flats = []
    for _, boxes in messages:
        size = sum(box.num_elements * types[box.tensor].itemsize for box in boxes)
        flats.append(torch.empty(size, dtype=torch.uint8))
    operations = [
        dist.P2POp(dist.irecv, flat, group=group, group_peer=sender)
        for (sender, _), flat in zip(messages, flats, strict=True)
    ]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    for (_, boxes), flat in zip(messages, flats, strict=True):
        placed(flat, boxes, types, into)


def test_engine_ranks_elsewhere_get_the_slices_of_the_checkpoint(tmp_path):
    """Two stages of two tensor-parallel ranks send to two ranks, which then connect once more."""
    from tests.contract.families import load_folder

    num_trainer_ranks, num_engine_ranks, ports = 4, 2, free_ports(2)
    config = settings(tmp_path, "qwen3", **(tp(2) | pp(2)))
    context = start_context()
    with context.Manager() as manager:
        given = [manager.Queue() for _ in range(num_engine_ranks)]
        answers = [manager.Queue() for _ in range(num_engine_ranks)]
        world = num_trainer_ranks + num_engine_ranks
        processes = [
            context.Process(
                target=receive_twice,
                args=(num_trainer_ranks + rank, world, ports, given[rank], answers[rank]),
                daemon=True,
            )
            for rank in range(num_engine_ranks)
        ]
        for process in processes:
            process.start()
        try:
            run_ranks(
                send_twice,
                num_trainer_ranks,
                config,
                ports=ports,
                num_engine_ranks=num_engine_ranks,
                results=given,
            )
            found = [[queue.get(timeout=60) for _ in range(2)] for queue in answers]
        finally:
            for process in processes:
                process.kill()
                process.join()
    original = load_folder(tmp_path)
    for of_rank in itertools.chain.from_iterable(found):
        for name, values in of_rank.items():
            whole = element_bytes(original[name])
            at = tuple(slice(0, length) for length in values.shape[:-1])
            filled = torch.from_numpy(values) != 0
            assert torch.equal(torch.from_numpy(values)[filled], whole[at][filled])
            assert filled.any()
