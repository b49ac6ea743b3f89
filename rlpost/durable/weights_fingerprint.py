"""A fingerprint of a folder of weights, by its content: fast for files of any size.

It covers the name and size of each file, small files and the headers of safetensors in full, and
NUM_BLOCKS blocks of each other file. Weights that were trained or converted again differ in every
tensor, so a sample finds them; an edit between two blocks that keeps every size is not found.
Texts for readers, hidden files and times are not part of it, and links are followed: a copy has an
equal fingerprint.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from rlpost.durable.run_files import read_again

WHOLE_BYTES = 1 << 20
NUM_BLOCKS, BLOCK_BYTES = 8, 64 << 10
LONGEST_HEADER = 64 << 20
NUM_THREADS = 8


def fingerprint(path: Path) -> str | None:
    """Return the fingerprint of a file or folder; None if there is none. Raises OSError. Blocks."""
    if path.is_dir():
        files = read_again(lambda: sorted(_files(path, frozenset())))
    elif path.is_file():
        files = [path]
    else:
        return None
    digest = hashlib.blake2b(digest_size=12)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for file, found in zip(files, pool.map(_file_digest, files), strict=True):
            name = file.relative_to(path) if file != path else ""
            digest.update(f"{name}\n".encode() + found)
    return digest.hexdigest()


def _files(folder: Path, above: frozenset[str]) -> Iterator[Path]:
    """The files of the model; hidden ones are caches, but for Megatron's .metadata.

    ``above``: the folders that this one is in; a link to one of them is not followed. Raises OSError.
    """
    above |= {os.path.realpath(folder)}
    with os.scandir(folder) as listing:
        entries = list(listing)
    for entry in entries:
        is_hidden = entry.name.startswith(".") and entry.name != ".metadata"
        if is_hidden or entry.name.endswith(".md"):
            continue
        if not entry.is_dir():
            if entry.is_file():  # no link to a file that is gone
                yield folder / entry.name
        elif os.path.realpath(entry.path) not in above:
            yield from _files(folder / entry.name, above)


def _file_digest(path: Path) -> bytes:
    return read_again(lambda: _read(path))


def _read(path: Path) -> bytes:
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        digest = hashlib.blake2b(f"{size} bytes".encode(), digest_size=16)
        file.seek(0)
        if size <= WHOLE_BYTES:
            digest.update(file.read())
            return digest.digest()
        if path.suffix == ".safetensors":
            digest.update(_header(file))
        for number in range(NUM_BLOCKS):
            file.seek(number * (size - BLOCK_BYTES) // (NUM_BLOCKS - 1))
            digest.update(file.read(BLOCK_BYTES))
        return digest.digest()


def _header(file: BinaryIO) -> bytes:
    """Names, types, shapes and places of all tensors."""
    length = int.from_bytes(file.read(8), "little")
    return file.read(min(length, LONGEST_HEADER))
