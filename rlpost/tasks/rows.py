"""Random access to the rows of a JSON Lines or Parquet file on disk.

Input: ``PATH`` or ``PATH@[A:B]``, a slice of its rows as in Python. Output: one JSON object for
each row that is not blank.

Memory holds only an index of 16 bytes per row. For JSON Lines it refers to the file itself; for
Parquet to an unnamed temporary file of JSON Lines, which is written once, because a row in a
compressed column cannot be read alone.
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
from typing import BinaryIO

from rlpost.errors import DataError

BATCH_ROWS = 64  # rows of Parquet in memory at once, besides the reader's buffers
MAX_EXPANSION, MIN_BOUND = 100, 256 << 20
"""Bytes of text that a byte of Parquet may become; a file of any size may become MIN_BOUND."""
# escaped or encoded: JSON's \\ud800 to \\udfff, and the bytes of such a code point in UTF-8
_MAY_BE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
_SLICE = re.compile(r"^(?P<path>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")


def split_source(source: str | Path) -> tuple[Path, slice]:
    """Split ``PATH@[A:B]`` into path and slice; A and B are optional and may count from the end.

    Raises:
        DataError: the text has an ``@[`` but no valid slice.
    """
    text = str(source)
    found = _SLICE.match(text)
    if found is None:
        if "@[" in text:
            raise DataError(
                f"{text}: a slice of a file is written PATH@[A:B], with whole numbers or nothing for A and B"
            )
        return Path(text), slice(None)
    return Path(found["path"]), slice(_slice_end(found["start"]), _slice_end(found["stop"]))


def _slice_end(text: str) -> int | None:
    return None if text in ("", "-") else int(text)


def num_rows(source: str | Path) -> int:
    """Return the number of rows of a source, without an index of them; 0 is possible.

    Raises:
        DataError: the file cannot be read.
    """
    path, row_slice = split_source(source)
    try:
        if is_parquet(path):
            from pyarrow import ArrowException, parquet

            try:
                count = parquet.ParquetFile(path).metadata.num_rows
            except ArrowException as error:
                raise DataError(f"{path}: not a Parquet file ({error})") from error
        else:
            with path.open("rb") as file:
                count = sum(not line.isspace() for line in file)
    except ImportError:
        raise DataError(f"{path}: reading Parquet needs pyarrow: pip install pyarrow") from None
    except OSError as error:
        raise unreadable(path, error) from error
    return len(range(count)[row_slice])


def unreadable(path: Path, error: OSError) -> DataError:
    """Return the error of a file that cannot be read."""
    reason = error.strerror or error
    return DataError(f"{path}: cannot read the prompts: {reason}; is the path right?")


def is_parquet(path: Path) -> bool:
    """Whether the file name has a suffix of Parquet files."""
    return path.suffix in (".parquet", ".pq")


class Rows:
    """The rows of one source, by position in its slice."""

    def __init__(self, source: str | Path, *, columns: Sequence[str] | None = None) -> None:
        """Index the file; ``columns`` are those of a Parquet file to keep, by default all.

        Raises:
            DataError: the file cannot be read or has no rows.
        """
        self.path, row_slice = split_source(source)
        try:
            self._file = (
                _as_lines(self.path, columns) if is_parquet(self.path) else self.path.open("rb")
            )
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise DataError(
                    f"{self.path}: {tempfile.gettempdir()} has not enough space for its rows as text; set TMPDIR to a "
                    "folder with more space"
                ) from error
            raise unreadable(self.path, error) from error
        self._numbers, self._offsets = _index(self._file)
        self._chosen = range(len(self._numbers))[row_slice]
        if not self._chosen:
            of = f" in {source}, which has {len(self._numbers)} rows" if self._numbers else ""
            raise DataError(f"{self.path}: no prompts{of}; it needs one JSON object a line")

    def __len__(self) -> int:
        return len(self._chosen)

    def where(self, position: int) -> str:
        """Describe the place of a row in messages: file, and line or row counted from 1."""
        unit = "row" if is_parquet(self.path) else "line"
        return f"{self.path}, {unit} {self._numbers[self._chosen[position]]}"

    def row(self, position: int) -> dict[str, object]:
        """Return the row at ``position``; 0 is the first of the slice.

        Raises:
            DataError: the row is not a JSON object; the message names file and line.
        """
        at = self._chosen[position]
        start, end = self._offsets[at], self._offsets[at + 1]
        # pread has no file position: threads may read rows at the same time
        line = os.pread(self._file.fileno(), end - start, start)
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{self.where(position)}: not JSON ({error}); each line must be one JSON object"
            ) from error
        if not isinstance(row, dict):
            raise DataError(
                f"{self.where(position)}: {type(row).__name__} instead of a JSON object"
            )
        if _MAY_BE_SURROGATE.search(line):
            self._check_text(row, position)
        return row

    def _check_text(self, row: dict[str, object], position: int) -> None:
        """Raise DataError for half of a surrogate pair, which no tokenizer accepts."""
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start])[1:-1]
            raise DataError(
                f"{self.where(position)}: {half} is half of a surrogate pair, which is no character; write the "
                "whole character, or U+FFFD in its place"
            ) from error


def _index(file: BinaryIO) -> tuple[array[int], array[int]]:
    """Return number and offset of each line that is not blank, and the end of the file."""
    numbers, offsets, offset = array("q"), array("q"), 0
    for number, line in enumerate(file, 1):
        if not line.isspace():
            numbers.append(number)
            offsets.append(offset)
        offset += len(line)
    offsets.append(offset)
    return numbers, offsets


def _too_large(path: Path) -> DataError:
    """Return the error of a file that would fill the disk: a few bytes can repeat long values."""
    size = path.stat().st_size
    return DataError(
        f"{path}: its {size:,} bytes of Parquet become more than {max(MAX_EXPANSION * size, MIN_BOUND):,} bytes of "
        "text; if that is right, convert it to JSON Lines"
    )


def _as_json(value: object) -> str:
    """Return the text of bytes, and of values that JSON does not have, such as dates."""
    return value.decode() if isinstance(value, bytes) else str(value)


def _as_lines(path: Path, columns: Sequence[str] | None) -> BinaryIO:
    """Convert Parquet to JSON Lines in an unnamed temporary file; bytes are UTF-8, dates become text."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DataError(f"{path}: reading Parquet needs pyarrow: pip install pyarrow") from None
    try:
        # Buffered columns without pre-reading, to avoid a whole row group in memory.
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as source:
            names = source.schema_arrow.names
            kept = None if columns is None else [name for name in columns if name in names]
            lines = tempfile.TemporaryFile()  # noqa: SIM115 - stays open as long as the rows are used
            left = max(MAX_EXPANSION * path.stat().st_size, MIN_BOUND)
            number = 0
            for batch in source.iter_batches(BATCH_ROWS, columns=kept):
                if batch.nbytes > left:
                    raise _too_large(path)
                for row in batch.to_pylist():
                    number += 1
                    try:
                        line = json.dumps(row, default=_as_json)
                    except UnicodeDecodeError as error:
                        raise DataError(
                            f"{path}, row {number}: a column of bytes is not UTF-8 ({error}); store text, or name "
                            "the columns to read (--metadata-key)"
                        ) from error
                    left -= lines.write(line.encode() + b"\n")
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a Parquet file ({error})") from error
    lines.flush()
    lines.seek(0)
    return lines
