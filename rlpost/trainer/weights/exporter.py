"""Export the Megatron model as Hugging Face tensors in buckets, into a folder or a hash.

Input: the inventory of this rank. Output: full tensors under Hugging Face names, at every layout.
The plan depends only on shapes and is the same on every rank; data is gathered one bucket at a
time. Invariant: import and export are bitwise inverses.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from common.files import sync
from rlpost.config.plan.weight_update import Travelling, deal
from rlpost.models.names import LOADED_TOGETHER
from rlpost.trainer.weights import layouts
from rlpost.trainer.weights.hf_folder import clean_config, copy_files, exported_files
from rlpost.trainer.weights.importer import HuggingFaceFolder, extra_layers, shared_tensors
from rlpost.trainer.weights.inventory import Entry, Held, Inventory, all_gather
from rlpost.trainer.weights.layouts import as_bytes, num_bytes, pack, unpack
from rlpost.trainer.weights.quantise import FP8, SUFFIX, BlockFp8, quantise, scale_shape
from rlpost.trainer.weights.safetensors_files import INDEX, SINGLE
from rlpost.types import Bucket

logger = logging.getLogger(__name__)

T = TypeVar("T")

SHARD_BYTES = 5 * 10**9  # default file size of save_pretrained


def _joins(entries: Sequence[Entry]) -> list[bool]:
    """For each entry, whether it must be in the bucket of the one before it."""
    found = [entry.rules[0].megatron for entry in entries]
    first, second = LOADED_TOGETHER
    pairs = zip(["", *found], found, strict=False)
    return [name.endswith(second) and before.endswith(first) for before, name in pairs]


class Exporter:
    """The full tensors of the model, bucket by bucket."""

    def __init__(self, inventory: Inventory) -> None:
        """Create an exporter; all ranks of a model replica must call ``gather`` together."""
        self.inventory = inventory

    def plan(
        self, max_bytes: int, *, quantisation: BlockFp8 | None = None
    ) -> tuple[tuple[Entry, ...], ...]:
        """All weights, by pipeline stage, in buckets of at most ``max_bytes``.

        A larger weight is alone in its bucket. The weights of a bucket are of one stage;
        ``names.LOADED_TOGETHER`` are in one bucket. With ``quantisation`` bytes are counted in FP8.
        """
        entries = self.inventory.entries
        weights = [
            Travelling(entry.owner, sent_bytes(entry, quantisation), joins)
            for entry, joins in zip(entries, _joins(entries), strict=True)
        ]
        buckets = []
        for bucket in deal(weights, max_bytes):
            buckets.append(tuple(entries[index] for index in bucket))
        return tuple(buckets)

    @torch.no_grad()
    def gather(
        self,
        bucket: tuple[Entry, ...],
        *,
        on_all_stages: bool = True,
        quantisation: BlockFp8 | None = None,
        gets_tensors: bool = True,
    ) -> dict[str, torch.Tensor]:
        """Full Hugging Face tensors of a bucket, on the device. Collective.

        Args:
            bucket: from ``plan``.
            on_all_stages: without it only the bucket's pipeline stage calls and gets the tensors.
            quantisation: quantises the tensors.
            gets_tensors: false for a rank that takes part for others; it gets no tensors.
        """
        tensors: dict[str, torch.Tensor] = {}
        for entry in bucket:
            if quantisation is not None and quantisation.names >= set(entry.hugging_face):
                tensors |= gather_quantised(
                    self.inventory,
                    entry,
                    quantisation,
                    on_all_stages=on_all_stages,
                    gets_tensors=gets_tensors,
                )
            elif entry.is_stacked:
                stacked = self._stacked(entry, on_all_stages)
                if gets_tensors:
                    tensors[entry.hugging_face[0]] = stacked
            else:
                fulls = self._full(entry, on_all_stages)
                if gets_tensors:
                    tensors |= self._split(entry, fulls, quantisation)
        return tensors

    def _split(
        self, entry: Entry, fulls: Sequence[torch.Tensor], quantisation: BlockFp8 | None
    ) -> dict[str, torch.Tensor]:
        """Return the Hugging Face tensors of an entry's full Megatron tensors."""
        tensors: dict[str, torch.Tensor] = {}
        for rule, full in zip(entry.rules, fulls, strict=True):
            parts = layouts.split(full, rule.layout, self.inventory.dims)
            for name, part in zip(rule.hugging_face, parts, strict=True):
                tensors |= (
                    {name: part} if quantisation is None else quantisation.tensors(name, part)
                )
        return tensors

    def _stacked(self, entry: Entry, on_all_stages: bool) -> torch.Tensor:
        """Gather the Hugging Face tensor that holds a weight of all experts.

        The experts of this rank are stacked, then gathered from the expert-parallel ranks, then
        sent to the other stages.
        """
        groups, layout = self.inventory.groups, entry.rules[0].layout
        if held := self.inventory.parts(entry):
            parts = [
                layouts.split(one.tensor.detach(), layout, self.inventory.dims)[0] for one in held
            ]
            stacked = torch.cat(all_gather(torch.stack(parts), groups.expert))
        else:
            stacked = torch.empty(entry.shapes[0], dtype=entry.dtype, device=self.inventory.device)
        if groups.pipeline.size() > 1 and on_all_stages:
            dist.broadcast(stacked, group=groups.pipeline, group_src=entry.owner)
        return stacked

    def _full(self, entry: Entry, on_all_stages: bool) -> Sequence[torch.Tensor]:
        """Full Megatron tensors of an entry.

        Gathers from the tensor-parallel ranks of its stage, then from the expert-parallel ranks,
        then broadcasts to the other stages.
        """
        groups, held = self.inventory.groups, self.inventory.part(entry)
        if held is not None:
            local = held.value
            shards = [local] if held.dim is None else all_gather(local, held.group)
            full = layouts.join(shards, held.rule.layout, dim=held.dim or 0)
            fulls = [full] if len(entry.rules) == 1 else all_gather(full, groups.expert)
        if groups.pipeline.size() == 1 or not on_all_stages:
            return fulls
        if held is None:
            device = self.inventory.device
            fulls = [
                torch.empty(entry.full_shape, dtype=entry.dtype, device=device) for _ in entry.rules
            ]
        fulls = [full.contiguous() for full in fulls]
        for full in fulls:
            dist.broadcast(full, group=groups.pipeline, group_src=entry.owner)
        return fulls


def sent_tensors(
    entry: Entry, quantisation: BlockFp8 | None
) -> dict[str, tuple[tuple[int, ...], str]]:
    """The tensors that are sent for an entry: name -> (shape, torch's name of the dtype)."""
    dtype = str(entry.dtype).removeprefix("torch.")
    made: dict[str, tuple[tuple[int, ...], str]] = {}
    for name, shape in zip(entry.hugging_face, entry.shapes, strict=True):
        made.update(
            {name: (shape, dtype)}
            if quantisation is None
            else quantisation.shapes(name, shape, dtype)
        )
    return made


def sent_bytes(entry: Entry, quantisation: BlockFp8 | None) -> int:
    """Bytes of all tensors that are sent for an entry."""
    if quantisation is None:
        return entry.num_bytes
    made = sent_tensors(entry, quantisation).values()
    return sum(num_bytes(shape, getattr(torch, dtype)) for shape, dtype in made)


def describe(bucket: tuple[Entry, ...], quantisation: BlockFp8 | None = None) -> Bucket:
    """Names, shapes and dtypes of a bucket for the engine; larger elements first."""
    made: dict[str, tuple[tuple[int, ...], str]] = {}
    for entry in bucket:
        made.update(sent_tensors(entry, quantisation))
    # stable: equal sizes stay in order
    names = sorted(made, key=lambda name: -getattr(torch, made[name][1]).itemsize)
    shapes, dtypes = zip(*(made[name] for name in names), strict=True)
    return Bucket(tuple(names), shapes, dtypes, bucket[0].owner)


def weights_hash(exporter: Exporter, *, max_bytes: int) -> str:
    """SHA-256 over all Hugging Face tensors by name; the same at every layout. Collective.

    Each stage gathers its own tensors, and its ranks divide them: each is copied to the host and
    hashed by one rank. Every rank of the world must call it.
    """
    stage = exporter.inventory.groups.pipeline.rank()
    stages = gather_objects(stage)
    peers = [rank for rank, other in enumerate(stages) if other == stage]
    position = peers.index(dist.get_rank() if dist.is_initialized() else 0)
    count = 0
    own: dict[str, str] = {}
    for bucket in exporter.plan(max_bytes):
        if bucket[0].owner != stage:
            continue
        tensors = exporter.gather(bucket, on_all_stages=False)
        for name in list(tensors):
            tensor = tensors.pop(name)
            if count % len(peers) == position:
                own[name] = _digest(name, tensor)
            count += 1
    digests: dict[str, str] = {}
    for of_rank in gather_objects(own):
        digests |= of_rank
    return hashlib.sha256("".join(digests[name] for name in sorted(digests)).encode()).hexdigest()


def gather_objects(value: T) -> list[T]:
    """Gather one small object from each rank of the world. Collective."""
    if not dist.is_initialized():
        return [value]
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _digest(name: str, tensor: torch.Tensor) -> str:
    digest = hashlib.sha256(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    # a NumPy view would keep the weight's memory alive
    digest.update(as_bytes(tensor.to("cpu", copy=True)).numpy())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Share:
    """What a rank brings to an export. ``kept`` and ``repeated`` are those of the first rank."""

    stage: int
    host: str
    kept: tuple[str, ...] = ()
    repeated: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""


def export_folder(
    exporter: Exporter,
    folder: str | Path,
    *,
    template: str | Path,
    config: Mapping[str, object] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a Hugging Face folder as save_pretrained would.

    It has safetensors, configuration and tokenizer. Every rank of the world must call it, and all
    must see ``folder``. Each stage gathers its own tensors; one of its ranks on each host writes
    them, in turn, while the next are gathered. A writer has one file in host memory.

    Args:
        exporter: of this rank.
        folder: created if missing.
        template: the folder that the model came from. It gives configuration and tokenizer
            (``hf_folder``), and weights that are not trained.
        config: replaces the config.json of ``template``.
        shard_bytes: bound of a file.

    Raises:
        OSError: a rank could not read or write; raised on every rank.
    """
    folder, template = Path(folder), Path(template)
    plan, source = exporter.plan(shard_bytes), HuggingFaceFolder(template)
    rank = dist.get_rank() if dist.is_initialized() else 0
    shares = gather_objects(_share(exporter, source, reads=rank == 0))
    first, stage = shares[0], shares[rank].stage
    if first.problem:
        raise OSError(f"{folder}: {first.problem}")
    files = _Files(folder, len(plan) + bool(first.kept), first.repeated)
    if rank == 0:
        dtype = plan[0][0].dtype
        files.attempt(lambda: _write_configuration(template, folder, config=config, dtype=dtype))
    turns = itertools.cycle(writers_of(shares, stage))
    for number, bucket in enumerate(plan, start=1):
        if bucket[0].owner != stage:
            continue
        writes = next(turns) == rank
        tensors = exporter.gather(bucket, on_all_stages=False, gets_tensors=writes)
        if writes:
            files.write(number, tensors)
    if rank == 0 and first.kept:
        files.attempt(
            lambda: files.write(files.num_files, {name: source.read(name) for name in first.kept})
        )
    file_of: dict[str, str] = {}
    total = 0
    for names, num_bytes_written, problem in gather_objects(files.close()):
        if problem:
            raise OSError(f"{folder}: {problem}")
        file_of |= names
        total += num_bytes_written
    if files.num_files > 1 and rank == 0:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _share(exporter: Exporter, source: HuggingFaceFolder, *, reads: bool) -> _Share:
    """Return this rank's share; the rank that ``reads`` finds the tensors that are not gathered."""
    share = _Share(exporter.inventory.groups.pipeline.rank(), _host())
    if not reads:
        return share
    try:
        kept, repeated = _not_gathered(source, exporter.inventory)
    except (OSError, SafetensorError) as error:
        return replace(share, problem=str(error))
    return replace(share, kept=tuple(kept), repeated=repeated)


def _host() -> str:
    return socket.gethostname()


def writers_of(shares: Sequence[_Share], stage: int) -> list[int]:
    """Return the first rank of each host among the ranks of a stage."""
    first: dict[str, int] = {}
    for rank, share in enumerate(shares):
        if share.stage == stage:
            first.setdefault(share.host, rank)
    return list(first.values())


class _Files:
    """The files that this rank writes, one at a time in another thread.

    Failures are collected, not raised: the other ranks need this one in the next gather.
    """

    def __init__(self, folder: Path, num_files: int, repeated: Mapping[str, str]) -> None:
        """``repeated``: {name of a copy: name of the tensor that it equals}."""
        self.num_files = num_files
        self._folder, self._repeated = folder, repeated
        self._thread = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None
        self._file_of: dict[str, str] = {}
        self._total, self._problem = 0, ""

    def attempt(self, act: Callable[[], None]) -> None:
        """Call ``act``, unless something failed; keep its failure."""
        if self._problem:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            act()
        except (OSError, SafetensorError) as error:
            self._problem = str(error)

    def write(self, number: int, tensors: dict[str, torch.Tensor]) -> None:
        """Copy the tensors to the host, once the file before is written, and write them."""
        self.attempt(self._wait)
        if self._problem:
            return
        name = SINGLE
        if self.num_files > 1:
            name = f"model-{number:05d}-of-{self.num_files:05d}.safetensors"
        on_host = {key: tensor.cpu().contiguous() for key, tensor in tensors.items()}
        for copy, original in self._repeated.items():
            if original in tensors:
                on_host[copy] = on_host[original].clone()
        self._file_of.update(dict.fromkeys(on_host, name))
        self._total += sum(tensor.nbytes for tensor in on_host.values())
        self._pending = self._thread.submit(self._save, on_host, name)

    def _save(self, on_host: Mapping[str, torch.Tensor], name: str) -> None:
        save_tensors(on_host, self._folder, name)
        sync(self._folder / name)  # from this host: that of the driver cannot
        logger.info("%s: wrote %s of %d files", self._folder, name, self.num_files)

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> tuple[dict[str, str], int, str]:
        """Finish writing; return the file of each tensor, their bytes, and what failed."""
        self.attempt(self._wait)
        self._thread.shutdown()
        return self._file_of, self._total, self._problem


def _not_gathered(
    source: HuggingFaceFolder, inventory: Inventory
) -> tuple[list[str], dict[str, str]]:
    """Find the tensors of a folder that are not gathered from the model.

    A layer for multi-token prediction may contain copies of embedding and output layer. A copy that
    equals its original in ``source`` is exported with the trained values. If they differ, no engine
    uses the copy, and it is exported unchanged.

    Returns:
        Names of the tensors to copy from ``source``, and {name of a copy: name of its original}.
    """
    copies = shared_tensors(source, inventory)
    repeated = {
        copy: name
        for copy, name in copies.items()
        if torch.equal(source.read(copy), source.read(name))
    }
    return sorted({*extra_layers(source, inventory), *copies} - repeated.keys()), repeated


def save_tensors(tensors: Mapping[str, torch.Tensor], folder: Path, name: str) -> None:
    """Write a safetensors file atomically. Raises OSError or SafetensorError."""
    temporary = folder / f".{name}"
    on_host = {key: tensor.cpu().contiguous() for key, tensor in tensors.items()}
    save_file(on_host, temporary, metadata={"format": "pt"})
    os.replace(temporary, folder / name)


def _write_configuration(
    template: Path, folder: Path, *, config: Mapping[str, object] | None, dtype: torch.dtype
) -> None:
    if template.resolve() != folder.resolve():
        copy_files(exported_files(template), template, folder)
    origin = json.loads((template / "config.json").read_text()) if config is None else config
    cleaned = clean_config(origin, str(dtype).removeprefix("torch."))
    (folder / "config.json").write_text(json.dumps(cleaned, indent=2, sort_keys=True) + "\n")


Shape = tuple[int, ...]
Parts = list[torch.Tensor]
"""For all Hugging Face tensors of one rule: the scales of each, then the values of each."""


def gather_quantised(
    inventory: Inventory,
    entry: Entry,
    quantisation: BlockFp8,
    *,
    on_all_stages: bool,
    gets_tensors: bool = True,
) -> Mapping[str, torch.Tensor]:
    """Gather and quantise the tensors of an entry. Collective, as ``Exporter.gather``.

    Bitwise equal to quantising the full tensors. If a shard consists of whole blocks, each rank
    quantises it before the gather, which halves the bytes; otherwise the tensor-parallel ranks
    gather in the trainer's precision. Bytes are gathered, because gloo has no FP8 dtypes.

    Returns:
        The tensors by name, with the shapes of ``BlockFp8.shapes``; empty unless ``gets_tensors``.
    """
    groups, held = inventory.groups, inventory.part(entry)
    shapes = entry.shapes[: len(entry.rules[0].hugging_face)]
    likes = _likes(shapes, quantisation.block)
    goes_to_stages = groups.pipeline.size() > 1 and on_all_stages
    is_needed = gets_tensors or goes_to_stages or len(entry.rules) > 1
    packed: list[torch.Tensor] = []
    if held is not None:
        parts = _of_one_rule(inventory, held, shapes, quantisation, is_needed=is_needed)
        if parts is None:
            return {}
        own = pack(parts)
        packed = [own] if len(entry.rules) == 1 else all_gather(own, groups.expert)
    if goes_to_stages:
        if held is None:
            size, device = sum(num_bytes(*like) for like in likes), inventory.device
            packed = [torch.empty(size, dtype=torch.uint8, device=device) for _ in entry.rules]
        for flat in packed:
            dist.broadcast(flat, group=groups.pipeline, group_src=entry.owner)
    tensors: dict[str, torch.Tensor] = {}
    if not gets_tensors:
        return tensors
    for rule, flat in zip(entry.rules, packed, strict=True):
        parts, count = unpack(flat, likes), len(shapes)
        for name, scales, values in zip(
            rule.hugging_face, parts[:count], parts[count:], strict=True
        ):
            tensors |= {name: values, name + SUFFIX: scales}
    return tensors


def shards_are_whole_blocks(
    held: Held, shapes: tuple[Shape, ...], block: tuple[int, int], *, num_query_groups: int
) -> bool:
    """Return whether each rank's shard of each Hugging Face tensor consists of whole blocks."""
    if held.dim is None:
        return True
    dim, size, layout = held.dim, held.group.size(), held.rule.layout
    if layout not in ("plain", "qkv", "gated"):
        return False  # a shard's rows are not contiguous in the full tensor, or are padded
    if layout == "qkv" and num_query_groups % size:
        return False
    return all(shape[dim] % (size * block[dim]) == 0 for shape in shapes)


def _of_one_rule(
    inventory: Inventory,
    held: Held,
    shapes: tuple[Shape, ...],
    quantisation: BlockFp8,
    *,
    is_needed: bool,
) -> Parts | None:
    """Gather from the tensor-parallel ranks; return None if the result is not needed."""
    local, block, groups = held.value, quantisation.block, inventory.dims.num_query_groups
    if held.dim is None:
        if not is_needed:
            return None
        return _quantised(layouts.split(local, held.rule.layout, inventory.dims), quantisation)
    if not shards_are_whole_blocks(held, shapes, block, num_query_groups=groups):
        shards = all_gather(local, held.group)
        if not is_needed:
            return None
        full = layouts.join(shards, held.rule.layout, dim=held.dim)
        return _quantised(layouts.split(full, held.rule.layout, inventory.dims), quantisation)
    size = held.group.size()
    dims = replace(inventory.dims, num_query_groups=groups // size)
    own = pack(_quantised(layouts.split(local, held.rule.layout, dims), quantisation))
    flats = all_gather(own, held.group)
    if not is_needed:
        return None
    likes = _likes(tuple(_shard_shape(shape, held.dim, size) for shape in shapes), block)
    of_ranks = [unpack(flat, likes) for flat in flats]
    return [_joined(parts, held.dim) for parts in zip(*of_ranks, strict=True)]


def _quantised(tensors: tuple[torch.Tensor, ...], quantisation: BlockFp8) -> Parts:
    block, powers = quantisation.block, quantisation.has_powers_of_two
    pairs = [quantise(tensor, block, has_powers_of_two=powers) for tensor in tensors]
    return [scales for _, scales in pairs] + [values for values, _ in pairs]


def _likes(shapes: tuple[Shape, ...], block: tuple[int, int]) -> list[tuple[Shape, torch.dtype]]:
    scales = [(scale_shape(shape, block), torch.float32) for shape in shapes]
    return [*scales, *((shape, FP8) for shape in shapes)]


def _shard_shape(shape: Shape, dim: int, size: int) -> Shape:
    return tuple(length // size if at == dim else length for at, length in enumerate(shape))


def _joined(parts: tuple[torch.Tensor, ...], dim: int) -> torch.Tensor:
    """Concatenate the shards of a tensor.

    FP8 is concatenated as bytes, because not every backend supports it.
    """
    if parts[0].dtype != FP8:
        return torch.cat(parts, dim=dim)
    return torch.cat([part.view(torch.uint8) for part in parts], dim=dim).view(FP8)
