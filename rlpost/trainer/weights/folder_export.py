"""Write the model as a Hugging Face folder, by one rank of each host and stage.

Input: the exporter of this rank, and the folder that the model came from. Output: a folder as
save_pretrained would write it: safetensors, their index, configuration and tokenizer.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from common.files import sync
from rlpost.errors import WeightError
from rlpost.trainer.weights.exporter import Exporter, gather_objects
from rlpost.trainer.weights.hf_folder import clean_config, copy_files, exported_files
from rlpost.trainer.weights.importer import HuggingFaceFolder, carried_tensors, shared_tensors
from rlpost.trainer.weights.inventory import Inventory
from rlpost.trainer.weights.safetensors_files import INDEX, SINGLE

logger = logging.getLogger(__name__)

SHARD_BYTES = 5 * 10**9  # default file size of save_pretrained


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank brings to an export.

    ``kept`` has the names of the tensors that come from the template, by file, and ``repeated`` the
    copies; both are those of the first rank.
    """

    stage: int
    host: str
    kept: tuple[tuple[str, ...], ...] = ()
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
    shares = gather_objects(_share(exporter, source, shard_bytes if rank == 0 else None))
    first, stage = shares[0], shares[rank].stage
    if first.problem:
        raise OSError(f"{folder}: {first.problem}")
    files, dtype = _Files(folder, len(plan) + len(first.kept), first.repeated), plan[0][0].dtype
    if rank == 0:
        files.attempt(lambda: _write_configuration(template, folder, config=config, dtype=dtype))
    turns = itertools.cycle(writers_of(shares, stage))
    for number, bucket in enumerate(plan, start=1):
        if bucket[0].owner != stage:
            continue
        writes = next(turns) == rank
        tensors = exporter.gather(bucket, on_all_stages=False, gets_tensors=writes)
        if writes:
            files.write(number, partial(dict, tensors))
    for number, kept in enumerate(first.kept if rank == 0 else (), start=len(plan) + 1):
        files.write(number, partial(kept_tensors, source, kept, dtype))
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


def _share(exporter: Exporter, source: HuggingFaceFolder, shard_bytes: int | None) -> Share:
    """Return this rank's share; the rank with ``shard_bytes`` finds what is not gathered."""
    share = Share(exporter.inventory.groups.pipeline.rank(), _host())
    if shard_bytes is None:
        return share
    try:
        kept, repeated = _not_gathered(source, exporter.inventory)
        files = in_files({name: source.num_bytes(name) for name in kept}, shard_bytes)
    except (OSError, SafetensorError, WeightError) as error:
        return replace(share, problem=str(error))
    return replace(share, kept=files, repeated=repeated)


def in_files(sizes: Mapping[str, int], limit: int) -> tuple[tuple[str, ...], ...]:
    """Deal tensors to files of at most ``limit`` bytes, in order; a larger tensor has its own."""
    files: list[list[str]] = []
    left = 0
    for name, size in sizes.items():
        if not files or size > left:
            files.append([])
            left = limit
        files[-1].append(name)
        left -= size
    return tuple(map(tuple, files))


def kept_tensors(
    source: HuggingFaceFolder, names: Sequence[str], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Read tensors of the template: as they are, or in ``dtype`` where they are quantised there."""
    tensors = {}
    for name in names:
        tensor = source.read(name)
        tensors[name] = tensor.to(dtype) if source.is_quantised(name) else tensor
    return tensors


def _host() -> str:
    return socket.gethostname()


def writers_of(shares: Sequence[Share], stage: int) -> list[int]:
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
        except (OSError, SafetensorError, WeightError) as error:
            self._problem = str(error)

    def write(self, number: int, read: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        """Copy the tensors to the host, once the file before is written, and write them."""
        self.attempt(self._wait)
        self.attempt(lambda: self._write(number, read()))

    def _write(self, number: int, tensors: Mapping[str, torch.Tensor]) -> None:
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
    return sorted({*carried_tensors(source, inventory), *copies} - repeated.keys()), repeated


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
    origin = json.loads((template / "config.json").read_text())
    cleaned = clean_config(origin if config is None else config, str(dtype).removeprefix("torch."))
    if cleaned != origin:  # else the file itself is carried
        (folder / "config.json").write_text(json.dumps(cleaned, indent=2) + "\n")
