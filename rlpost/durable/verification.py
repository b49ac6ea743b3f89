"""Compare the files of committed checkpoints with the digests of their commit.

Input: folders that ``rlpost.durable.commit`` made. Storage that fails may leave blocks of zeros in a
file of the right size, which no reader of tensors notices.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from rlpost.durable.commit import COMMITTED, MANIFEST, candidates, defect, difference
from rlpost.durable.run_files import read_again
from rlpost.errors import CheckpointError


def check_files(
    folder: str | Path, names: Collection[str] | None = None, *, part: int = 0, parts: int = 1
) -> None:
    """Compare the files of a committed checkpoint with its manifest.

    ``parts`` processes divide the files: each reads about as many bytes. A folder without a manifest,
    such as a conversion, has no digests to compare. A read that fails for a moment is repeated.

    Args:
        folder: a checkpoint, or a folder in it.
        names: of the files in ``folder`` that are compared; None: all, also those of its folders.
        part: which of the parts this process reads.
        parts: their number.

    Raises:
        CheckpointError: a file is missing or differs.
        OSError: a file cannot be read.
    """
    folder = Path(folder)
    root = next((one for one in (folder, folder.parent) if (one / COMMITTED).is_file()), None)
    if root is None:
        return
    try:
        files = json.loads(read_again((root / MANIFEST).read_text))["files"]
        read = None if names is None else {folder / name for name in names}
        inside = {
            name: one
            for name, one in files.items()
            if (root / name).is_relative_to(folder) and (read is None or root / name in read)
        }
        by_size = sorted(inside, key=lambda name: (-inside[name]["size_bytes"], name))
        entries = {name: inside[name] for name in by_size[part::parts]}
        problem = read_again(lambda: difference(root, entries, checksums=True))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{MANIFEST} is malformed: {type(error).__name__}: {error}"
    if problem is not None:
        raise CheckpointError(f"{folder}: {problem}; use another checkpoint")


def verified(folder: Path) -> list[tuple[Path, str | None]]:
    """Return all checkpoints, newest first, and why one is not valid; every byte is read.

    Raises CheckpointError: ``folder`` cannot be listed.
    """
    return [(path, defect(path)) for path in candidates(folder)]
