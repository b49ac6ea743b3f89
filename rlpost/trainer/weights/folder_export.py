"""Write the model as a Hugging Face folder; all ranks write, each file one of them.

Input: the exporter of this rank, and the folder that the model came from. Output: a folder as
save_pretrained would write it: safetensors, their index, configuration and tokenizer.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from common.files import sync
from common.units import counted
from rlpost.config.plan.whole_tensors import Item, assign
from rlpost.errors import CheckpointError
from rlpost.images.processor import write_bound
from rlpost.trainer.outcomes import gather_objects, on_every_rank
from rlpost.trainer.weights.exporter import Exporter, sent_tensors
from rlpost.trainer.weights.hf_folder import clean_config, copy_files, exported_files
from rlpost.trainer.weights.importer import HuggingFaceFolder, carried_tensors, shared_tensors
from rlpost.trainer.weights.inventory import Entry, Inventory
from rlpost.trainer.weights.layouts import as_bytes
from rlpost.trainer.weights.safetensors_files import INDEX, SINGLE, TensorFile
from rlpost.trainer.weights.whole_tensors import BUCKET_BYTES, WholeTensors

logger = logging.getLogger(__name__)

SHARD_BYTES = 5 * 10**9  # default file size of save_pretrained
Described = Mapping[str, tuple[tuple[int, ...], str]]
"""Tensors by name: shape, and torch's name of the dtype."""
Written = tuple[dict[str, str], int]
"""The file of each tensor that a rank wrote, and their bytes."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What an export takes from the template.

    ``files`` has the names of the tensors that are copied, by file, ``sizes`` the bytes of these
    files, and ``repeated`` {name of a copy: name of the tensor that it equals}.
    """

    files: tuple[tuple[str, ...], ...] = ()
    sizes: tuple[int, ...] = ()
    repeated: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""


def export_folder(
    exporter: Exporter,
    folder: str | Path,
    *,
    template: str | Path,
    config: Mapping[str, object] | None = None,
    image_max_pixels: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Write a Hugging Face folder as save_pretrained would.

    It has safetensors, configuration and tokenizer. Every rank of the world must call it, and all
    must see ``folder`` and ``template``. The ranks of a stage divide its files; each receives the
    slices that it lacks, and writes a bucket while it receives the next.

    Args:
        exporter: of this rank.
        folder: created if missing.
        template: the folder that the model came from. It gives configuration and tokenizer
            (``hf_folder``), and weights that are not trained.
        config: replaces the config.json of ``template``.
        image_max_pixels: the bound on images with which the model was trained.
        shard_bytes: bound of a file.
        bucket_bytes: bound of what a rank sends, and of what it receives, at a time. On its device
            it has two of these and the largest tensor, on the host as much.

    Raises:
        CheckpointError: a rank failed, as when its disk is full or its device lacks memory; raised on
            every rank.
        WeightError: the shards of the ranks do not fit together; raised on every rank.
    """
    folder, template = Path(folder), Path(template)
    inventory = exporter.inventory
    plan = exporter.plan(shard_bytes)
    whole = WholeTensors(inventory)
    rank = whole.rank
    kept = gather_objects(_kept(template, inventory, shard_bytes) if rank == 0 else Kept())[0]
    if kept.problem:
        raise cannot_write(folder, kept.problem)
    writers = _writers(whole, plan, kept)
    num_files, dtype = len(plan) + len(kept.files), plan[0][0].dtype
    failed = partial(cannot_write, folder)
    with closing(_Files(folder, num_files, kept.repeated)) as files:
        receivers: dict[str, int] = {}
        for number, (bucket, writer) in enumerate(zip(plan, writers, strict=False), start=1):
            if bucket[0].owner == whole.stage:
                receivers |= dict.fromkeys(_described(bucket), writer)
            if writer == rank:
                files.plan(number, _described(bucket))

        def begin() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            if rank == 0:
                _write_configuration(template, folder, config=config, dtype=dtype)
                if image_max_pixels is not None:
                    write_bound(folder, image_max_pixels)

        def finish() -> Written:
            for number, names in enumerate(kept.files, start=len(plan) + 1):
                if writers[number - 1] == rank:
                    files.write_whole(number, kept_tensors(template, names, dtype))
            return files.finish()

        on_every_rank(begin, failed)
        whole.within_stage(receivers, files.write, max_bytes=bucket_bytes, failed=failed)
        written = on_every_rank(finish, failed)
    file_of: dict[str, str] = {}
    total = 0
    for rank_files, num_bytes in gather_objects(written):
        file_of |= rank_files
        total += num_bytes
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}

    def write_index() -> None:
        if num_files > 1 and rank == 0:
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    on_every_rank(write_index, failed)


def _described(bucket: Sequence[Entry]) -> dict[str, tuple[tuple[int, ...], str]]:
    """The tensors of a file."""
    tensors: dict[str, tuple[tuple[int, ...], str]] = {}
    for entry in bucket:
        tensors |= sent_tensors(entry, None)
    return tensors


def _writers(whole: WholeTensors, plan: Sequence[Sequence[Entry]], kept: Kept) -> list[int]:
    """Return the rank that writes each file: of the stage that holds it, of any what is kept."""
    all_ranks = whole.all_ranks()
    teams = {stage: whole.team(stage) for stage in {bucket[0].owner for bucket in plan}}
    items = [
        Item(sum(entry.num_bytes for entry in bucket), teams[bucket[0].owner]) for bucket in plan
    ]
    return assign([*items, *(Item(size, all_ranks) for size in kept.sizes)])


def cannot_write(folder: str | Path, problem: str) -> CheckpointError:
    """Return the error of a folder of weights that cannot be written."""
    return CheckpointError(f"cannot write weights to {folder}: {problem}")


def _kept(template: Path, inventory: Inventory, shard_bytes: int) -> Kept:
    """Find what comes from the template."""
    try:
        source = HuggingFaceFolder(template)
        names, repeated = _not_exchanged(source, inventory)
        sizes = {name: source.num_bytes(name) for name in names}
        files = in_files(sizes, shard_bytes)
    except Exception as error:
        return Kept(problem=str(error) or repr(error))
    return Kept(files, tuple(sum(sizes[name] for name in file) for file in files), repeated)


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
    template: Path, names: Sequence[str], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Read tensors of the template: as they are, or in ``dtype`` where they are quantised there."""
    source, tensors = HuggingFaceFolder(template), {}
    for name in names:
        tensor = source.read(name)
        tensors[name] = tensor.to(dtype) if source.is_quantised(name) else tensor
    return tensors


class _Files:
    """The files that this rank writes, a bucket at a time in another thread."""

    def __init__(self, folder: Path, num_files: int, repeated: Mapping[str, str]) -> None:
        """``repeated``: {name of a copy: name of the tensor that it equals}."""
        self._folder, self._num_files, self._repeated = folder, num_files, repeated
        self._thread = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None
        self._planned: dict[str, Described] = {}
        self._open: dict[str, TensorFile] = {}
        self._file_of: dict[str, str] = {}
        self._total = 0

    def plan(self, number: int, tensors: Described) -> None:
        """Expect the tensors of a file, from the next ``write`` on."""
        copies = {
            copy: tensors[original]
            for copy, original in self._repeated.items()
            if original in tensors
        }
        name = self._name(number)
        self._planned[name] = {**tensors, **copies}
        self._file_of.update(dict.fromkeys(self._planned[name], name))

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors to the host, once those before are written, and write them."""
        self._wait()
        on_host = {name: one.cpu() for name, one in tensors.items()}
        self._pending = self._thread.submit(self._write, on_host)

    def write_whole(self, number: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the tensors of a file."""
        self._wait()
        name = self._name(number)
        save_tensors(tensors, self._folder, name)
        sync(self._folder / name)  # from this host: that of the driver cannot
        self._file_of.update(dict.fromkeys(tensors, name))
        self._total += sum(tensor.nbytes for tensor in tensors.values())
        self._log(name)

    def finish(self) -> Written:
        """Wait for the thread; raise CheckpointError if a tensor of a file did not come."""
        self._wait()
        self._check_complete()
        return self._file_of, self._total

    def close(self) -> None:
        """Release thread and files."""
        self._thread.shutdown()
        for file in self._open.values():  # after a failure
            with suppress(OSError):
                file.close()

    def _name(self, number: int) -> str:
        if self._num_files == 1:
            return SINGLE
        return f"model-{number:05d}-of-{self._num_files:05d}.safetensors"

    def _write(self, on_host: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in on_host.items():
            data = memoryview(as_bytes(tensor).numpy())
            self._write_tensor(name, data)
            for copy, original in self._repeated.items():
                if original == name:
                    self._write_tensor(copy, data)

    def _write_tensor(self, name: str, data: memoryview) -> None:
        file_name = self._file_of[name]
        if file_name not in self._open:
            planned = self._planned.pop(file_name)
            self._open[file_name] = TensorFile(self._folder / file_name, planned)
        file = self._open[file_name]
        file.write(name, data)
        if not file.missing:
            self._open.pop(file_name).close()
            self._total += file.num_bytes
            self._log(file_name)

    def _log(self, name: str) -> None:
        logger.info("%s: wrote %s of %d files", self._folder, name, self._num_files)

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _check_complete(self) -> None:
        """Raise if a tensor did not come: its file has no name then, but the index would have it."""
        missing = set(itertools.chain.from_iterable(self._planned.values()))
        missing.update(*(file.missing for file in self._open.values()))
        if missing:
            raise CheckpointError(
                f"{counted(len(missing), 'tensor')} did not reach the rank that writes, "
                f"{min(missing)} first"
            )


def _not_exchanged(
    source: HuggingFaceFolder, inventory: Inventory
) -> tuple[list[str], dict[str, str]]:
    """Find the tensors of a folder that are not taken from the model.

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
    """Write tensors of any shape to a safetensors file atomically.

    Raises OSError or SafetensorError.
    """
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
