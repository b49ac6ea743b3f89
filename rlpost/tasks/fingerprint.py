"""A fingerprint of the data that prompts come from: files of any size, and the images that they name.

Input: the files of --prompt-data. Output: a digest of their contents, which a resume compares. It
depends neither on paths nor on times.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from rlpost.errors import DataError, ImageError
from rlpost.images.read_file import read_file
from rlpost.images.store import WITH_IMAGES
from rlpost.tasks.prompt_images import image_path
from rlpost.tasks.prompts import PromptFields, parse
from rlpost.tasks.rows import split_source

WHOLE_BYTES = 64 << 20
NUM_BLOCKS, BLOCK_BYTES = 64, 256 << 10
NUM_ROWS = 4096
"""Rows of a file whose images are read: 3.3 s of a CPU for as many images of 100 kB."""


def data_fingerprint(sources: Sequence[str | Path], fields: PromptFields | None = None) -> str:
    """Return a digest of the contents of ``sources``, in order.

    It covers the size of each file, all of a file up to 64 MiB, and of a larger one 64 blocks of
    256 KiB at equal distances, including the first and the last: every change of a small file is
    detected, and in a large one all but an edit between two blocks that keeps the size. With the
    ``fields`` of rows with images, it also covers the bytes of all images that rows name by path, up
    to 4096 rows, and of a longer file those of 4096 rows at equal distances. The journal detects
    other edits if it has answers to the changed prompt (``rlpost.rollout.replay``).

    With images it is ``FILES+IMAGES``: FILES alone is what it is without, and in rlpost 0.2.

    Raises:
        DataError: a file cannot be read; or the storage of an image failed.
    """
    digest, images = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
    covers_images = fields is not None and fields.image_key is not None
    for source in sources:
        path, _ = split_source(source)
        try:
            digest.update(_file_digest(path))
            if fields is not None and covers_images:
                for image in image_files(path, fields, NUM_ROWS):
                    images.update(_image_digest(image))
        except OSError as error:
            raise DataError(
                f"--prompt-data {path}: cannot read the prompts: {error}; is the path right?"
            ) from error
    files = digest.hexdigest()
    return f"{files}{WITH_IMAGES}{images.hexdigest()}" if covers_images else files


def image_files(path: Path, fields: PromptFields, max_rows: int | None = None) -> Iterator[Path]:
    """Yield the files of images that the rows of a file name, in order, also if they are missing.

    Invalid rows name none. ``max_rows``: rows at equal distances, with the first and the last; all
    by default. Raises DataError if ``path`` cannot be read.
    """
    rows = fields.rows(path)
    count = len(rows) if max_rows is None else min(len(rows), max_rows)
    for number in range(count):
        position = number * (len(rows) - 1) // max(1, count - 1)
        with suppress(DataError):  # reported when its prompt is taken
            row = parse(rows.row(position), rows.where(position), fields)
            files = (image_path(source, path.parent) for source in row.images)
            yield from (file for file in files if file is not None)


def image_states(path: Path, fields: PromptFields) -> str:
    """Return a digest of names, sizes and change times of a file's images, for one machine.

    It reads every row and the state of every image: about 10 s for 100,000 rows, on each check. A
    sample would miss an image that was removed since.

    Raises DataError if ``path`` cannot be read.
    """
    digest = hashlib.sha256()
    for image in image_files(path, fields):
        state: object = None
        with suppress(OSError):
            status = image.stat()
            state = status.st_size, status.st_ctime_ns, status.st_ino
        digest.update(f"{image}\0{state}\n".encode(errors="surrogatepass"))
    return digest.hexdigest()


def _image_digest(path: Path) -> bytes:
    """Return the digest of an image's bytes, or a mark that it has none. Raises OSError."""
    try:
        return hashlib.blake2b(read_file(path), digest_size=16).digest()
    except ImageError:
        return b"unreadable"


def _file_digest(path: Path) -> bytes:
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        digest = hashlib.blake2b(f"{size} bytes".encode(), digest_size=16)
        for block in _blocks(file, size):
            digest.update(block)
    return digest.digest()


def _blocks(file: BinaryIO, size: int) -> Iterable[bytes]:
    """Yield the parts of a file that the digest covers."""
    if size <= WHOLE_BYTES:
        file.seek(0)
        while block := file.read(BLOCK_BYTES):
            yield block
        return
    for number in range(NUM_BLOCKS):
        file.seek(number * (size - BLOCK_BYTES) // (NUM_BLOCKS - 1))
        yield file.read(BLOCK_BYTES)
