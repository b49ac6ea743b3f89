"""Interception of every file operation of an attempt, before and after it happens.

Functions of ``os`` and ``io`` are replaced. For paths below the run's folder, while an attempt
runs, they call the attempt's hooks and update the model of what is durable. All other calls are
passed through.

    before(attempt, op)    may raise OSError (a fault) or Killed (the end of the process), or pause
    after(attempt, op)     the same, after the operation

A killed attempt changes nothing more: each later operation raises Killed again, because ``finally``
blocks and destructors, which a SIGKILL would skip, still run here.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.crash_consistency.durability import File, Folder, Link, Model, Node

NAMES = (
    *(
        "open",
        "write",
        "pwrite",
        "fsync",
        "fdatasync",
        "close",
        "rename",
        "replace",
        "link",
        "symlink",
        "unlink",
    ),
    *(
        "remove",
        "rmdir",
        "mkdir",
        "truncate",
        "ftruncate",
        "listdir",
        "scandir",
        "stat",
        "lstat",
        "read",
        "pread",
    ),
    "getpid",
)
REAL = SimpleNamespace(**{name: getattr(os, name) for name in NAMES}, io_open=io.open)
CHANGING = frozenset(
    {"create", "clear", "write", "fsync", "rename", "link", "unlink", "mkdir", "rmdir", "resize"}
)
ROOM = threading.local()  # .attempt: the attempt that this thread belongs to


class Killed(SystemExit):
    """The process has ended. As a SystemExit it stops asyncio and passes ``except Exception``."""


class Hung(SystemExit):
    """The event loop waits for storage that never answers, or has nothing left to wait for."""


@dataclass(frozen=True, slots=True)
class Op:
    """One file operation.

    ``number`` counts the changing operations of the attempt, ``place`` all operations, from 0.
    """

    kind: str
    path: str  # relative to the run's folder; "old -> new" of a rename or link
    number: int
    place: int

    @property
    def changes(self) -> bool:
        """Whether the operation may change the folder, or what of it is durable."""
        return self.kind in CHANGING


class Hook:
    """A hook that does nothing. ``may_hang``: some operation may never return."""

    may_hang = False

    def before(self, attempt: Attempt, op: Op) -> None:
        """Called before an operation."""

    def after(self, attempt: Attempt, op: Op) -> None:
        """Called after an operation."""

    def shorten(self, attempt: Attempt, op: Op, size: int) -> int:
        """Return how many of ``size`` bytes a write accepts."""
        return size

    def over(self) -> None:
        """Called when the attempt has ended."""


@dataclass(eq=False)
class Attempt:
    """An attempt and its file operations."""

    disk: Disk
    name: int
    hooks: Sequence[Hook] = ()
    is_dead: bool = False
    num_changes: int = 0
    num_ops: int = 0
    ops: list[Op] = field(default_factory=list)
    clock: float = 0.0  # virtual seconds of its event loop
    hung: str = ""  # why it never ends
    waits: bool = False  # its event loop runs, so a stop request would end it
    drawn: int = 0  # calls of secrets.token_hex
    workers: list[Any] = field(default_factory=list)  # threads that it started
    ready: list[Any] = field(default_factory=list)  # threads that have not run yet
    turns: int = 0  # iterations of its event loop
    lag: int = 0  # iterations by which the journal's thread is late
    sleepers: list[Any] = field(default_factory=list)  # threads that hang in storage for a time

    @contextmanager
    def active(self) -> Iterator[None]:
        """Attribute this thread's operations to the attempt."""
        before = getattr(ROOM, "attempt", None)
        ROOM.attempt = self
        try:
            yield
        finally:
            ROOM.attempt = before

    def die(self) -> Killed:
        """End the process; the caller raises the returned exception."""
        self.is_dead = True
        return Killed("killed")

    def act(self, kind: str, path: str, perform: Callable[[], Any]) -> Any:
        """Perform one operation between its hooks."""
        if self.is_dead:
            raise Killed("killed before")
        op = Op(kind, path, self.num_changes, self.num_ops)
        self.num_ops += 1
        self.num_changes += op.changes
        self.ops.append(op)
        for hook in self.hooks:
            hook.before(self, op)
        found = perform()
        for hook in self.hooks:
            hook.after(self, op)
        return found


@dataclass(eq=False)
class Opened:
    """An open file or folder below the run's folder."""

    node: Node
    path: str
    appends: bool
    attempt: Attempt
    raw: io.FileIO | None = None  # the file object that will close it


class Disk:
    """The real run folder, and the model of what of it is durable."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._prefix = str(root)
        self.model = Model(root)
        self.opened: dict[int, Opened] = {}

    def inner(
        self, path: Any, dir_fd: int | None = None
    ) -> tuple[str, tuple[str, ...], Folder] | None:
        """Return (path below the root, its parts from a start folder, that folder), else None."""
        if isinstance(path, int):
            return None
        text = os.fsdecode(path)
        if text.startswith("/"):
            if not text.startswith(self._prefix) or text[
                len(self._prefix) : len(self._prefix) + 1
            ] not in ("", "/"):
                return None
            parts = tuple(
                part for part in text[len(self._prefix) :].split("/") if part and part != "."
            )
            return "/".join(parts), parts, self.model.root
        if dir_fd is None or dir_fd not in self.opened:
            return None
        opened = self.opened[dir_fd]
        assert isinstance(opened.node, Folder), opened.path
        parts = tuple(part for part in text.split("/") if part and part != ".")
        return f"{opened.path}/{text}", parts, opened.node

    def parent(self, parts: tuple[str, ...], start: Folder) -> tuple[Folder, str]:
        """Return the folder of a path in the model, and the last name of the path."""
        found = self.model.find(parts[:-1], start)
        assert isinstance(found, Folder), parts
        return found, parts[-1]

    def put(self, path: Path, data: bytes) -> None:
        """Write a durable file as another process would, such as the batch host."""
        REAL.io_open(path, "wb").close()
        with REAL.io_open(path, "wb") as file:
            file.write(data)
        folder, name = self.parent(path.relative_to(self.root).parts, self.model.root)
        node = File(bytearray(data))
        node.sync()
        folder.entries[name] = folder.synced[name] = node

    def put_folder(self, path: Path) -> None:
        """Make a durable empty folder as another process would."""
        REAL.mkdir(path, 0o700)
        folder, name = self.parent(path.relative_to(self.root).parts, self.model.root)
        folder.entries[name] = folder.synced[name] = Folder()

    def forget(self, attempt: Attempt) -> None:
        """Close the descriptors that a killed attempt left open."""
        for descriptor, opened in list(self.opened.items()):
            if opened.attempt is attempt:
                del self.opened[descriptor]
                if opened.raw is None:
                    REAL.close(descriptor)
                else:
                    io.FileIO.close(opened.raw)


def _ours(
    path: Any, dir_fd: int | None = None
) -> tuple[Attempt, str, tuple[str, ...], Folder] | None:
    attempt = getattr(ROOM, "attempt", None)
    if attempt is None:
        return None
    found = attempt.disk.inner(path, dir_fd)
    return None if found is None else (attempt, *found)


def _descriptor(descriptor: Any) -> tuple[Attempt, Opened] | None:
    attempt = getattr(ROOM, "attempt", None)
    if attempt is None or not isinstance(descriptor, int):
        return None
    opened = attempt.disk.opened.get(descriptor)
    return None if opened is None else (attempt, opened)


def _open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    found = _ours(path, dir_fd)
    if found is None:
        return REAL.open(path, flags, mode, dir_fd=dir_fd)
    return _opened(*found, flags, lambda: REAL.open(path, flags, mode, dir_fd=dir_fd))


def _opened(
    attempt: Attempt,
    name: str,
    parts: tuple[str, ...],
    start: Folder,
    flags: int,
    perform: Callable[[], int],
) -> int:
    """Open below the root; ``perform`` returns the descriptor."""
    model = attempt.disk.model
    writes = flags & (os.O_WRONLY | os.O_RDWR)

    def looked_up() -> tuple[Node | None, str]:
        there = model.find(parts, start)
        if isinstance(there, Link):
            there = model.find((*parts[:-1], *there.target.split("/")), start)
        if there is None and flags & os.O_CREAT:
            return there, "create"
        is_cleared = (
            isinstance(there, File) and writes and flags & os.O_TRUNC and not flags & os.O_EXCL
        )
        return there, "clear" if is_cleared else "open"

    def open_and_note() -> int:
        node, kind = looked_up()  # again: during a pause another attempt may have made the file
        descriptor = perform()
        if kind == "create":
            node = File()
            model.change((*attempt.disk.parent(parts, start), node))
        elif kind == "clear":
            assert isinstance(node, File)
            node.resize(0)
        assert node is not None, name
        attempt.disk.opened[descriptor] = Opened(node, name, bool(flags & os.O_APPEND), attempt)
        return descriptor

    return attempt.act(looked_up()[1], name, open_and_note)


def _close(descriptor: int) -> None:
    found = _descriptor(descriptor)
    if found is not None:
        del found[0].disk.opened[descriptor]
    elif getattr(ROOM, "attempt", None) is not None and ROOM.attempt.is_dead:
        return  # already closed, and the number may belong to another file now
    REAL.close(descriptor)


def _written(
    attempt: Attempt, opened: Opened, data: Any, offset: int, write: Callable[[bytes], int]
) -> int:
    """Write the data, or as much of it as the hooks allow."""
    data = bytes(data)
    assert isinstance(opened.node, File), opened.path

    def write_and_note() -> int:
        assert isinstance(opened.node, File)
        size = len(data)
        for hook in attempt.hooks:
            size = hook.shorten(attempt, attempt.ops[-1], size)
        count = write(data[:size])
        opened.node.write(len(opened.node.data) if opened.appends else offset, data[:count])
        return count

    return attempt.act("write", opened.path, write_and_note)


def _write(descriptor: int, data: Any) -> int:
    found = _descriptor(descriptor)
    if found is None:
        return REAL.write(descriptor, data)
    offset = 0 if found[1].appends else os.lseek(descriptor, 0, os.SEEK_CUR)
    return _written(*found, data, offset, lambda part: REAL.write(descriptor, part))


def _pwrite(descriptor: int, data: Any, offset: int) -> int:
    found = _descriptor(descriptor)
    if found is None:
        return REAL.pwrite(descriptor, data, offset)
    return _written(*found, data, offset, lambda part: REAL.pwrite(descriptor, part, offset))


def _fsync(descriptor: Any) -> None:
    descriptor = descriptor if isinstance(descriptor, int) else descriptor.fileno()
    found = _descriptor(descriptor)
    if found is None:
        REAL.fsync(descriptor)
        return
    attempt, opened = found
    attempt.act("fsync", opened.path, lambda: attempt.disk.model.sync(opened.node))


def _truncate(path: Any, size: int) -> None:
    if isinstance(path, int):
        _ftruncate(path, size)
        return
    descriptor = _open(path, os.O_WRONLY)
    try:
        _ftruncate(descriptor, size)
    finally:
        _close(descriptor)


def _ftruncate(descriptor: int, size: int) -> None:
    found = _descriptor(descriptor)
    if found is None:
        REAL.ftruncate(descriptor, size)
        return
    attempt, opened = found

    def resize() -> None:
        REAL.ftruncate(descriptor, size)
        assert isinstance(opened.node, File)
        opened.node.resize(size)

    attempt.act("resize", opened.path, resize)


def _moving(kind: str, real: Callable[..., None]) -> Callable[..., None]:
    def move(
        src: Any,
        dst: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        **more: Any,
    ) -> None:
        old, new = _ours(src, src_dir_fd), _ours(dst, dst_dir_fd)
        if old is None or new is None:
            assert old is None and new is None, (
                f"{src} -> {dst}: one of the two is outside the run's folder"
            )
            real(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, **more)
            return
        attempt, disk = old[0], old[0].disk

        def move_and_note() -> None:
            real(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, **more)
            node = disk.model.find(old[2], old[3])
            receiver, name = disk.parent(new[2], new[3])
            if kind == "link":
                disk.model.change((receiver, name, node))
            else:
                disk.model.change((*disk.parent(old[2], old[3]), None), (receiver, name, node))

        attempt.act(kind, f"{old[1]} -> {new[1]}", move_and_note)

    return move


def _removing(kind: str, real: Callable[..., None]) -> Callable[..., None]:
    def remove(path: Any, *, dir_fd: int | None = None) -> None:
        found = _ours(path, dir_fd)
        if found is None:
            real(path, dir_fd=dir_fd)
            return
        attempt, name, parts, start = found

        def remove_and_note() -> None:
            real(path, dir_fd=dir_fd)
            attempt.disk.model.change((*attempt.disk.parent(parts, start), None))

        attempt.act(kind, name, remove_and_note)

    return remove


def _mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
    found = _ours(path, dir_fd)
    if found is None:
        REAL.mkdir(path, mode, dir_fd=dir_fd)
        return
    attempt, name, parts, start = found

    def make() -> None:
        REAL.mkdir(path, mode, dir_fd=dir_fd)
        attempt.disk.model.change((*attempt.disk.parent(parts, start), Folder()))

    attempt.act("mkdir", name, make)


def _symlink(
    src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: int | None = None
) -> None:
    found = _ours(dst, dir_fd)
    if found is None:
        REAL.symlink(src, dst, target_is_directory, dir_fd=dir_fd)
        return
    attempt, name, parts, start = found

    def make() -> None:
        REAL.symlink(src, dst, dir_fd=dir_fd)
        attempt.disk.model.change((*attempt.disk.parent(parts, start), Link(os.fsdecode(src))))

    attempt.act("link", name, make)


def _looking(kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def look(path: Any = ".", **more: Any) -> Any:
        found = _ours(path, more.get("dir_fd"))
        if found is None:
            opened = _descriptor(path)
            if opened is None:
                return real(path, **more)
            return opened[0].act(kind, opened[1].path, lambda: real(path, **more))
        return found[0].act(kind, found[1], lambda: real(path, **more))

    return look


def _reading(real: Callable[..., Any]) -> Callable[..., Any]:
    def read(descriptor: int, *more: Any) -> Any:
        found = _descriptor(descriptor)
        if found is None:
            return real(descriptor, *more)
        return found[0].act("read", found[1].path, lambda: real(descriptor, *more))

    return read


class _Raw(io.FileIO):
    """A file below the run's folder, unbuffered."""

    def __init__(self, descriptor: int, mode: str, opened: Opened, closefd: bool) -> None:
        super().__init__(descriptor, mode, closefd=closefd)
        self._owner = opened
        self._closes = closefd
        if closefd:
            opened.raw = self

    def write(self, data: Any) -> int:
        """Write like os.write; data that a dead attempt still has buffered is dropped silently."""
        owner = self._owner
        if owner.attempt.is_dead:
            if getattr(ROOM, "attempt", None) is owner.attempt:
                raise Killed("killed before")
            return len(data)
        offset = 0 if owner.appends else self.tell()
        return _written(
            owner.attempt, owner, data, offset, lambda part: io.FileIO.write(self, part) or 0
        )

    def truncate(self, size: int | None = None) -> int:
        """Resize like os.ftruncate."""
        size = self.tell() if size is None else size
        _ftruncate(self.fileno(), size)
        return size

    def read(self, size: int | None = -1) -> Any:
        """Read like os.read."""
        return self._look(lambda: io.FileIO.read(self, -1 if size is None else size))

    def readall(self) -> bytes:
        """Read like os.read, to the end."""
        return self._look(lambda: io.FileIO.readall(self))

    def readinto(self, buffer: Any) -> int:
        """Read like os.read."""
        return self._look(lambda: io.FileIO.readinto(self, buffer))

    def close(self) -> None:
        """Forget the descriptor."""
        if not self.closed and self._closes:
            self._owner.attempt.disk.opened.pop(self.fileno(), None)
        super().close()

    def _look(self, perform: Callable[[], Any]) -> Any:
        return self._owner.attempt.act("read", self._owner.path, perform)


_FLAGS = {
    "r": os.O_RDONLY,
    "w": os.O_CREAT | os.O_TRUNC,
    "a": os.O_CREAT | os.O_APPEND,
    "x": os.O_CREAT | os.O_EXCL,
}


def _io_open(
    file: Any,
    mode: str = "r",
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    closefd: bool = True,
    opener: Callable[[Any, int], int] | None = None,
) -> Any:
    flags = _FLAGS[next(letter for letter in mode if letter in _FLAGS)] | os.O_CLOEXEC
    writes = not mode.startswith("r") and "r" not in mode
    flags |= os.O_RDWR if "+" in mode else (os.O_WRONLY if writes else 0)
    if opener is not None:
        file, opener = opener(file, flags), None
    if isinstance(file, int):
        found = _descriptor(file)
    else:
        place = _ours(file)
        found = None
        if place is not None:
            file = _opened(*place, flags, lambda: REAL.open(file, flags, 0o666))
            if stat.S_ISDIR(os.fstat(file).st_mode):
                _close(file)
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(place[1]))
            found = _descriptor(file)
    if found is None:
        return REAL.io_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
    raw = _Raw(file, mode.replace("b", "").replace("t", "").replace("x", "w"), found[1], closefd)
    if buffering == 0:
        return raw
    buffer: Any = io.BufferedWriter if writes else io.BufferedReader
    buffered = (io.BufferedRandom if "+" in mode else buffer)(raw)
    return (
        buffered
        if "b" in mode
        else io.TextIOWrapper(buffered, encoding or "utf-8", errors, newline)
    )


def _getpid() -> int:
    attempt = getattr(ROOM, "attempt", None)
    return REAL.getpid() if attempt is None else 1000 + attempt.name


PATCHES: dict[str, Callable[..., Any]] = {
    "open": _open,
    "write": _write,
    "pwrite": _pwrite,
    "fsync": _fsync,
    "fdatasync": _fsync,
    "close": _close,
    "rename": _moving("rename", REAL.rename),
    "replace": _moving("rename", REAL.replace),
    "link": _moving("link", REAL.link),
    "symlink": _symlink,
    "unlink": _removing("unlink", REAL.unlink),
    "remove": _removing("unlink", REAL.remove),
    "rmdir": _removing("rmdir", REAL.rmdir),
    "mkdir": _mkdir,
    "truncate": _truncate,
    "ftruncate": _ftruncate,
    "listdir": _looking("list", REAL.listdir),
    "scandir": _looking("list", REAL.scandir),
    "stat": _looking("stat", REAL.stat),
    "lstat": _looking("stat", REAL.lstat),
    "read": _reading(REAL.read),
    "pread": _reading(REAL.pread),
    "getpid": _getpid,
}


@contextmanager
def intercepted() -> Iterator[None]:
    """Replace the functions within the block.

    The replacements are also added to ``os.supports_dir_fd`` and similar sets.
    """
    sets = (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks)
    for name, patch in PATCHES.items():
        for known in sets:
            if getattr(REAL, name) in known:
                known.add(patch)
        setattr(os, name, patch)
    io.open = builtins.open = _io_open  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in PATCHES:
            setattr(os, name, getattr(REAL, name))
        io.open = builtins.open = REAL.io_open
