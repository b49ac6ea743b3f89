"""A model of what a power loss leaves of a folder: files and names, and what of each is durable.

Input: every change of the folder, in order. Output: the folder as one of several file systems may
present it after power is restored. The model follows POSIX: data is durable after an fsync of its
file, a name after an fsync of its folder. A rename between two folders is one transaction, which is
durable after an fsync of the folder that receives the name.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

VARIANTS = ("strict", "names", "data", "random", "torn")
"""What survives of the changes that no fsync has covered.

strict: nothing; names: all names and no data; data: all data and no names; random: a random subset
of the names, and a random prefix of each file's writes; torn: everything but the end of each file's
last write.
"""


@dataclass(eq=False)
class File:
    """A file; ``synced`` is its content at the last fsync, ``log`` the writes since then."""

    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    # (offset, data); offset None: a resize, and the data is the new size in 8 bytes
    log: list[tuple[int | None, bytes]] = field(default_factory=list)

    def write(self, offset: int, data: bytes) -> None:
        """Change the content as pwrite does."""
        _apply(self.data, offset, data)
        self.log.append((offset, data))

    def resize(self, size: int) -> None:
        """Change the size as ftruncate does."""
        _resize(self.data, size)
        self.log.append((None, size.to_bytes(8, "little")))

    def sync(self) -> None:
        """Make the whole content durable."""
        self.synced, self.log = bytes(self.data), []


@dataclass(eq=False)
class Link:
    """A symbolic link; durable with its name."""

    target: str


@dataclass(eq=False)
class Change:
    """Names that change atomically; an fsync of the folder ``receiver`` makes them durable."""

    receiver: Folder
    is_durable: bool = False
    steps: list[tuple[Folder, str, Node | None]] = field(default_factory=list)

    def apply(self) -> None:
        """Make it durable."""
        self.is_durable = True
        for folder, name, node in self.steps:
            folder.set(folder.synced, name, node)


@dataclass(eq=False)
class Folder:
    """A folder: its present names, and the durable ones."""

    entries: dict[str, Node] = field(default_factory=dict)
    synced: dict[str, Node] = field(default_factory=dict)

    @staticmethod
    def set(entries: dict[str, Node], name: str, node: Node | None) -> None:
        """Give a name to a node; None removes the name."""
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


Node = File | Link | Folder


class Model:
    """The tree below one folder."""

    def __init__(self, root: Path) -> None:
        self.root = Folder()
        self._path = root
        self.changes: list[Change] = []
        self.adopt()

    def adopt(self) -> None:
        """Read the real folder, and treat all of it as durable."""
        self.changes = []
        self.root = _read(self._path)

    def find(self, parts: tuple[str, ...], start: Folder | None = None) -> Node | None:
        """Return the node of a path, or None."""
        node: Node | None = start or self.root
        for part in parts:
            node = node.entries.get(part) if isinstance(node, Folder) else None
        return node

    def change(self, *steps: tuple[Folder, str, Node | None]) -> None:
        """Change names atomically; the last step's folder is the receiver."""
        change = Change(steps[-1][0], steps=list(steps))
        for folder, name, node in steps:
            folder.set(folder.entries, name, node)
        self.changes.append(change)

    def sync(self, node: Node) -> None:
        """Apply an fsync of a file or a folder."""
        if isinstance(node, File):
            node.sync()
            return
        for number, change in enumerate(self.changes):
            if change.receiver is node:
                change.apply()
                names = {(folder, name) for folder, name, _ in change.steps}
                # an earlier change that becomes durable later must not undo this one
                for earlier in self.changes[:number]:
                    earlier.steps = [step for step in earlier.steps if step[:2] not in names]
        self.changes = [change for change in self.changes if not change.is_durable]

    def lose_power(self, variant: str, rng: random.Random) -> None:
        """Rebuild the real folder as the variant leaves it; everything left is durable."""
        for change in self.changes:
            if variant in ("names", "torn") or (variant == "random" and rng.random() < 0.5):
                change.apply()
        content = _CONTENT[variant]
        _empty(self._path)
        _write(self._path, self.root, lambda file: content(file, rng))
        self.adopt()

    def differences(self) -> list[str]:
        """Return paths where model and real folder differ: none, unless the simulator is wrong."""
        mine, real = dict(_flat(self.root, "")), dict(_flat(_read(self._path), ""))
        return sorted(
            path for path in mine.keys() | real.keys() if mine.get(path) != real.get(path)
        )


def _torn(file: File, rng: random.Random) -> bytes:
    """All writes, the last one truncated to a random number of bytes."""
    return _replayed(file, len(file.log), rng)


def _random(file: File, rng: random.Random) -> bytes:
    return _replayed(file, rng.randint(0, len(file.log)), rng)


def _replayed(file: File, count: int, rng: random.Random) -> bytes:
    data = bytearray(file.synced)
    for number, (offset, written) in enumerate(file.log[:count]):
        if offset is None:
            _resize(data, int.from_bytes(written, "little"))
        else:
            is_last = number == count - 1
            _apply(data, offset, written[: rng.randint(0, len(written))] if is_last else written)
    return bytes(data)


_CONTENT: dict[str, Callable[[File, random.Random], bytes]] = {
    "strict": lambda file, rng: file.synced,
    "names": lambda file, rng: file.synced,
    "data": lambda file, rng: bytes(file.data),
    "random": _random,
    "torn": _torn,
}


def _apply(data: bytearray, offset: int, written: bytes) -> None:
    if len(data) < offset:
        data.extend(bytes(offset - len(data)))
    data[offset : offset + len(written)] = written


def _resize(data: bytearray, size: int) -> None:
    del data[size:]
    data.extend(bytes(size - len(data)))


def _read(path: Path) -> Folder:
    folder = Folder()
    with os.scandir(path) as found:
        for entry in found:
            node: Node
            if entry.is_symlink():
                node = Link(os.readlink(entry.path))
            elif entry.is_dir():
                node = _read(Path(entry.path))
            else:
                with open(entry.path, "rb") as file:
                    node = File(bytearray(file.read()))
                node.sync()
            folder.entries[entry.name] = node
    folder.synced = dict(folder.entries)
    return folder


def _write(path: Path, folder: Folder, content: Callable[[File], bytes]) -> None:
    for name, node in folder.synced.items():
        inner = path / name
        if isinstance(node, Folder):
            inner.mkdir(mode=0o700)
            _write(inner, node, content)
        elif isinstance(node, Link):
            inner.symlink_to(node.target)
        else:
            inner.write_bytes(content(node))


def _empty(path: Path) -> None:
    for entry in list(os.scandir(path)):
        if entry.is_dir(follow_symlinks=False):
            _empty(Path(entry.path))
            os.rmdir(entry.path)
        else:
            os.unlink(entry.path)


def _flat(folder: Folder, prefix: str) -> Iterator[tuple[str, bytes | str]]:
    for name, node in folder.entries.items():
        path = f"{prefix}/{name}"
        if isinstance(node, Folder):
            yield path, "folder"
            yield from _flat(node, path)
        else:
            yield path, node.target if isinstance(node, Link) else bytes(node.data)
