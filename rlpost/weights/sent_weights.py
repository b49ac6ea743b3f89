"""What the engines were sent last, kept by the trainer, so that only what changed has to be written.

In: the exporter of this rank. Out: a folder of each version, whole or a delta (``rlpost.weights.delta``), which appears
under its name once all of it is durable. The rank that writes holds a copy of all weights in host memory, in the
precision in which they travel; no other rank holds any.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import torch

from rlpost.weights import delta
from rlpost.weights.delta import Header, Manifest, Words, Written
from rlpost.weights.exporter import Exporter
from rlpost.weights.inventory import Entry

logger = logging.getLogger(__name__)


class LastSent:
    """The trainer's half of updates by delta; one on every rank, all called alike."""

    def __init__(self, exporter: Exporter, *, bucket_bytes: int, writes: bool) -> None:
        """Args: ``writes`` on the one rank that writes; ``bucket_bytes`` bounds what is gathered at a time."""
        self._exporter = exporter
        self._bucket_bytes = bucket_bytes
        self._writes = writes
        self._words: dict[str, Words] = {}
        self._checksums: dict[str, str] = {}
        self._base = ""
        """Digest of what was written last."""

    def write_whole(self, folder: Path, version: int, export: Callable[[Exporter, Path], None]) -> Written | None:
        """All weights as a Hugging Face folder, which ``export`` writes with the exporter it is given. A collective.

        Returns what was written, on the rank that writes. Raises OSError there, after its part in every gather.
        """
        temporary = _beside(folder)
        self._words, self._base = {}, ""
        if self._writes:
            shutil.rmtree(temporary, ignore_errors=True)
        export(_Watched(self._exporter, self._keep if self._writes else _nothing), temporary)
        return self._committed(temporary, folder, Manifest(version, dict(self._checksums)), 1.0)

    def write_delta(self, folder: Path, version: int) -> Written | None:
        """What differs from the version written last. A collective; returns and raises as ``write_whole``."""
        temporary, file = _beside(folder), None
        base, changes, failures = self._base, dict[str, Header](), list[OSError]()
        self._base = ""
        try:
            if self._writes:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True, mode=0o700)
                file = (temporary / delta.DATA).open("wb")
        except OSError as error:  # the other ranks wait in the next gather, so this one goes on gathering
            failures.append(error)
        for bucket in self._exporter.plan(self._bucket_bytes):
            tensors = self._exporter.gather(bucket)
            if file is not None and not failures:
                try:
                    changes.update(self._append(file, tensors))
                except OSError as error:
                    failures.append(error)
        if file is not None:
            file.close()
        if failures:
            raise failures[0]
        changed = sum(header.num_changed for header in changes.values())
        total = sum(header.num_words for header in changes.values())
        manifest = Manifest(version, dict(self._checksums), base, changes)
        return self._committed(temporary, folder, manifest, changed / max(1, total))

    def _append(self, file: BinaryIO, tensors: Mapping[str, torch.Tensor]) -> dict[str, Header]:
        old = {name: self._words.get(name) for name in tensors}
        self._keep(tensors)
        with ThreadPoolExecutor() as pool:
            encoded = pool.map(lambda name: delta.encode(old[name], self._words[name]), tensors)
        headers: dict[str, Header] = {}
        for name, (header, data) in zip(tensors, encoded, strict=True):
            headers[name] = delta.placed(header, file.tell())
            file.write(data)
        return headers

    def _keep(self, tensors: Mapping[str, torch.Tensor]) -> None:
        new = {name: words_of(tensor) for name, tensor in tensors.items()}
        with ThreadPoolExecutor() as pool:
            self._checksums.update(zip(new, pool.map(delta.checksum, new.values()), strict=True))
        self._words.update(new)

    def _committed(self, temporary: Path, folder: Path, manifest: Manifest, changed_frac: float) -> Written | None:
        if not self._writes:
            return None
        manifest.write(temporary)
        written = Written(delta.commit(temporary, folder), changed_frac)
        self._base = manifest.digest
        logger.info("%s: %d bytes, %.4f of the elements changed", folder, written.num_bytes, changed_frac)
        return written


class _Watched(Exporter):
    """An exporter that shows what it gathers."""

    def __init__(self, exporter: Exporter, show: Callable[[Mapping[str, torch.Tensor]], None]) -> None:
        super().__init__(exporter.inventory)
        self._exporter = exporter
        self._show = show

    def plan(self, max_bytes: int, **how: Any) -> tuple[tuple[Entry, ...], ...]:
        return self._exporter.plan(max_bytes, **how)

    def gather(self, bucket: tuple[Entry, ...], **how: Any) -> dict[str, torch.Tensor]:
        tensors = self._exporter.gather(bucket, **how)
        self._show(tensors)
        return tensors


def words_of(tensor: torch.Tensor) -> Words:
    """A copy on the host: [numel], one unsigned integer an element."""
    on_host = tensor.detach().to("cpu", copy=True).contiguous().flatten()
    return on_host.view(torch.uint8).numpy().view(f"<u{tensor.element_size()}")


def _beside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}")


def _nothing(tensors: Mapping[str, torch.Tensor]) -> None:
    pass
