"""A fingerprint of a folder of weights, by its content: fast for files of any size.

It covers the name and size of each file, small files and the headers of safetensors in full, and
NUM_BLOCKS blocks of each other file. Weights that were trained or converted again differ in every
tensor, so a sample finds them; an edit between two blocks that keeps every size is not found.
Texts for readers, hidden files and times are not part of it: a copy has an equal fingerprint.
"""

from __future__ import annotations

import hashlib
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
        files = sorted(each for each in path.rglob("*") if _counts(each, path) and each.is_file())
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


def _counts(file: Path, folder: Path) -> bool:
    """Whether a file is one of the model: hidden ones are caches, but for Megatron's .metadata."""
    names = file.relative_to(folder).parts
    is_hidden = any(name.startswith(".") and name != ".metadata" for name in names)
    return not is_hidden and file.suffix != ".md"


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
