"""Files of a sandbox: read one, write one, copy a folder out and in.

Each operation reads standard input and writes standard output (``inner.init.perform``). A snapshot is
a stream of entries: length of a header (4 bytes, big-endian), the header as JSON, the content.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import struct
from collections.abc import Iterator
from typing import BinaryIO, TypedDict

CHUNK = 1 << 16
MAX_DEPTH = 64
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Request(TypedDict, total=False):
    """A request to the first process: ``op`` and the fields that belong to it."""

    op: str
    wall_seconds: float
    cpu_seconds: float
    argv: list[str]  # this and the next two are for ``run``
    cwd: str
    env: dict[str, str]
    path: str  # this and the rest are for operations of this module
    limit: int  # bytes
    executable: bool
    max_bytes: int
    max_files: int
    max_content: int  # bytes of contents in one answer of ``save``
    partial: str  # signature of a file of which the driver has ``offset`` bytes
    offset: int
    bounds: str  # the settings behind ``max_bytes`` and ``max_files`` of ``save``, for messages
    clear: bool  # empty the folder before ``unpack``


class FileAnswer(TypedDict, total=False):
    """An answer of the first process: how a command ended, or why it could not be confined."""

    ended: str
    status: int
    error: str
    error_text: str
    failed: str  # the sandbox did not start


class EntryHeader(TypedDict, total=False):
    """Header of an entry of a snapshot; ``size`` of its content in bytes."""

    path: str
    kind: str
    size: int
    executable: bool
    reason: str


class FileRefused(Exception):
    """The operation breaks a rule, which the text names."""


def read(request: Request) -> None:
    """Write a regular file of at most ``limit`` bytes to standard output."""
    handle = os.open(request["path"], os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        raise FileRefused(f"{request['path']}: not a regular file")
    remaining = request["limit"]
    while data := os.read(handle, CHUNK):
        remaining -= len(data)
        if remaining < 0:
            raise FileRefused(f"{request['path']}: larger than {request['limit']} bytes")
        write_all(1, data)


def write(request: Request) -> None:
    """Write standard input to a file, following links as the agent's own programs do."""
    path = request["path"]
    os.makedirs(os.path.dirname(path) or "/", exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    handle = os.open(path, flags, 0o644)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        raise FileRefused(f"{path}: not a regular file")
    os.ftruncate(handle, 0)
    while data := os.read(0, CHUNK):
        write_all(handle, data)
    if request["executable"]:
        os.fchmod(handle, 0o755)
    os.close(handle)


def snapshot(request: Request) -> None:
    """Write all entries of a folder to standard output.

    No process of the agent is alive, so nothing changes the folder; links are never followed.
    """
    budget = _Budget(request["max_bytes"], request["max_files"])
    with opened(request["path"]) as folder:
        _walk(folder, "", budget, 0)
    write_all(1, struct.pack(">I", 0))


class _Budget:
    def __init__(self, max_bytes: int, max_files: int) -> None:
        self.bytes, self.files = max_bytes, max_files

    def take(self, size: int) -> None:
        self.bytes -= size
        self.files -= 1
        if self.bytes < 0 or self.files < 0:
            raise FileRefused("the folder is larger than the limits of a snapshot")


@contextlib.contextmanager
def opened(path: str) -> Iterator[int]:
    """Open an absolute folder without following any link on the way."""
    handle = os.open("/", FOLDER_FLAGS)
    for part in path.strip("/").split("/"):
        try:
            below = os.open(part, FOLDER_FLAGS, dir_fd=handle) if part else os.dup(handle)
        except OSError as error:
            raise FileRefused(f"{path}: {part} is not a folder ({error.strerror})") from None
        finally:
            os.close(handle)
        handle = below
    try:
        yield handle
    finally:
        os.close(handle)


def _walk(folder: int, prefix: str, budget: _Budget, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise FileRefused(f"folders are nested more than {MAX_DEPTH} deep")
    for name in sorted(os.listdir(folder)):
        path = prefix + name
        try:
            path.encode("utf-8")
        except UnicodeEncodeError:
            budget.take(0)
            _refuse(repr(path), "name is not UTF-8")
            continue
        budget.take(len(path))
        mode = os.lstat(name, dir_fd=folder).st_mode
        if stat.S_ISLNK(mode):
            _link(folder, name, path)
        elif stat.S_ISDIR(mode):
            _folder(folder, name, path, budget, depth)
        elif stat.S_ISREG(mode):
            _file(folder, name, path, budget)
        else:
            _refuse(path, "special file")


def _folder(parent: int, name: str, path: str, budget: _Budget, depth: int) -> None:
    try:
        handle = os.open(name, FOLDER_FLAGS, dir_fd=parent)
    except OSError as error:
        return _refuse(path, str(error.strerror))
    _send({"path": path, "kind": "folder"})
    try:
        _walk(handle, path + "/", budget, depth + 1)
    except PermissionError as error:
        _refuse(path, str(error.strerror))
    finally:
        os.close(handle)
    return None


def _link(folder: int, name: str, path: str) -> None:
    target = os.readlink(name, dir_fd=folder)
    try:
        content = target.encode("utf-8")
    except UnicodeEncodeError:
        return _refuse(path, "target of the link is not UTF-8")
    if leads_outside(path, target):
        return _refuse(path, "link leads outside")
    return _send({"path": path, "kind": "link"}, content)


def leads_outside(path: str, target: str) -> bool:
    """Return whether a link at the relative ``path`` leads out of the folder of a snapshot.

    The check is lexical: the folder of the link, joined with the target, must not leave it.
    """
    joined = os.path.normpath(os.path.join(os.path.dirname(path), target))
    return target.startswith("/") or joined == ".." or joined.startswith("../")


def _file(folder: int, name: str, path: str, budget: _Budget) -> None:
    try:
        handle = os.open(name, FILE_FLAGS, dir_fd=folder)
    except OSError as error:
        return _refuse(path, str(error.strerror))
    with open(handle, "rb") as file:
        status = os.fstat(handle)
        budget.take(status.st_size)
        content = file.read(status.st_size)
    executable = bool(status.st_mode & 0o100)
    return _send({"path": path, "kind": "file", "executable": executable}, content)


def _refuse(path: str, reason: str) -> None:
    _send({"path": path, "kind": "refused", "reason": reason})


def _send(header: dict[str, object], content: bytes = b"") -> None:
    head = json.dumps(header | {"size": len(content)}).encode()
    write_all(1, struct.pack(">I", len(head)) + head)
    write_all(1, content)


def restore(request: Request) -> None:
    """Write the entries on standard input below a folder; they replace existing files.

    A link or file in the place of an entry or of its folder is removed, never followed.
    """
    os.makedirs(request["path"], exist_ok=True)
    with open(0, "rb", closefd=False) as stream, opened(request["path"]) as root:
        while length := struct.unpack(">I", exactly(stream, 4))[0]:
            header = json.loads(exactly(stream, length))
            _place(root, header, exactly(stream, header["size"]))


def _place(root: int, header: EntryHeader, content: bytes) -> None:
    *parents, name = header["path"].split("/")
    handle = os.dup(root)
    try:
        for part in parents:
            below = subfolder(handle, part)
            os.close(handle)
            handle = below
        if header["kind"] == "folder":
            os.close(subfolder(handle, name))
            return
        remove(handle, name)
        if header["kind"] == "link":
            os.symlink(content.decode(), name, dir_fd=handle)
            return
        mode = 0o755 if header["executable"] else 0o644
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        target = os.open(name, flags, mode, dir_fd=handle)
        write_all(target, content)
        os.close(target)
    finally:
        os.close(handle)


def subfolder(parent: int, name: str) -> int:
    """Open a folder of an open folder; create it, or replace what is not one."""
    if name in ("", ".", ".."):
        raise FileRefused(f"{name!r} is not a name")
    try:
        return os.open(name, FOLDER_FLAGS, dir_fd=parent)
    except FileNotFoundError:
        pass
    except OSError:
        remove(parent, name)
    os.mkdir(name, 0o755, dir_fd=parent)
    return os.open(name, FOLDER_FLAGS, dir_fd=parent)


def remove(parent: int, name: str) -> None:
    """Remove an entry of an open folder, with everything below it."""
    if name in ("", ".", ".."):
        raise FileRefused(f"{name!r} is not a name")
    try:
        mode = os.lstat(name, dir_fd=parent).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(mode):
        os.unlink(name, dir_fd=parent)
        return
    handle = os.open(name, FOLDER_FLAGS, dir_fd=parent)
    for below in os.listdir(handle):
        remove(handle, below)
    os.close(handle)
    os.rmdir(name, dir_fd=parent)


def exactly(stream: BinaryIO, size: int) -> bytes:
    """Read ``size`` bytes of a stream. Raises ``FileRefused`` at its end."""
    data = stream.read(size)
    if len(data) != size:
        raise FileRefused("the entries are incomplete")
    return data


def write_all(handle: int, data: bytes) -> None:
    """Write all of ``data``; the kernel may accept less per call."""
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]
