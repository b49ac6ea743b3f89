"""Random access to the rows of a JSON Lines or Parquet file on disk.

Input: ``PATH`` or ``PATH@[A:B]``, a slice of its rows as in Python. Output: one JSON object for
each row that is not blank.

Memory holds only an index of 16 bytes per row. For JSON Lines it refers to the file itself; for
Parquet to an unnamed temporary file of JSON Lines, which is written once, because a row in a
compressed column cannot be read alone. Every row is read from the content that was indexed: a
file of JSON Lines that has changed since is an error.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import math
import os
import re
import struct
import tempfile
import threading
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO

from common.git_lfs import pointer_problem
from rlpost.errors import DataError
from rlpost.tasks.number_text import number_text

BATCH_ROWS = 64  # rows of Parquet in memory at once, besides the reader's buffers
READER: Any = {"pre_buffer": False, "buffer_size": 1 << 20}
"""Buffered columns without pre-reading, to avoid a whole row group in memory."""
MAX_EXPANSION, MIN_BOUND = 100, 256 << 20
"""Bytes of text that a byte of Parquet may become; a file of any size may become MIN_BOUND."""
# escaped or encoded: JSON's \\ud800 to \\udfff, and the bytes of such a code point in UTF-8
_MAY_BE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
DATA_URL = "data:;base64,"
"""Beginning of the text of bytes."""
_URL = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*://")
_SLICE = re.compile(r"^(?P<path>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")


def split_source(source: str | Path) -> tuple[Path, slice]:
    """Split ``PATH@[A:B]`` into path and slice; A and B are optional and may count from the end.

    Raises:
        DataError: the text is a URL, or has an ``@[`` but no valid slice.
    """
    text = str(source)
    if _URL.match(text):
        raise DataError(
            f"{text}: is a URL, and prompts are read from files; download it to a file system that all "
            "nodes share, and give the path"
        )
    match = _SLICE.match(text)
    if match is None:
        if "@[" in text:
            raise DataError(
                f"{text}: a slice of a file is written PATH@[A:B], with whole numbers or nothing for A and B"
            )
        return Path(text), slice(None)
    return Path(match["path"]), slice(_slice_end(match["start"]), _slice_end(match["stop"]))


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


class FileChanged(DataError):
    """A file has another content than when it was indexed: no row of it can be used."""


class Rows:
    """The rows of one source, by position in its slice."""

    def __init__(
        self,
        source: str | Path,
        *,
        columns: Sequence[str] | None = None,
        with_bytes: Sequence[str] = (),
    ) -> None:
        """Index the file.

        ``columns`` are those of a Parquet file to keep, by default all; ``with_bytes`` those in
        which bytes are no text: a row has them as data URLs.

        Raises:
            DataError: the file cannot be read or has no rows.
        """
        self.path, row_slice = split_source(source)
        self._reopening = threading.Lock()
        try:
            if problem := pointer_problem(self.path):
                raise DataError(problem)
            if is_parquet(self.path):
                self._file, self._version = _as_lines(self.path, columns, with_bytes), None
            else:
                self._file = self.path.open("rb")
                self._version = _version(self._file)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise DataError(
                    f"{self.path}: {tempfile.gettempdir()} has not enough space for its rows as text; set TMPDIR to a "
                    "folder with more space"
                ) from error
            raise unreadable(self.path, error) from error
        self._numbers, self._offsets, self._digest = _index(self._file)
        self._chosen = range(len(self._numbers))[row_slice]
        if not self._chosen:
            of = f" in {source}, which has {len(self._numbers)} rows" if self._numbers else ""
            raise DataError(f"{self.path}: no prompts{of}; it needs one JSON object a line")

    def num_bytes(self, position: int) -> int:
        """Return the length of a row as JSON text, without reading it."""
        at = self._chosen[position]
        return self._offsets[at + 1] - self._offsets[at]

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
            FileChanged: see ``line``.
        """
        line = self.line(position)
        try:
            # surrogatepass: ``_check_text`` reports halves of pairs, with the remedy
            row = _DECODER.decode(line.decode(errors="surrogatepass").removeprefix("\ufeff"))
        except (ValueError, RecursionError) as error:
            what = f"not JSON ({error}); each line must be one JSON object"
            if isinstance(error, _RepeatedKey):
                what = f"{error}; keep one of them"
            elif os.pread(self._file.fileno(), 1, 0) == b"[":
                what = (
                    "the file is one JSON array over several lines; write one object a line: "
                    "jq -c '.[]' FILE > FILE.jsonl"
                )
            raise DataError(f"{self.where(position)}: {what}") from error
        if not isinstance(row, dict):
            raise DataError(
                f"{self.where(position)}: {type(row).__name__} instead of a JSON object"
            )
        if _MAY_BE_SURROGATE.search(line):
            self._check_text(row, position)
        return row

    def line(self, position: int) -> bytes:
        """Return the JSON text of the row at ``position``.

        Raises:
            FileChanged: the file has changed since it was indexed.
            OSError: it cannot be read; the error names the file.
        """
        at = self._chosen[position]
        start, end = self._offsets[at], self._offsets[at + 1]
        while True:
            version = self._version
            try:
                # pread has no file position: threads may read rows at the same time
                line = os.pread(self._file.fileno(), end - start, start)
                # compared after reading: what was written before is noticed
                if version is None or _version(self._file) == version:
                    return line
            except OSError as error:
                if error.errno != errno.ESTALE:  # of NFS: the file was replaced
                    error.filename = str(self.path)
                    raise
            self._reopen(version)

    def _reopen(self, version: tuple[int, int, int] | None) -> None:
        """Open the file again if it still has the content that was indexed.

        Raises:
            FileChanged: it has another content.
            OSError: it cannot be read.
        """
        with self._reopening:
            if self._version is not version:
                return  # another thread has done it
            with self.path.open("rb") as file:
                new_version = _version(file)
                digest = hashlib.file_digest(file, hashlib.blake2b).digest()
                is_same_size = new_version[0] == self._offsets[-1]
                if is_same_size and _version(file) != new_version:
                    return  # written while it was read; the caller compares again
                if digest != self._digest:
                    raise FileChanged(
                        f"{self.path}: the file changed while the run reads it, so its rows are no longer those of "
                        "the prompts' order; restore its content, or start a new run with the new file"
                    )
                # keeps the descriptor's number, which other threads may be about to read
                os.dup2(file.fileno(), self._file.fileno(), inheritable=False)
            self._version = new_version

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


def _version(file: BinaryIO) -> tuple[int, int, int]:
    """Return what a change of a file's content changes: size, time of the last write, inode."""
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns, status.st_ino


def _index(file: BinaryIO) -> tuple[array[int], array[int], bytes]:
    """Return number and offset of each line that is not blank, the end, and a digest of all."""
    numbers, offsets, offset = array("q"), array("q"), 0
    digest = hashlib.blake2b()
    for number, line in enumerate(file, 1):
        digest.update(line)
        if not line.isspace():
            numbers.append(number)
            offsets.append(offset)
        offset += len(line)
    offsets.append(offset)
    return numbers, offsets, digest.digest()


class _RepeatedKey(ValueError):
    """A key occurs twice in an object of JSON, and readers differ in which value they take."""


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return an object of JSON. Raises _RepeatedKey."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        repeated = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise _RepeatedKey(f"the key {repeated!r} occurs twice in an object")
    return entries


_DECODER = json.JSONDecoder(object_pairs_hook=_object)  # made once, not for each row


def _too_large(path: Path) -> DataError:
    """Return the error of a file that would fill the disk: a few bytes can repeat long values."""
    size = path.stat().st_size
    return DataError(
        f"{path}: its {size:,} bytes of Parquet become more than {max(MAX_EXPANSION * size, MIN_BOUND):,} bytes of "
        "text; if that is right, convert it to JSON Lines"
    )


def _as_json(value: object) -> str:
    """Return the text of bytes, and of values that JSON does not have, such as dates."""
    if isinstance(value, Decimal) and value.is_finite():
        return number_text(value)
    return value.decode() if isinstance(value, bytes) else str(value)


_SHORT_FLOATS = {"halffloat": ("e", range(3, 6)), "float": ("f", range(6, 10))}
"""Arrow's types of 16 and 32 bits: format of ``struct``, and digits that may identify a number."""


def _has_short_floats(kind: object) -> bool:
    """Whether values of an Arrow type hold floats of 16 or 32 bits, at any depth."""
    return not _SHORT_FLOATS.keys().isdisjoint(re.findall(r"\w+", str(kind)))


def _shortest(value: Any, kind: Any) -> Any:
    """Return a value of an Arrow type with the digits of its floats: 0.1 of 32 bits is 0.1.

    As a Python float, of 64 bits, it would be 0.10000000149011612.
    """
    if value is None or not _has_short_floats(kind):
        return value
    if str(kind) in _SHORT_FLOATS:
        bits, precisions = _SHORT_FLOATS[str(kind)]
        number = float(value)
        texts = (float(f"{number:.{digits}g}") for digits in precisions)
        same = (each for each in texts if struct.pack(bits, each) == struct.pack(bits, number))
        return number if not math.isfinite(number) else next(same, number)
    if isinstance(value, dict):
        return {key: _shortest(entry, kind.field(key).type) for key, entry in value.items()}
    if isinstance(value, list) and hasattr(kind, "value_type"):
        return [_shortest(entry, kind.value_type) for entry in value]
    return _shortest(value, kind.value_type) if isinstance(value, float) else value


def _text_columns(path: Path) -> list[str]:
    """Return the columns of a Parquet file that hold texts or bytes, those in nested ones too."""
    from pyarrow import parquet

    schema = parquet.read_metadata(path).schema
    columns = (schema.column(index) for index in range(len(schema)))
    return [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]


def _num_bytes(values: Any) -> int:
    """Return the bytes of a column in which each text of a dictionary is a copy, at any depth."""
    from pyarrow import compute, types

    if types.is_map(values.type):
        start, end = values.offsets[0].as_py(), values.offsets[-1].as_py()
        return sum(_num_bytes(part[start:end]) for part in (values.keys, values.items))
    if types.is_struct(values.type):
        return sum(map(_num_bytes, values.flatten()))
    if hasattr(values.type, "value_field"):  # lists of every kind, and their views
        return _num_bytes(values.flatten())
    if not types.is_dictionary(values.type):
        return int(values.nbytes)
    kind = values.type.value_type
    is_text = types.is_string(kind) or types.is_binary(kind)
    if not (is_text or types.is_large_string(kind) or types.is_large_binary(kind)):
        return int(values.nbytes)  # of numbers
    lengths = compute.binary_length(values.dictionary)
    return compute.sum(lengths.take(values.indices)).as_py() or 0


def _batches(source: Any, kept: Sequence[str] | None) -> Iterator[Any]:
    """Yield batches of rows, none of several row groups: Arrow joins no nested dictionaries."""
    for group in range(source.num_row_groups):
        yield from source.iter_batches(BATCH_ROWS, row_groups=[group], columns=kept)


def _as_urls(value: Any) -> Any:
    """Replace bytes at any depth by data URLs."""
    if isinstance(value, bytes):
        return DATA_URL + base64.b64encode(value).decode()
    if isinstance(value, dict):
        return {key: _as_urls(entry) for key, entry in value.items()}
    return [_as_urls(entry) for entry in value] if isinstance(value, list) else value


def _as_lines(
    path: Path, columns: Sequence[str] | None, with_bytes: Sequence[str] = ()
) -> BinaryIO:
    """Convert Parquet to JSON Lines in an unnamed temporary file.

    Bytes are UTF-8, or data URLs in the columns ``with_bytes``; dates become text.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DataError(f"{path}: reading Parquet needs pyarrow: pip install pyarrow") from None
    try:
        # Dictionaries, because each reference to a long text would become a copy before its size is
        # known.
        with parquet.ParquetFile(path, **READER, read_dictionary=_text_columns(path)) as source:
            names = source.schema_arrow.names
            kept = None if columns is None else [name for name in columns if name in names]
            counts = Counter(name for name in names if kept is None or name in kept)
            repeated = [name for name, count in counts.items() if count > 1]
            if repeated:
                raise DataError(
                    f"{path}: two columns are called {repeated[0]!r}; rename one, or name the columns to read "
                    "(--metadata-key)"
                )
            kinds = {field.name: field.type for field in source.schema_arrow}
            short = {name: kind for name, kind in kinds.items() if _has_short_floats(kind)}
            lines = tempfile.TemporaryFile()  # noqa: SIM115 - stays open as long as the rows are used
            left = max(MAX_EXPANSION * path.stat().st_size, MIN_BOUND)
            number = 0
            for batch in _batches(source, kept):
                if sum(map(_num_bytes, batch.columns)) > left:
                    raise _too_large(path)
                for row in batch.to_pylist():
                    number += 1
                    row |= {
                        name: _shortest(row[name], short[name]) for name in short if name in row
                    }
                    row |= {name: _as_urls(row[name]) for name in with_bytes if name in row}
                    try:
                        line = json.dumps(row, default=_as_json)
                    except UnicodeDecodeError as error:
                        raise DataError(
                            f"{path}, row {number}: a column of bytes is not UTF-8 ({error}); store text, name "
                            "the columns to read (--metadata-key), or the one with images (--multimodal-keys)"
                        ) from error
                    left -= lines.write(line.encode() + b"\n")
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a Parquet file ({error})") from error
    lines.flush()
    lines.seek(0)
    return lines
