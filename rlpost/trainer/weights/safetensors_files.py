"""The weight files of a Hugging Face folder: their problems, and writing one. Standard library only.

Input: a folder. Output: the file of each tensor, and problems of the files as text; ``TensorFile``
writes a file. Only the header of each file is read, which determines the file's length: 8 bytes
with the length of a JSON text, the text, the tensors (https://huggingface.co/docs/safetensors,
"Format").
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.files import check_path, sync
from common.git_lfs import pointer_problem
from common.units import counted
from rlpost.errors import WeightError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
LONGEST_HEADER = 100_000_000  # the format's own limit
AGAIN = "fetch the model again"
WRITTEN = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
}
"""By torch's name of a dtype: safetensors' name, and bytes; in the order of a file's tensors."""
BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""By safetensors' names of dtypes."""


class TensorFile:
    """A file whose tensors are written one at a time, in any order; it appears when it is closed.

    Its bytes are those of ``safetensors.torch.save_file`` with the metadata ``{"format": "pt"}``.
    """

    def __init__(self, path: Path, tensors: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
        """Create the file of ``tensors``: name -> (shape, torch's name of the dtype)."""
        order = list(WRITTEN)
        names = sorted(tensors, key=lambda name: (order.index(tensors[name][1]), name))
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        stop = 0
        offsets: dict[str, int] = {}
        for name in names:
            shape, dtype = tensors[name]
            kind, width = WRITTEN[dtype]
            start, stop = stop, stop + math.prod(shape) * width
            offsets[name] = start
            header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, stop]}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        first = 8 + len(text)
        self._offsets = {name: first + offset for name, offset in offsets.items()}
        self._path, self._temporary = path, path.with_name(f".{path.name}")
        self.missing = set(names)
        """Tensors that are not written."""
        self.num_bytes = stop
        """Bytes of all tensors."""
        self._file = self._temporary.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, data: memoryview) -> None:
        """Write the bytes of a tensor."""
        self._file.seek(self._offsets[name])
        self._file.write(data)
        self.missing.remove(name)

    def close(self) -> None:
        """Flush the file to disk and give it its name; without all tensors, only close it."""
        self._file.close()
        if not self.missing:
            sync(self._temporary)  # from this host: that of the driver cannot
            os.replace(self._temporary, self._path)


def tensor_files(folder: Path) -> dict[str, str]:
    """Return the file name of each tensor.

    Raises: WeightError: the folder has no safetensors weights, or its index or only file cannot be
        read.
    """
    index = folder / INDEX
    if not index.exists():
        if not (folder / SINGLE).exists():
            raise WeightError(
                f"{folder}: has neither {SINGLE} nor {INDEX}; download the weights into it"
            )
        return dict.fromkeys(_header(folder / SINGLE)[0], SINGLE)
    try:
        file_of = dict(json.loads(index.read_text())["weight_map"])
        for name in set(file_of.values()):
            check_path(name)
        return file_of
    except OSError as error:
        raise WeightError(f"{index}: {_unreadable(error)}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightError(f"{index}: is not a weight index ({error!r}); {AGAIN}") from error


def file_problems(folder: Path) -> list[str]:
    """Return one line per weight file that is missing, truncated or unreadable.

    So is one that lacks a tensor of the index. Empty if all are complete.
    """
    try:
        file_of = tensor_files(folder)
        names = sorted(set(file_of.values()))
    except WeightError as error:
        return [str(error)]
    missing = [name for name in names if not (folder / name).exists()]
    problems = []
    if missing:
        count = f"{len(missing)} of {len(names)}"
        problems.append(
            f"{folder}: {count} files of weights are missing, {missing[0]} first; {AGAIN}"
        )
    for name in names:
        if name in missing:
            continue
        try:
            tensors, num_bytes = _header(folder / name)
            if (file_size := (folder / name).stat().st_size) != num_bytes:
                problems.append(
                    f"{folder / name}: has {file_size} bytes instead of {num_bytes} (by its header); {AGAIN}"
                )
            lacking = sorted(key for key in file_of if file_of[key] == name and key not in tensors)
            if lacking:
                problems.append(
                    f"{folder / INDEX}: names {counted(len(lacking), 'tensor')} that {name} does not have, "
                    f"{lacking[0]} first; "
                    "remove them from the index, or fetch the model again"
                )
        except WeightError as error:
            problems.append(str(error))
    return problems


def _header(path: Path) -> tuple[dict[str, object], int]:
    """Return the header's entry for each tensor, and the number of bytes of a complete file.

    Raises WeightError: it cannot be read, or tensors do not follow one another without a gap.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if length <= LONGEST_HEADER else b""
        tensors = json.loads(text)
        tensors.pop("__metadata__", None)
        misplaced, num_bytes = _places(tensors)
    except OSError as error:
        raise WeightError(f"{path}: {_unreadable(error)}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        problem = pointer_problem(path)
        raise WeightError(
            problem or f"{path}: is not a safetensors file, or is truncated in its header; {AGAIN}"
        ) from error
    if misplaced is not None:
        raise WeightError(
            f"{path}: by its header, tensor {misplaced} overlaps another, leaves a gap, or has another shape; {AGAIN}"
        )
    return tensors, 8 + length + num_bytes


def _places(tensors: Mapping[str, Mapping[str, Any]]) -> tuple[str | None, int]:
    """Return the first tensor that does not follow the one before, and the bytes of all."""
    end = 0
    for first, last, name in sorted(
        (*each["data_offsets"], name) for name, each in tensors.items()
    ):
        bits = BITS[tensors[name]["dtype"]] * math.prod(tensors[name]["shape"])
        if first != end or (last - first) * 8 != bits:
            return name, end
        end = last
    return None, end


def _unreadable(error: OSError) -> str:
    way_out = "; ask its owner for chmod a+r" if isinstance(error, PermissionError) else ""
    return f"cannot be read: {os.strerror(error.errno or 0)}{way_out}"
