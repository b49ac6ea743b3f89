"""Ranks that hold shards of a small mixture of experts as plain modules and gather it in FP8."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlpost.models.families import family
from rlpost.models.names import Dimensions, to_hugging_face
from rlpost.trainer.weights import exporter as exporter_code
from rlpost.trainer.weights import folder_export, layouts, whole_tensors
from rlpost.trainer.weights.exporter import Exporter
from rlpost.trainer.weights.inventory import Groups, Inventory
from rlpost.trainer.weights.quantise import BlockFp8

WORLD = 2
DIMS = Dimensions(num_query_groups=2, head_dim=128, vocab_size=256, num_experts=4)
RULES = family("Qwen3MoeForCausalLM").rules
HIDDEN, FFN = 256, 320

SHAPES = {
    "embedding.word_embeddings.weight": (256, HIDDEN),
    "decoder.layers.0.self_attention.linear_qkv.weight": (2 * (2 + 2) * 128, HIDDEN),
    "decoder.layers.0.self_attention.linear_proj.weight": (HIDDEN, 512),
    # 320 / 2 ranks is no multiple of 128: a shard ends within a block
    "decoder.layers.0.mlp.linear_fc1.weight": (2 * FFN, HIDDEN),
    "decoder.layers.0.mlp.linear_fc2.weight": (HIDDEN, FFN),
    "decoder.layers.1.mlp.router.weight": (4, HIDDEN),
    **{
        f"decoder.layers.1.mlp.experts.local_experts.{e}.linear_fc1.weight": (2 * 192, HIDDEN)
        for e in range(4)
    },
    **{
        f"decoder.layers.1.mlp.experts.local_experts.{e}.linear_fc2.weight": (HIDDEN, 192)
        for e in range(4)
    },
    "decoder.final_layernorm.weight": (HIDDEN,),
    "output_layer.weight": (256, HIDDEN),
}
CUT = {
    "linear_qkv": 0,
    "linear_proj": 1,
    "linear_fc1": 0,
    "linear_fc2": 1,
    "word_embeddings": 0,
    "output_layer": 0,
}
UNQUANTISED = ("embed_tokens", "lm_head", "norm", "mlp.gate.weight")


@dataclass(frozen=True)
class Case:
    """How two ranks share the model."""

    name: str
    tensor: int = 1
    expert: int = 1
    pipeline: int = 1
    only_first: bool = False
    """Whether the second rank wants nothing, as one that is not the source of a broadcast."""


def full(name: str) -> torch.Tensor:
    """A Megatron tensor of the whole model, the same in every process."""
    generator = torch.Generator().manual_seed(list(SHAPES).index(name))
    return (torch.randn(SHAPES[name], generator=generator) * 0.02).to(torch.bfloat16)


def hugging_face() -> dict[str, torch.Tensor]:
    """All full tensors by their Hugging Face names."""
    tensors: dict[str, torch.Tensor] = {}
    for name in SHAPES:
        rule = to_hugging_face(name, RULES)
        tensors |= dict(
            zip(rule.hugging_face, layouts.split(full(name), rule.layout, DIMS), strict=True)
        )
    return tensors


def quantisation() -> BlockFp8:
    names = [name for name in hugging_face() if not any(part in name for part in UNQUANTISED)]
    return BlockFp8(frozenset(names))


def stage_of(name: str, case: Case) -> int:
    late = name.startswith(("decoder.layers.1", "decoder.final", "output"))
    return case.pipeline - 1 if late else 0


def model(rank: int, case: Case) -> torch.nn.Module:
    """The weights of a rank, with experts, other matrices and layers sharded over the ranks."""
    made = torch.nn.Module()
    for name in SHAPES:
        expert = ".local_experts." in name
        if case.pipeline > 1 and stage_of(name, case) != rank:
            continue
        local, tensor = name, full(name)
        if expert and case.expert > 1:
            number = int(name.split(".local_experts.")[1].split(".")[0])
            if number // 2 != rank:
                continue
            local = name.replace(f".local_experts.{number}.", f".local_experts.{number % 2}.")
        dims = [dim for key, dim in CUT.items() if f".{key}." in f".{name}"]
        is_sharded = bool(dims) and case.tensor > 1 and not expert
        if is_sharded:
            rule = to_hugging_face(name, RULES)
            tensor = layouts.shard(tensor, rule.layout, dim=dims[0], rank=rank, size=case.tensor)
        _register(made, local, tensor, dims[0] if is_sharded else None)
    for number, layer in made.get_submodule("decoder.layers").named_children():
        layer.layer_number = int(number) + 1
    return made


def _register(root: torch.nn.Module, name: str, tensor: torch.Tensor, dim: int | None) -> None:
    *path, leaf = name.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, torch.nn.Module())
        root = getattr(root, part)
    parameter = torch.nn.Parameter(tensor.clone())
    if dim is not None:
        parameter.tensor_model_parallel, parameter.partition_dim = True, dim
    root.register_parameter(leaf, parameter)


def run(rank: int, port: int, cases: Sequence[Case], folder: Path, results: Any) -> None:
    """For each case gather everything in FP8; put what came, and the bytes that this rank gave to
    collectives. Then hash and export everything; ``folder`` is the template.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD
    )
    everyone, alone = dist.group.WORLD, [dist.new_group([one]) for one in range(WORLD)][rank]
    pick = lambda size: everyone if size > 1 else alone  # noqa: E731
    given, blocks = count_bytes(), quantisation()
    for case in cases:
        groups = Groups(pick(case.tensor), alone, pick(case.expert), pick(case.pipeline))
        chunks = [model(rank, case)]
        inventory = Inventory(
            chunks, family=family("Qwen3MoeForCausalLM"), dims=DIMS, groups=groups, tied=False
        )
        exporter = Exporter(inventory)
        given.update(all_gather=0, broadcast=0, quantised=0)
        found: dict[str, Any] = {}
        wanted = not (case.only_first and rank)
        for bucket in exporter.plan(10**9, quantisation=blocks):
            tensors = exporter.gather(bucket, quantisation=blocks, gets_tensors=wanted)
            found |= {
                name: (str(t.dtype), t.contiguous().view(torch.uint8).numpy())
                for name, t in tensors.items()
            }
        given_here: dict[str, Any] = dict(given)
        with recorded_digests() as hashed:
            given["received"] = 0
            given_here["hash"] = whole_tensors.weights_hash(inventory, max_bytes=10**5)
            given_here["received for the hash"] = given["received"]
        target = folder / case.name
        with recorded_files() as wrote:
            given["received"] = 0
            folder_export.export_folder(
                exporter, target, template=folder, shard_bytes=10**6, bucket_bytes=10**5
            )
            given_here["received for files"] = given["received"]
        given_here |= {"hashed": hashed, "folder": str(target), "wrote": wrote}
        given_here["plan"] = [
            [name for entry in bucket for name in entry.hugging_face]
            for bucket in exporter.plan(10**6)
        ]
        results.put((case.name, rank, found, given_here))
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def recorded_files() -> Iterator[list[str]]:
    """Record the files that this rank writes."""
    names: list[str] = []
    file_class = folder_export.TensorFile

    def recorded(path: Path, tensors: Any) -> Any:
        names.append(path.name)
        return file_class(path, tensors)

    folder_export.TensorFile = recorded
    try:
        yield names
    finally:
        folder_export.TensorFile = file_class


@contextmanager
def recorded_digests() -> Iterator[list[str]]:
    """Record the tensors that this rank hashes."""
    names: list[str] = []
    digest = whole_tensors._digest

    def recorded(name: str, tensor: torch.Tensor) -> str:
        names.append(name)
        return digest(name, tensor)

    whole_tensors._digest = recorded
    try:
        yield names
    finally:
        whole_tensors._digest = digest


def count_bytes() -> dict[str, int]:
    """From now on: what this rank gives to gathers and broadcasts, how many elements it quantises,
    and what it receives in exchanges.
    """
    given = {"all_gather": 0, "broadcast": 0, "quantised": 0, "received": 0}
    quantise = exporter_code.quantise

    def counted_quantise(weight: torch.Tensor, block: tuple[int, int], **rule: Any) -> Any:
        given["quantised"] += weight.numel()
        return quantise(weight, block, **rule)

    exporter_code.quantise = counted_quantise
    all_gather, broadcast = dist.all_gather, dist.broadcast

    def counted_gather(outputs: Any, tensor: torch.Tensor, **how: Any) -> Any:
        given["all_gather"] += tensor.nbytes
        return all_gather(outputs, tensor, **how)

    def counted_broadcast(tensor: torch.Tensor, **how: Any) -> Any:
        given["broadcast"] += tensor.nbytes
        return broadcast(tensor, **how)

    p2p_operation = dist.P2POp

    def counted_operation(act: Any, tensor: torch.Tensor, **how: Any) -> Any:
        given["received"] += tensor.nbytes * (act is dist.irecv)
        return p2p_operation(act, tensor, **how)

    dist.all_gather, dist.broadcast, dist.P2POp = (
        counted_gather,
        counted_broadcast,
        counted_operation,
    )
    return given
