"""What changed between two versions of the weights, as files, and the copy on an engine's host that takes it. No torch.

In: tensors as words, one an element: [numel], unsigned integers as wide as the element. Out: for each tensor whichever
is smallest of nothing, the gaps between changed elements and their values, a bitmap and their values, or all values. A
folder of an update holds ``delta.bin`` with these, or is a whole Hugging Face folder; its manifest has a checksum of
every whole tensor either way, and names the version that a delta begins from by a digest of those.

Invariants: ``apply(old, encode(old, new))`` leaves ``new`` bit by bit (NaN and -0.0 are words as any other). A copy has
a manifest only while it is what the manifest says: it loses it before the first byte is changed, and gets one once
every checksum is right.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from rlpost.errors import WeightError

logger = logging.getLogger(__name__)

MANIFEST = "rlpost_weights.json"
DATA = "delta.bin"
GAP_BYTES = (1, 2, 4, 8)

Words: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]
Bytes: TypeAlias = npt.NDArray[np.uint8]
How = Literal["same", "gaps", "bitmap", "whole"]


@dataclass(frozen=True, slots=True)
class Header:
    """How the change of one tensor is written; ``offset``: where in ``delta.bin`` it begins, in bytes."""

    how: How
    num_words: int
    word_bytes: int
    num_changed: int = 0
    gap_bytes: int = 0
    offset: int = 0

    @property
    def position_bytes(self) -> int:
        return {"gaps": self.num_changed * self.gap_bytes, "bitmap": -(-self.num_words // 8)}.get(self.how, 0)

    @property
    def num_bytes(self) -> int:
        """Of positions and values."""
        return self.position_bytes + self.num_changed * self.word_bytes


@dataclass(frozen=True, slots=True)
class Manifest:
    """Of a version of the weights: ``base`` is the digest of what a delta begins from, None for a whole folder."""

    version: int
    checksums: Mapping[str, str]
    base: str | None = None
    changes: Mapping[str, Header] = dataclasses.field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Of all checksums: equal for equal weights."""
        lines = "".join(f"{name} {self.checksums[name]}\n" for name in sorted(self.checksums))
        return hashlib.sha256(lines.encode()).hexdigest()

    def write(self, folder: Path) -> None:
        """Into ``folder``, all of it or nothing."""
        temporary = folder / f".{MANIFEST}"
        temporary.write_text(json.dumps(dataclasses.asdict(self)))
        os.replace(temporary, folder / MANIFEST)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises OSError without one; ValueError, KeyError or TypeError for one that is damaged."""
        found = json.loads((folder / MANIFEST).read_text())
        changes = {name: Header(**header) for name, header in found["changes"].items()}
        return cls(int(found["version"]), found["checksums"], found["base"], changes)


@dataclass(frozen=True, slots=True)
class Written:
    """What the trainer wrote for one update."""

    num_bytes: int
    """Of all files."""
    changed_frac: float
    """Elements that differ from the version before, of all; 1 for a whole folder."""


def encode(old: Words | None, new: Words) -> tuple[Header, Bytes]:
    """The change from ``old`` to ``new`` in the fewest bytes; all of ``new`` without an ``old`` to begin from."""
    size, width = len(new), new.itemsize
    everything = Header("whole", size, width, num_changed=size)
    if old is None or old.shape != new.shape or old.dtype != new.dtype:
        return everything, new.view(np.uint8)
    different = old != new
    positions = np.flatnonzero(different)
    count = len(positions)
    if not count:
        return Header("same", size, width), np.empty(0, np.uint8)
    gaps = np.diff(positions, prepend=-1) - 1  # elements in between that stay
    gap_bytes = next(number for number in GAP_BYTES if int(gaps.max()) < 256**number)
    header = min(
        everything,
        Header("gaps", size, width, count, gap_bytes),
        Header("bitmap", size, width, count),
        key=lambda one: one.num_bytes,
    )
    if header.how == "whole":
        return header, new.view(np.uint8)
    where = gaps.astype(f"<u{gap_bytes}").view(np.uint8) if header.how == "gaps" else np.packbits(different)
    return header, np.concatenate([where, new[positions].view(np.uint8)])


def placed(header: Header, offset: int) -> Header:
    """The same, beginning at ``offset`` of the file."""
    return dataclasses.replace(header, offset=offset)


def apply(words: Words, header: Header, data: Bytes) -> None:
    """Make ``words``, a tensor of the version before, that of the version after, in place.

    Raises WeightError when the change is of another tensor or its bytes are damaged; ``words`` may be changed then.
    """
    if (len(words), words.itemsize) != (header.num_words, header.word_bytes) or len(data) != header.num_bytes:
        raise WeightError(
            f"the change is of {header.num_words} words of {header.word_bytes} bytes in {header.num_bytes} bytes; here "
            f"are {len(words)} of {words.itemsize}, and {len(data)} bytes"
        )
    where, values = data[: header.position_bytes], data[header.position_bytes :].view(words.dtype)
    if header.how == "whole":
        words[:] = values
    elif header.how == "gaps":
        positions = np.cumsum(where.view(f"<u{header.gap_bytes}").astype(np.int64) + 1) - 1
        if positions.max() >= len(words) or positions.min() < 0:
            raise WeightError(f"a changed element is beyond the tensor's {len(words)}")
        words[positions] = values
    elif header.how == "bitmap":
        marked = np.unpackbits(where, count=len(words)).view(bool)
        if np.count_nonzero(marked) != len(values):
            raise WeightError(f"{np.count_nonzero(marked)} elements are marked as changed, {len(values)} have a value")
        words[marked] = values


def checksum(words: npt.NDArray[Any]) -> str:
    """SHA-256 of a tensor's bytes."""
    return hashlib.sha256(words.view(np.uint8)).hexdigest()


def commit(temporary: Path, folder: Path) -> int:
    """Make a folder that is written durable and give it its name, in place of an older one; returns its bytes."""
    _make_durable(*temporary.iterdir(), temporary)
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(temporary, folder)
    return sum(path.stat().st_size for path in folder.iterdir())


def tensors_of(folder: Path, *, mode: Literal["r", "r+"] = "r") -> dict[str, Words]:
    """Every tensor of a folder's safetensors, mapped; with ``r+`` what is written to one goes to its file.

    Raises OSError, ValueError or KeyError for a file that is missing or damaged.
    """
    found: dict[str, Words] = {}
    for path in sorted(folder.glob("*.safetensors")):
        mapped = np.memmap(path, np.uint8, mode)
        first = 8 + int(mapped[:8].view("<u8")[0])  # the format: length of the header, header in JSON, bytes
        for name, entry in json.loads(bytes(mapped[8:first])).items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            width = (end - begin) // max(1, math.prod(entry["shape"])) or 1
            found[name] = mapped[first + begin : first + end].view(f"<u{width}")
    return found


class WeightCopy:
    """A whole Hugging Face folder on the host of engines, brought from version to version."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def take(self, source: str | Path) -> str | None:
        """Become the version in ``source``, whole or a delta; returns why that cannot be, None when it is done."""
        try:
            manifest = Manifest.read(Path(source))
            if manifest.base is None:
                self._replace(Path(source), manifest)
            else:
                self._patch(Path(source), manifest)
        except (OSError, ValueError, LookupError, TypeError) as error:  # WeightError is a ValueError
            return f"{self.folder} cannot become {Path(source).name}: {type(error).__name__} {error}"
        return None

    def remove(self) -> None:
        """Nothing is left of it."""
        for folder in (self.folder, self._temporary):
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def _temporary(self) -> Path:
        return self.folder.with_name(f".{self.folder.name}")

    def _replace(self, source: Path, manifest: Manifest) -> None:
        self.remove()  # first: a disk need not hold both
        self.folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        shutil.copytree(source, self._temporary)
        tensors = tensors_of(self._temporary)
        _verify({name: tensors[name] for name in manifest.checksums}, manifest)
        os.rename(self._temporary, self.folder)

    def _patch(self, source: Path, manifest: Manifest) -> None:
        have = Manifest.read(self.folder)
        if have.digest != manifest.base:
            raise WeightError(
                f"the delta begins from {manifest.base}, the copy is version {have.version}, {have.digest}"
            )
        (self.folder / MANIFEST).unlink()
        tensors = tensors_of(self.folder, mode="r+")
        path = source / DATA
        data = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)

        def patch(name: str) -> None:
            header = manifest.changes[name]
            apply(tensors[name], header, data[header.offset : header.offset + header.num_bytes])

        with ThreadPoolExecutor() as pool:
            list(pool.map(patch, manifest.changes))
        _verify({name: tensors[name] for name in manifest.checksums}, manifest)
        _make_durable(*self.folder.glob("*.safetensors"))  # engines on other hosts may read them
        Manifest(manifest.version, manifest.checksums).write(self.folder)


def _verify(tensors: Mapping[str, Words], manifest: Manifest) -> None:
    """Raise WeightError naming the tensors that are not those of the manifest."""
    with ThreadPoolExecutor() as pool:
        sums = dict(zip(tensors, pool.map(checksum, tensors.values()), strict=True))
    if wrong := sorted(name for name, value in sums.items() if value != manifest.checksums[name]):
        raise WeightError(f"{len(wrong)} tensors do not have the checksum of version {manifest.version}: {wrong[:3]}")


def _make_durable(*paths: Path) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
