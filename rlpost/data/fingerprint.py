"""A fingerprint of prompt files: by content and not by path or time, and cheap for files of any size.

Input: the sources of --prompt-data. Output: one word, which a journal keeps to notice that the data has changed.

Of each file count its size and its content: of a file of at most 64 MiB all of it, of a larger one 64 blocks of 256 KiB
at equal distances, first and last included (16 MiB to read, whatever its size). So every change of a small file is
noticed; in a large one every change of its size, of its head (the first rows) and of its tail (of Parquet the
footer, with the number of rows and the place of every column), but not an edit between two blocks that keeps the size.
Such a row is noticed when the journal has answers to its prompt: each group keeps a digest of its prompt
(``rlpost.rollout.replay``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

from rlpost.data.rows import split_source
from rlpost.errors import DataError

WHOLE_BYTES = 64 << 20
NUM_BLOCKS, BLOCK_BYTES = 64, 256 << 10


def data_fingerprint(sources: Sequence[str | Path]) -> str:
    """One word for the contents of the files of ``sources``, in order.

    Raises DataError when a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    for source in sources:
        path, _ = split_source(source)
        try:
            digest.update(_file_digest(path))
        except OSError as error:
            raise DataError(f"--prompt-data {path}: cannot read the prompts: {error}; is the path right?") from error
    return digest.hexdigest()


def _file_digest(path: Path) -> bytes:
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        digest = hashlib.blake2b(f"{size} bytes".encode(), digest_size=16)
        for block in _blocks(file, size):
            digest.update(block)
    return digest.digest()


def _blocks(file: BinaryIO, size: int) -> Iterable[bytes]:
    """The parts of a file that count."""
    if size <= WHOLE_BYTES:
        file.seek(0)
        while block := file.read(BLOCK_BYTES):
            yield block
        return
    for number in range(NUM_BLOCKS):
        file.seek(number * (size - BLOCK_BYTES) // (NUM_BLOCKS - 1))
        yield file.read(BLOCK_BYTES)
