"""Read and write a folder with all that a continued episode needs of it: ``save`` and ``unpack``.

``save`` sends an entry for everything below a folder, and the content of each file whose signature
(device, inode, size, times) the driver does not know. A file larger than one answer may be is sent in
parts, one in each answer. No process of the agent is alive meanwhile.
ctime is set by the kernel at every change of a file, so a known signature means a known content;
the driver trusts none that is younger than ``start`` less a tick of the kernel's clock.

A stream consists of entries: length of a header (4 bytes, big-endian), the header as JSON, the
content; length 0 ends it. Links keep any target, and are never followed. Hard links become separate
files, sockets and devices are omitted; extended attributes are not read.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import struct
import time
from collections.abc import Iterator
from typing import BinaryIO, TypedDict

from rlpost.extensions.agents.sandbox.inner.files import (
    CHUNK,
    FILE_FLAGS,
    FOLDER_FLAGS,
    MAX_DEPTH,
    FileRefused,
    Request,
    exactly,
    opened,
    remove,
    subfolder,
    write_all,
)

SIGNATURE = struct.Struct(">QQQqq")  # device, inode, size, mtime and ctime in ns
Kind = str  # "start", "file", "folder", "link", "fifo", "omitted"; "seal", "more" for ``unpack``


class SavedHeader(TypedDict, total=False):
    """Header of an entry; the file type decides which fields it has."""

    kind: Kind
    path: str  # relative; bytes that are not UTF-8 as surrogates
    size: int  # of the content that follows, in bytes
    mode: int  # permission bits
    mtime: int  # ns
    signature: str  # of a file, as hexadecimal digits
    state: str  # of a file's content: "known", "sent", "part" of it, or "later", in another request
    offset: int  # of a part in the file; the last one is "sent"
    file_size: int
    time: int  # of "start": ns, before the folder was read


class _Saving:
    """The stream of one ``save``, and what it may still send."""

    def __init__(self, request: Request, known: frozenset[bytes], stream: BinaryIO) -> None:
        self.known, self.request, self.stream = known, request, stream
        self.bytes, self.files = request["max_bytes"], request["max_files"]
        self.content, self.has_sent = request["max_content"], False
        self.sizes: dict[str, int] = {}  # of what is directly below the folder

    def count(self, path: str, size: int) -> None:
        """Count an entry. Raises ``FileRefused`` past the limits of an archive."""
        self.bytes -= size
        self.files -= 1
        top = path.partition("/")[0]
        self.sizes[top] = self.sizes.get(top, 0) + size
        if self.bytes < 0 or self.files < 0:
            largest = max(self.sizes, key=lambda name: self.sizes[name])
            raise FileRefused(
                f"more than {self.request['max_bytes'] >> 20} MiB or {self.request['max_files']} "
                f"files and folders, {self.sizes[largest] >> 20} MiB of them in {largest[:80]!r} so "
                f"far ({self.request['bounds']}); delete what is not needed, or raise the limits"
            )

    def range_of(self, signature: bytes, size: int) -> range | None:
        """Return which bytes of a file are sent now, None for a later request.

        At most ``max_content`` bytes in all; one file or part is always sent.
        """
        start = self.request["offset"] if signature.hex() == self.request["partial"] else 0
        part = range(start, min(size, start + self.request["max_content"]))
        if self.has_sent and len(part) > self.content:
            return None
        self.has_sent = True
        self.content -= len(part)
        return part

    def send(self, head: SavedHeader, content: bytes = b"") -> None:
        """Write an entry."""
        self.send_header(head, len(content))
        self.stream.write(content)

    def send_header(self, head: SavedHeader, size: int) -> None:
        """Write the header of an entry, whose content of ``size`` bytes follows."""
        text = json.dumps(head | {"size": size}).encode()
        self.stream.write(struct.pack(">I", len(text)) + text)


def save(request: Request) -> None:
    """Write the entries below a folder to standard output.

    Standard input: the known signatures, one after the other.

    Raises:
        FileRefused: the limits of the request are exceeded, or a file changes while it is read.
    """
    with open(0, "rb", closefd=False) as stream:
        data = stream.read()
    step = SIGNATURE.size
    known = frozenset(data[at : at + step] for at in range(0, len(data), step))
    with open(1, "wb", closefd=False) as output, opened(request["path"]) as folder:
        saving = _Saving(request, known, output)
        saving.send({"kind": "start", "path": "", "time": time.time_ns()})
        _save_below(folder, "", saving, 0)
        output.write(struct.pack(">I", 0))


def _save_below(folder: int, prefix: str, saving: _Saving, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise FileRefused(f"folders are nested more than {MAX_DEPTH} deep")
    for name in sorted(os.listdir(folder)):
        path, status = prefix + name, os.lstat(name, dir_fd=folder)
        mode, kind = stat.S_IMODE(status.st_mode), stat.S_IFMT(status.st_mode)
        head: SavedHeader = {"path": path, "mode": mode, "mtime": status.st_mtime_ns}
        saving.count(path, status.st_size if kind == stat.S_IFREG else len(path))
        if kind == stat.S_IFDIR:
            with _readable(folder, name, FOLDER_FLAGS, mode) as below:
                saving.send({"kind": "folder", **head})
                _save_below(below, path + "/", saving, depth + 1)
        elif kind == stat.S_IFREG:
            _save_file(folder, name, head, saving)
        elif kind == stat.S_IFLNK:
            saving.send({"kind": "link", **head}, os.fsencode(os.readlink(name, dir_fd=folder)))
        else:
            saving.send({"kind": "fifo" if kind == stat.S_IFIFO else "omitted", **head})


def _save_file(folder: int, name: str, head: SavedHeader, saving: _Saving) -> None:
    with _readable(folder, name, FILE_FLAGS, head["mode"]) as handle:
        before = os.fstat(handle)
        signature, size = signature_of(before), before.st_size
        head |= {"kind": "file", "signature": signature.hex(), "file_size": size}
        if signature in saving.known:
            return saving.send(head | {"state": "known"})
        part = saving.range_of(signature, size)
        if part is None:
            return saving.send(head | {"state": "later"})
        state = "sent" if part.stop == size else "part"
        saving.send_header(head | {"state": state, "offset": part.start}, len(part))
        os.lseek(handle, part.start, os.SEEK_SET)
        left = len(part)
        while left and (data := os.read(handle, min(CHUNK, left))):
            saving.stream.write(data)
            left -= len(data)
        if left or signature_of(os.fstat(handle)) != signature:
            raise FileRefused(f"{head['path']} changes while it is read")


@contextlib.contextmanager
def _readable(folder: int, name: str, flags: int, mode: int) -> Iterator[int]:
    """Open an entry; one that its owner may not read gets its mode back afterwards."""
    try:
        handle = os.open(name, flags, dir_fd=folder)
        is_changed = False
    except PermissionError:
        os.chmod(name, mode | 0o700, dir_fd=folder)
        handle = os.open(name, flags, dir_fd=folder)
        is_changed = True
    try:
        if is_changed:
            os.fchmod(handle, mode)
        yield handle
    finally:
        os.close(handle)


def signature_of(status: os.stat_result) -> bytes:
    """Return what identifies a state of a file's content."""
    return SIGNATURE.pack(
        status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    )


def unpack(request: Request) -> None:
    """Write the entries on standard input below a folder, which ``clear`` empties before.

    A folder is open for its owner until a "seal" gives it its mode and time. "more" appends to the
    file before it.
    """
    os.makedirs(request["path"], exist_ok=True)
    with open(0, "rb", closefd=False) as stream, opened(request["path"]) as root:
        if request["clear"]:
            for name in os.listdir(root):
                _empty(root, name)
                remove(root, name)
        while length := struct.unpack(">I", exactly(stream, 4))[0]:
            _place(root, json.loads(exactly(stream, length)), stream)


def _empty(folder: int, name: str) -> None:
    """Let the owner delete what is below an entry, whatever the modes of folders are."""
    if not stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
        return
    with contextlib.suppress(PermissionError):  # of an image, whose owner is another user
        os.chmod(name, 0o700, dir_fd=folder)
    handle = os.open(name, FOLDER_FLAGS, dir_fd=folder)
    for below in os.listdir(handle):
        _empty(handle, below)
    os.close(handle)


def _place(root: int, head: SavedHeader, stream: BinaryIO) -> None:
    *parents, name = head["path"].split("/")
    folder = os.dup(root)
    try:
        for part in parents:
            below = subfolder(folder, part)
            os.close(folder)
            folder = below
        _create(folder, name, head, stream)
    finally:
        os.close(folder)


def _create(folder: int, name: str, head: SavedHeader, stream: BinaryIO) -> None:
    times = (head["mtime"], head["mtime"])
    if head["kind"] in ("folder", "seal"):
        handle = subfolder(folder, name)
        if head["kind"] == "seal":
            os.utime(handle, ns=times)
            os.fchmod(handle, head["mode"])
        os.close(handle)
        return
    if head["kind"] != "more":
        remove(folder, name)
    if head["kind"] == "link":
        target = os.fsdecode(exactly(stream, head["size"]))
        os.symlink(target, name, dir_fd=folder)
    elif head["kind"] == "fifo":
        os.mkfifo(name, dir_fd=folder)
        os.chmod(name, head["mode"], dir_fd=folder)
    else:
        how = os.O_APPEND if head["kind"] == "more" else os.O_CREAT | os.O_EXCL
        flags = os.O_WRONLY | how | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(name, flags, 0o600, dir_fd=folder)
        left = head["size"]
        while left:
            left -= len(data := exactly(stream, min(CHUNK, left)))
            write_all(handle, data)
        os.fchmod(handle, head["mode"])
        os.close(handle)
    os.utime(name, ns=times, dir_fd=folder, follow_symlinks=False)
