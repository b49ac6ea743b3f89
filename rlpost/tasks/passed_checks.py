"""Records of checks that passed, so that a check of the same input is not repeated.

Input: the name and the arguments of a check, and the files that it reads. Output: whether it passed
before on this machine. A record is an empty file in the user's cache folder (0700), named by a
digest of everything that decides the result: arguments, contents of the files, the source code of
rlpost and the installed packages. A change of any of them gives another name.

Records never fail a check: without a cache folder it is repeated.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

import common
import rlpost
from common.files import is_private
from rlpost.errors import RlpostError

MAX_RECORDS = 256
"""Maximum number of records; the oldest are removed."""
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
_TEMPLATES = "additional_chat_templates"  # the only folder that a tokenizer is loaded from as well
_CODE = {".py", ".json"}
_SOURCES = tuple(Path(path) for package in (rlpost, common) for path in package.__path__)


class PassedCheck:
    """The record of one check of one input."""

    def __init__(self, name: str, arguments: str, list_files: Callable[[], Iterable[Path]]) -> None:
        """Compute the digest of the input; ``list_files`` returns the files that the check reads."""
        self._name, self._arguments, self._list_files = name, arguments, list_files
        self._digest = self._digest_of_input(_code)

    @property
    def exists(self) -> bool:
        """Whether the check passed before."""
        with suppress(OSError):
            folder = cache_folder()
            if self._digest is not None and is_private(folder):
                return (folder / self._digest).is_file()
        return False

    def record(self) -> None:
        """Record that the check passed, unless its input has changed meanwhile."""
        if self._digest is None or self._digest != self._digest_of_input(_code.__wrapped__):
            return
        with suppress(OSError):
            folder = cache_folder()
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            if is_private(folder):
                _remove_oldest(folder)
                (folder / self._digest).touch(mode=0o600)

    def _digest_of_input(self, code: Callable[[], str]) -> str | None:
        """Return the digest; None if a file cannot be read or named."""
        try:
            files = _digest_of_files(self._list_files())
            parts = [self._name, self._arguments, code(), files]
        except (OSError, RlpostError):  # the check reports it
            return None
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def cache_folder() -> Path:
    """The folder of the records: ``rlpost/passed_checks`` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    caches = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~/.cache"))
    return caches / "rlpost/passed_checks"


def model_files(folder: Path) -> list[Path]:
    """The files of a model folder that configuration and tokenizer can be loaded from.

    Raises OSError.
    """
    paths = [*folder.iterdir(), *(folder / _TEMPLATES).glob("*")]
    return [path for path in paths if path.suffix not in _WEIGHTS and path.is_file()]


def _digest_of_files(files: Iterable[Path]) -> str:
    """A digest of paths and contents. Raises OSError."""
    digest = hashlib.sha256()
    for path in sorted(set(files)):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{path}\0{content}\n".encode())
    return digest.hexdigest()


@cache
def _code() -> str:
    """rlpost's sources as a digest, and the installed packages with their versions.

    Raises OSError.
    """
    sources = [path for root in _SOURCES for path in root.rglob("*") if path.suffix in _CODE]
    packages = [
        name
        for folder in filter(os.path.isdir, sys.path)
        for name in sorted(os.listdir(folder))
        if name.endswith((".dist-info", ".egg-info"))
    ]
    return json.dumps([_digest_of_files(sources), sys.version, packages])


def _remove_oldest(folder: Path) -> None:
    records = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)
    for path in records[: max(0, len(records) - MAX_RECORDS + 1)]:
        path.unlink(missing_ok=True)
