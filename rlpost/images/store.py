"""The images of a run: files in its folder, each named by its SHA-256 digest and written once.

    images/ab/abcdef...         the bytes as they came
    images/ab/abcdef...-WxH.png the same at the size that the model sees, which engines read

Invariant: a digest that ``add`` returned has its file, also after a crash of the machine. So a
record may name it from then on. The second file can be made again from the first.

A file is written under a hidden name that ends with its writer's. A killed writer leaves it; the next
one removes it (``remove_unfinished``).
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from common.files import discard, sync, write_all
from rlpost.errors import CheckpointError, ImageError
from rlpost.images.read_file import read_file

WITH_IMAGES = "+"
"""Between the fingerprint of prompt files and that of their images; rlpost 0.2 has the first."""
FOLDER = "images"


class ImageStore:
    """Reads and writes the images of a run. Methods block and may be called from several threads."""

    def __init__(self, run_folder: str | Path) -> None:
        self.folder = Path(run_folder) / FOLDER
        self._writer = secrets.token_hex(4)
        self._synced: set[str] = set()  # digests whose file this process wrote or compared
        self._named: set[Path] = set()  # folders whose names it synced
        self._lock = threading.Lock()
        self._making: dict[str, threading.Lock] = {}  # by name of a scaled file

    def add(self, data: bytes) -> str:
        """Store the bytes of an image and return their digest.

        Raises:
            OSError: they could not be written and synced.
        """
        digest = hashlib.sha256(data).hexdigest()
        if digest not in self._synced:
            path = self.path(digest)
            self._make_folder(path.parent)
            if not _holds(path, data):
                self._write(path, data)
            sync(path.parent)  # also the name of a file that another attempt wrote before it died
            self._synced.add(digest)
        return digest

    def read(self, digest: str) -> bytes:
        """Return the bytes of an image.

        Raises:
            ImageError: the file is missing or damaged; the message names it.
            OSError: the storage failed.
        """
        path = self.path(digest)
        data = read_file(path)
        if hashlib.sha256(data).hexdigest() != digest:
            raise ImageError(f"{path}: its {len(data)} bytes are not those that were stored")
        return data

    def complete(self, digests: Iterable[str], others: Sequence[Path] = ()) -> None:
        """Take images that are not here from other run folders, and check that all are here.

        A checkpoint of another run names the images of its prompts, and has none of their bytes.

        Raises:
            CheckpointError: one is in no folder; the message names it and the remedy.
            OSError: one could not be written.
        """
        for digest in sorted(set(digests)):
            stores = [self, *map(ImageStore, others)]
            holder = next((one for one in stores if one.path(digest).is_file()), None)
            if holder is None:
                raise CheckpointError(
                    f"{self.path(digest)}: an image of the checkpoint's prompts is missing; copy the folder "
                    f"{FOLDER} of the run that wrote the checkpoint to {self.folder}"
                )
            if holder is not self:
                self.add(holder.read(digest))

    def scaled(self, digest: str, size: tuple[int, int], make: Callable[[bytes], bytes]) -> Path:
        """Return the file with an image at ``size`` (width, height); ``make`` converts its bytes to PNG.

        Raises:
            ImageError: the image is missing or damaged.
            OSError: the file could not be written.
        """
        path = self.path(digest).with_name(f"{digest}-{size[0]}x{size[1]}.png")
        with self._lock:
            making = self._making.setdefault(path.name, threading.Lock())
        with making:  # the samples of a group ask for the same file at once
            if path.name not in self._synced or not path.is_file():
                self._write(path, make(self.read(digest)))
                self._synced.add(path.name)
        with self._lock:
            self._making.pop(path.name, None)
        return path

    def remove_unfinished(self) -> None:
        """Remove the files that writers of the run before this one did not finish.

        The caller owns the run: no other writer is alive. Those of this writer stay.
        """
        for path in self.folder.glob("*/.*"):
            if not path.name.endswith(f".{self._writer}"):
                discard(path)

    def _make_folder(self, folder: Path) -> None:
        """Create the folder of a file and the store's own, with durable names.

        The folder may exist without a durable name: its writer died before the sync, or another
        thread has not reached it.
        """
        for path in (self.folder, folder):
            is_new = not path.is_dir()
            if is_new:
                path.mkdir(mode=0o700, exist_ok=True)
            if is_new or path not in self._named:
                sync(path.parent)
                self._named.add(path)

    def _write(self, path: Path, data: bytes) -> None:
        """Write a file under a temporary name, sync and rename it."""
        thread = threading.get_ident()  # two may write the same file at once
        beside = path.with_name(f".{path.name}.{thread}.{self._writer}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            descriptor = os.open(beside, flags, 0o600)
            try:
                write_all(descriptor, data)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(beside, path)
        except BaseException:
            discard(beside)
            raise

    def path(self, digest: str) -> Path:
        return self.folder / digest[:2] / digest


def _holds(path: Path, data: bytes) -> bool:
    """Whether a file has exactly ``data``."""
    try:
        return path.stat().st_size == len(data) and path.read_bytes() == data
    except FileNotFoundError:
        return False
