"""Rows of a file by position, read from the disk when they are asked for: JSON Lines, or Parquet.

Input: ``PATH`` or ``PATH@[A:B]``, a slice of its rows as in Python. Output: JSON objects, one a row that is not
blank. What is held in memory is the place of each row, 16 bytes, never the rows: of JSON Lines in the file itself, of
Parquet in a nameless temporary file to which its row groups are streamed once, because a row in the middle of a
compressed column has no place of its own.
"""

from __future__ import annotations

import errno
import json
import os
import re
import tempfile
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from rlpost.errors import DataError

BATCH_ROWS = 256  # of Parquet in memory at once, besides what its reader buffers
_SLICE = re.compile(r"^(?P<path>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")


def split_source(source: str | Path) -> tuple[Path, slice]:
    """``PATH@[A:B]`` as the path and the slice; either end may be left out or count from the end.

    Raises:
        DataError: there is an ``@[`` which is no slice.
    """
    text = str(source)
    found = _SLICE.match(text)
    if found is None:
        if "@[" in text:
            raise DataError(
                f"{text}: a slice of a file is written PATH@[A:B], with whole numbers or nothing for A and B"
            )
        return Path(text), slice(None)
    ends = (int(found[name]) if found[name] not in ("", "-") else None for name in ("start", "stop"))
    return Path(found["path"]), slice(*ends)


def is_parquet(path: Path) -> bool:
    """By the ending of its name."""
    return path.suffix in (".parquet", ".pq")


class Rows:
    """The rows of one source, by position in its slice."""

    def __init__(self, source: str | Path, *, columns: Sequence[str] | None = None) -> None:
        """Index the file; ``columns`` are those of a Parquet file to keep, all unless given.

        Raises:
            DataError: it cannot be read, or has no rows.
        """
        self.path, wanted = split_source(source)
        try:
            self._file = _as_lines(self.path, columns) if is_parquet(self.path) else self.path.open("rb")
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise DataError(
                    f"{self.path}: {tempfile.gettempdir()} has no room for its rows as text; set TMPDIR to a folder "
                    "that has"
                ) from error
            reason = error.strerror or error
            raise DataError(f"{self.path}: cannot read the prompts: {reason}; is the path right?") from error
        self._numbers, self._offsets = _index(self._file)
        self._chosen = range(len(self._numbers))[wanted]
        if not self._chosen:
            of = f" in {source}, which has {len(self._numbers)} rows" if self._numbers else ""
            raise DataError(f"{self.path}: no prompts{of}; it needs one JSON object a line")

    def __len__(self) -> int:
        return len(self._chosen)

    def where(self, position: int) -> str:
        """How a person finds the row: file and line, or row of a Parquet file, from 1."""
        unit = "row" if is_parquet(self.path) else "line"
        return f"{self.path}, {unit} {self._numbers[self._chosen[position]]}"

    def row(self, position: int) -> dict[str, Any]:
        """The row at ``position``, 0 is the first of the slice.

        Raises:
            DataError: naming file and line, when it is not a JSON object.
        """
        at = self._chosen[position]
        start, end = self._offsets[at], self._offsets[at + 1]
        try:
            found = json.loads(os.pread(self._file.fileno(), end - start, start))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{self.where(position)}: not JSON ({error}); each line must be one JSON object") from error
        if not isinstance(found, dict):
            raise DataError(f"{self.where(position)}: {type(found).__name__} instead of a JSON object")
        return found


def _index(file: BinaryIO) -> tuple[array[int], array[int]]:
    """Number and offset of each line that is not blank; behind the offsets, the end of the file."""
    numbers, offsets, offset = array("q"), array("q"), 0
    for number, line in enumerate(file, 1):
        if not line.isspace():
            numbers.append(number)
            offsets.append(offset)
        offset += len(line)
    offsets.append(offset)
    return numbers, offsets


def _as_lines(path: Path, columns: Sequence[str] | None) -> BinaryIO:
    """A Parquet file as JSON Lines in a temporary file without a name. Dates and the like become text."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DataError(f"{path}: reading Parquet needs pyarrow: pip install pyarrow") from None
    try:
        # Buffered columns and no pre-reading: else a whole row group would be in memory.
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as source:
            names = source.schema_arrow.names
            kept = None if columns is None else [name for name in columns if name in names]
            lines = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the rows
            for batch in source.iter_batches(BATCH_ROWS, columns=kept):
                for row in batch.to_pylist():
                    lines.write(json.dumps(row, default=str).encode() + b"\n")
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a Parquet file ({error})") from error
    lines.flush()
    lines.seek(0)
    return lines
