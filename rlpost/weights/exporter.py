"""Export: the Megatron model as Hugging Face tensors, in buckets of bounded size; to a folder, or to a hash.

In: this rank's model and its tensor-parallel group. Out: full tensors under Hugging Face names. The plan is made from
shapes alone and is the same on every rank; data is gathered one bucket at a time. Invariant: import and export are
inverse bit by bit.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from rlpost.types import Bucket
from rlpost.weights import layouts, names
from rlpost.weights.names import Dimensions, Rule

SHARD_BYTES = 5 * 10**9  # as save_pretrained cuts its files
COPIED_FILES = ("*.json", "*.jinja", "*.model", "*.txt")  # configuration and tokenizer
NOT_COPIED = ("model.safetensors.index.json",)


@dataclass(frozen=True, slots=True)
class Entry:
    """One Megatron parameter of the plan."""

    parameter: torch.nn.Parameter
    rule: Rule
    shapes: tuple[tuple[int, ...], ...]  # of its Hugging Face tensors
    num_bytes: int


class Exporter:
    """The full tensors of a tensor-parallel model, bucket by bucket."""

    def __init__(
        self, model: torch.nn.Module, *, architecture: str, dims: Dimensions, group: dist.ProcessGroup
    ) -> None:
        """Args: ``group`` is the tensor-parallel group; all its ranks must call ``gather`` together."""
        self.dims = dims
        self.group = group
        rules = names.family(architecture)
        self.entries = [
            self._entry(parameter, names.to_hugging_face(name, rules)) for name, parameter in model.named_parameters()
        ]

    def plan(self, max_bytes: int) -> tuple[tuple[Entry, ...], ...]:
        """The parameters in order, in buckets of at most ``max_bytes``; a larger parameter is alone in one."""
        buckets: list[list[Entry]] = []
        room = 0
        for entry in self.entries:
            if not buckets or entry.num_bytes > room:
                buckets.append([])
                room = max_bytes
            buckets[-1].append(entry)
            room -= entry.num_bytes
        return tuple(tuple(bucket) for bucket in buckets)

    @torch.no_grad()
    def gather(self, bucket: tuple[Entry, ...]) -> dict[str, torch.Tensor]:
        """Full Hugging Face tensors of a bucket, on the parameters' device. A collective of the group."""
        tensors: dict[str, torch.Tensor] = {}
        for entry in bucket:
            full = self._full(entry)
            tensors.update(zip(entry.rule.hugging_face, layouts.split(full, entry.rule.layout, self.dims), strict=True))
        return tensors

    def _entry(self, parameter: torch.nn.Parameter, rule: Rule) -> Entry:
        size = self.group.size() if getattr(parameter, "tensor_model_parallel", False) else 1
        shards = [torch.empty(parameter.shape, device="meta")] * size
        full = layouts.join(shards, rule.layout, dim=getattr(parameter, "partition_dim", 0))
        shapes = tuple(tuple(part.shape) for part in layouts.split(full, rule.layout, self.dims))
        num_bytes = sum(torch.Size(shape).numel() for shape in shapes) * parameter.element_size()
        return Entry(parameter, rule, shapes, num_bytes)

    def _full(self, entry: Entry) -> torch.Tensor:
        local = entry.parameter.detach()
        if not getattr(entry.parameter, "tensor_model_parallel", False) or self.group.size() == 1:
            return local
        shards = [torch.empty_like(local) for _ in range(self.group.size())]
        dist.all_gather(shards, local.contiguous(), group=self.group)
        return layouts.join(shards, entry.rule.layout, dim=entry.parameter.partition_dim)


def describe(bucket: tuple[Entry, ...]) -> Bucket:
    """Names, shapes and dtypes of a bucket, as an engine needs them beforehand."""
    dtypes = [str(entry.parameter.dtype).removeprefix("torch.") for entry in bucket for _ in entry.shapes]
    return Bucket(
        names=tuple(name for entry in bucket for name in entry.rule.hugging_face),
        shapes=tuple(shape for entry in bucket for shape in entry.shapes),
        dtypes=tuple(dtypes),
    )


def weights_hash(exporter: Exporter, *, max_bytes: int) -> str:
    """SHA-256 over all Hugging Face tensors in order of their names: equal whatever the layout. A collective."""
    digests: dict[str, str] = {}
    for bucket in exporter.plan(max_bytes):
        for name, tensor in exporter.gather(bucket).items():
            digest = hashlib.sha256(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().cpu().flatten().view(torch.uint8).numpy())
            digests[name] = digest.hexdigest()
    return hashlib.sha256("".join(digests[name] for name in sorted(digests)).encode()).hexdigest()


def export_folder(
    exporter: Exporter, folder: str | Path, *, template: str | Path, writes: bool, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write a Hugging Face folder as save_pretrained would: safetensors, configuration and tokenizer.

    Args: ``template`` is the folder the model came from; its configuration and tokenizer files are copied, with the
    dtype of the weights. All ranks of the tensor-parallel group call this; the one with ``writes`` writes.
    """
    folder = Path(folder)
    if writes:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _copy_configuration(Path(template), folder, dtype=exporter.entries[0].parameter.dtype)
    plan = exporter.plan(shard_bytes)
    file_of: dict[str, str] = {}
    total = 0
    for number, bucket in enumerate(plan, start=1):
        tensors = exporter.gather(bucket)
        single = len(plan) == 1
        name = "model.safetensors" if single else f"model-{number:05d}-of-{len(plan):05d}.safetensors"
        file_of.update(dict.fromkeys(tensors, name))
        total += sum(entry.num_bytes for entry in bucket)
        if writes:
            on_host = {key: tensor.cpu().contiguous() for key, tensor in tensors.items()}
            save_file(on_host, folder / f".{name}", metadata={"format": "pt"})
            os.replace(folder / f".{name}", folder / name)
    if writes and len(plan) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _copy_configuration(template: Path, folder: Path, *, dtype: torch.dtype) -> None:
    for pattern in COPIED_FILES:
        for file in template.glob(pattern):
            if file.name not in NOT_COPIED and file.parent != folder:
                shutil.copyfile(file, folder / file.name)
    config = json.loads((template / "config.json").read_text())
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
