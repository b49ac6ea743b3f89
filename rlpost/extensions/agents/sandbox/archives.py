"""Save the folders of a sandbox at the end of a turn, and restore them in another sandbox.

``save`` returns a manifest of some 150 bytes: the digest of a listing, which names every entry and
the digests of the contents. Listings and contents are in a ``ContentStore`` each, once: contents
are files of the agent, who can write any of them and print its digest, so that a digest alone never
makes a listing. A file of more than CONTENT_BYTES has several contents. From the second save on,
only files that changed since the last one are read and hashed (``inner.archive``).

What is kept: contents, permission bits, mtimes, empty folders, links with any target, FIFOs, names
of any bytes; an entry that was deleted is not there after ``restore``. What is not: processes (while
one runs in the background, ``save`` raises ArchiveRefused), sockets and devices, the identity of
hard links, extended attributes, and whatever is outside the saved folders.
"""

from __future__ import annotations

import asyncio
import json
import re
import struct
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from common.files import check_path
from rlpost.durable.daemon_threads import in_daemon
from rlpost.errors import RlpostError
from rlpost.extensions.agents.sandbox.content_store import (
    DIGEST_CHARACTERS,
    GIB,
    ContentMissing,
    ContentStore,
    StoreFull,
    digest_of,
)
from rlpost.extensions.agents.sandbox.inner.archive import SIGNATURE, SavedHeader
from rlpost.extensions.agents.sandbox.inner.filesystem import HOME
from rlpost.extensions.agents.sandbox.protocol import (
    MIB,
    WORK,
    ArchiveRefused,
    ArchiveStoreFull,
    Sandbox,
    SandboxFileError,
    ScanBounds,
)
from rlpost.extensions.agents.sandbox_table import ARCHIVE_FILES, ARCHIVE_MIB

FORMAT = 2
STORE = Path("sandboxes") / "archives"
"""The store of a run, below its folder."""
LISTINGS = "listings"
"""The store of listings, below that of contents."""
LISTING_BYTES = 64 * MIB
"""Of a listing as JSON; paths are names that an agent chose."""
FOLDERS = (WORK, HOME, "/tmp")
CONTENT_BYTES = 32 * MIB  # of one exchange with a sandbox, which is held in memory, a few times
TRANSFERS = 4  # saves and restores at a time, for the same reason
TICK_NS = 20_000_000
"""Twice the longest tick of a kernel (CONFIG_HZ=100): ctime may be that much behind the clock."""


class ArchiveDamaged(RlpostError):
    """A manifest cannot be read, or what it names is not in the store: begin the episode again."""


@dataclass(frozen=True, slots=True)
class ArchiveEntry:
    """A file, folder, link or FIFO of an archive.

    Attributes:
        path: relative to its folder.
        mtime: ns.
        content: digests of a file's contents, joined, or target of a link.
    """

    path: str
    kind: str
    mode: int
    mtime: int
    size: int = 0
    content: str = ""


Listing = Mapping[str, tuple[ArchiveEntry, ...]]
"""Entries by the folder that was saved, each after the folders above it."""


@dataclass(frozen=True, slots=True)
class Partial:
    """The contents that were received of a file which is sent in parts."""

    signature: bytes = b""
    digests: str = ""
    size: int = 0


@dataclass
class Scan:
    """A stream of ``inner.archive.save``, decoded."""

    began: int = 0
    entries: list[ArchiveEntry] = field(default_factory=list)
    contents: dict[str, bytes] = field(default_factory=dict)
    """Received, by digest."""
    digests: dict[bytes, str] = field(default_factory=dict)
    """By signature, of all files but those that come later."""
    changed: dict[bytes, int] = field(default_factory=dict)
    """ctime by signature."""
    is_complete: bool = True
    partial: Partial = Partial()
    """A file of which more has to come."""


class Archives:
    """Saves and restores the sandboxes of a run."""

    def __init__(
        self,
        folder: Path,
        *,
        max_mib: int = ARCHIVE_MIB,
        max_files: int = ARCHIVE_FILES,
        max_store_gib: float = 64.0,
    ) -> None:
        """
        Args:
            folder: of the store.
            max_mib: size of all files of one save (--sandbox-archive-mib).
            max_files: files and folders of one save (--sandbox-archive-files).
            max_store_gib: of all contents; a save beyond it raises ArchiveStoreFull.
        """
        self.store = ContentStore(folder, max_bytes=int(max_store_gib * GIB))
        self.listings = ContentStore(folder / LISTINGS, max_bytes=int(max_store_gib * GIB))
        self._bounds = ScanBounds(
            max_mib * MIB,
            max_files,
            CONTENT_BYTES,
            f"--sandbox-archive-mib {max_mib}, --sandbox-archive-files {max_files}",
        )
        self._places = asyncio.Semaphore(TRANSFERS)
        self._known: weakref.WeakKeyDictionary[Sandbox, dict[bytes, str]] = (
            weakref.WeakKeyDictionary()
        )

    @property
    def max_bytes(self) -> int:
        """Bound on the size of all files of one save."""
        return self._bounds.bytes

    async def save(
        self, sandbox: Sandbox, folders: Sequence[str] = FOLDERS, *, beside: int = 0
    ) -> bytes:
        """Return a manifest of folders of a sandbox, whose contents are then on disk.

        ``beside``: bytes of other files of the sandbox that count towards ``max_bytes``.

        Raises:
            ArchiveRefused: the folders are too large together, or processes run in the background.
            ArchiveStoreFull: the store is full.
            SandboxLost: the sandbox is gone.
            OSError: the store cannot be written.
        """
        async with self._places:
            trusted: dict[bytes, str] = {}
            listing: dict[str, tuple[ArchiveEntry, ...]] = {}
            known = await in_daemon(lambda: self._stored(self._known.get(sandbox, {})))
            try:
                for folder in folders:
                    scan = await self._scan(
                        sandbox, folder, known, self._remaining(listing, beside)
                    )
                    listing[folder] = tuple(scan.entries)
                    trusted |= trusted_digests(scan)
                manifest = await in_daemon(lambda: self._write_listing(listing))
            except StoreFull as error:
                raise ArchiveStoreFull(str(error)) from error
            self._known[sandbox] = trusted
            return manifest

    def _stored(self, known: Mapping[bytes, str]) -> dict[bytes, str]:
        """Return those files whose content is still in the store."""
        digests = {digest for each in known.values() for digest in split(each)}
        missing = set(self.store.missing(digests))
        return {each: value for each, value in known.items() if missing.isdisjoint(split(value))}

    def _remaining(self, listing: Listing, beside: int) -> ScanBounds:
        """Return the bounds of the next folder, of those that hold for a whole save."""
        sizes = {
            folder: (sum(entry.size for entry in entries), len(entries))
            for folder, entries in listing.items()
        }
        num_bytes = self._bounds.bytes - beside - sum(size for size, _ in sizes.values())
        num_files = self._bounds.files - sum(count for _, count in sizes.values())
        before = "".join(
            f", {folder} has {size / MIB:.0f} MiB in {count} files"
            for folder, (size, count) in sizes.items()
            if count
        )
        if beside:
            before = f", single files have {beside / MIB:.0f} MiB{before}"
        return replace(
            self._bounds, bytes=max(0, num_bytes), files=max(0, num_files), before=before
        )

    async def _scan(
        self, sandbox: Sandbox, folder: str, known: Mapping[bytes, str], bounds: ScanBounds
    ) -> Scan:
        """Read a folder until all contents are in the store."""
        received, began, partial = dict(known), None, Partial()
        while True:
            so_far = partial.signature, partial.size
            stream = await sandbox.scan(folder, received, bounds=bounds, partial=so_far)
            scan = await in_daemon(lambda: self._store(stream, received, partial))  # noqa: B023
            partial = scan.partial
            began = scan.began if began is None else began
            received |= scan.digests
            if scan.is_complete:
                scan.began = began  # a file that changed since the first request is read again
                return scan

    def _store(self, stream: bytes, known: Mapping[bytes, str], partial: Partial) -> Scan:
        scan = decode_scan(stream, known, partial)
        self.store.add(scan.contents)
        return scan

    def _write_listing(self, listing: Listing) -> bytes:
        data = encode_listing(listing)
        digest = digest_of(data)
        self.listings.add({digest: data})
        entries = [entry for each in listing.values() for entry in each]
        return json.dumps(
            {
                "archive": FORMAT,
                "listing": digest,
                "entries": len(entries),
                "bytes": sum(entry.size for entry in entries),
            }
        ).encode()

    async def restore(self, sandbox: Sandbox, manifest: bytes) -> None:
        """Give a sandbox the folders of a manifest; what else they hold is deleted.

        Raises:
            ArchiveDamaged: the manifest or the store lacks something.
            SandboxLost, SandboxFileError: the sandbox is gone, or refuses an entry.
        """
        async with self._places:
            listing = await in_daemon(lambda: self._listing(manifest))
            for folder, entries in listing.items():
                streams, is_first = self._streams(entries), True
                while (stream := await in_daemon(lambda: next(streams, None))) is not None:  # noqa: B023
                    try:
                        await sandbox.unpack(folder, stream, clear=is_first)
                    except SandboxFileError as error:
                        raise SandboxFileError(f"{folder} is not restored: {error}") from error
                    is_first = False

    def _listing(self, manifest: bytes) -> Listing:
        digest = digest_of_manifest(manifest)
        try:
            return decode_listing(self.listings.read(digest))
        except (ContentMissing, OSError) as error:
            raise ArchiveDamaged(f"the listing of a saved sandbox: {error}") from error

    def _streams(self, entries: tuple[ArchiveEntry, ...]) -> Iterator[bytes]:
        """Yield streams for ``unpack``, each with contents of about CONTENT_BYTES."""
        parts: list[bytes] = []
        size = 0
        for entry in entries:
            for part in self._packed(entry):
                parts.append(part)
                size += len(part)
                if size >= CONTENT_BYTES:
                    yield b"".join([*parts, END])
                    parts, size = [], 0
        folders = [entry for entry in entries if entry.kind == "folder"]
        seals = [packed(entry, "seal") for entry in reversed(folders)]  # the deepest first
        yield b"".join([*parts, *seals, END])

    def _packed(self, entry: ArchiveEntry) -> Iterator[bytes]:
        """Yield an entry, and each further content of its file. Raises ArchiveDamaged."""
        if entry.kind != "file":
            yield packed(entry, entry.kind, bytes.fromhex(entry.content))
            return
        digests = split(entry.content)
        for number, digest in enumerate(digests):
            try:
                content = self.store.read(digest)
            except (ContentMissing, OSError) as error:
                raise ArchiveDamaged(f"{entry.path} of a saved sandbox: {error}") from error
            is_last = number == len(digests) - 1
            kind = "more" if number else "file"
            yield packed(entry if is_last else replace(entry, mode=0o600), kind, content)

    async def keep_only(self, saves: Iterable[bytes]) -> int:
        """Delete what no save needs; return how many bytes that were.

        Call it when all unfinished episodes of former attempts are known and none has begun in this
        one. A save is what an environment returned: a manifest, alone or within other bytes, but
        neither compressed nor encrypted.
        """
        listings = {digest for save in saves for digest in DIGEST.findall(save)}
        return await in_daemon(lambda: self._keep_only(listings))

    def _keep_only(self, listings: Iterable[bytes]) -> int:
        needed = set[str]()
        for digest in (each.decode() for each in listings):
            try:
                listing = decode_listing(self.listings.read(digest))
            except (ArchiveDamaged, ContentMissing):
                continue  # not a listing, or one that is lost
            entries = [entry for each in listing.values() for entry in each]
            contents = (entry.content for entry in entries if entry.kind == "file")
            needed |= {digest, *(each for content in contents for each in split(content))}
        return self.listings.sweep_except(needed) + self.store.sweep_except(needed)


END = struct.pack(">I", 0)
DIGEST = re.compile(rb"[0-9a-f]{64}")


def split(contents: str) -> list[str]:
    """Return the digests of a file's contents in order."""
    return [
        contents[start : start + DIGEST_CHARACTERS]
        for start in range(0, len(contents), DIGEST_CHARACTERS)
    ]


def packed(entry: ArchiveEntry, kind: str, content: bytes = b"") -> bytes:
    """Return an entry in the form that ``inner.archive.unpack`` reads."""
    head: SavedHeader = {
        "kind": kind,
        "path": entry.path,
        "mode": entry.mode,
        "mtime": entry.mtime,
        "size": len(content),
    }
    text = json.dumps(head).encode()
    return struct.pack(">I", len(text)) + text + content


def decode_scan(stream: bytes, known: Mapping[bytes, str], partial: Partial = Partial()) -> Scan:
    """Decode a stream of ``inner.archive.save``.

    ``known``: digests of the files that it leaves out. ``partial``: what was received of a file
    before. Raises ArchiveRefused when it is damaged.
    """
    scan, view, position = Scan(), memoryview(stream), 0
    try:
        while (length := struct.unpack_from(">I", view, position)[0]) != 0:
            start = position + 4 + length
            head: SavedHeader = json.loads(bytes(view[position + 4 : start]))
            position = start + head["size"]
            if not start <= position <= len(view):
                raise ValueError("incomplete entry")
            _take(scan, head, view[start:position], known, partial)
    except (struct.error, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ArchiveRefused(f"the sandbox sent a damaged list of its files: {error!r}") from None
    return scan


def _take(
    scan: Scan,
    head: SavedHeader,
    content: memoryview,
    known: Mapping[bytes, str],
    partial: Partial,
) -> None:
    kind = head["kind"]
    if kind == "start":
        scan.began = head["time"]
        return
    check_path(head["path"])
    if kind == "omitted":
        return
    size, name = 0, ""
    if kind in ("link", "folder"):
        name = bytes(content).hex()
    elif kind == "file":
        if head["state"] == "later":
            scan.is_complete = False
            return
        signature, size = bytes.fromhex(head["signature"]), head["file_size"]
        if head["state"] in ("sent", "part"):
            so_far = partial if head["offset"] else Partial(signature)
            if (so_far.signature, so_far.size) != (signature, head["offset"]):
                raise ValueError("a part of a file that was not asked for")
            data = bytes(content)
            digest = digest_of(data)
            scan.contents[digest] = data
            name = so_far.digests + digest
            if head["state"] == "part":
                scan.is_complete = False
                scan.partial = Partial(signature, name, so_far.size + len(data))
                return
        else:
            name = known[signature]
        scan.digests[signature] = name
        scan.changed[signature] = SIGNATURE.unpack(signature)[-1]
    scan.entries.append(ArchiveEntry(head["path"], kind, head["mode"], head["mtime"], size, name))


def trusted_digests(scan: Scan) -> dict[bytes, str]:
    """Return the files whose unchanged signature will mean an unchanged content.

    A file that changed within a tick before the scan may change again with the same ctime.
    """
    return {
        signature: digest
        for signature, digest in scan.digests.items()
        if scan.changed[signature] < scan.began - TICK_NS
    }


def encode_listing(listing: Listing) -> bytes:
    """Return a listing as compressed JSON; the same listing gives the same bytes.

    Raises ArchiveRefused beyond LISTING_BYTES.
    """
    values = {
        folder: [list(asdict(entry).values()) for entry in entries]
        for folder, entries in listing.items()
    }
    text = json.dumps(values, sort_keys=True).encode()
    if len(text) > LISTING_BYTES:
        raise ArchiveRefused(
            f"the names of the sandbox's files have {len(text)} bytes; at most {LISTING_BYTES} fit"
        )
    return zlib.compress(text, 1)


def decode_listing(data: bytes) -> Listing:
    """Return a listing. Raises ArchiveDamaged."""
    try:
        values = json.loads(_decompress(data))
        listing = {
            folder: tuple(ArchiveEntry(*each) for each in entries)
            for folder, entries in values.items()
        }
        for entry in (entry for entries in listing.values() for entry in entries):
            check_path(entry.path)
        return listing
    except (zlib.error, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ArchiveDamaged(f"the listing of a saved sandbox cannot be read: {error}") from None


def _decompress(data: bytes) -> bytes:
    """Return what ``data`` holds. Raises zlib.error, and ValueError beyond LISTING_BYTES."""
    decoder = zlib.decompressobj()
    text = decoder.decompress(data, LISTING_BYTES)
    if not decoder.eof or decoder.unused_data:
        raise ValueError(f"it is cut off, or has more than {LISTING_BYTES} bytes")
    return text


def digest_of_manifest(manifest: bytes) -> str:
    """Return the digest of the listing that a manifest names. Raises ArchiveDamaged."""
    try:
        values = json.loads(manifest)
        version, digest = values["archive"], str(values["listing"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArchiveDamaged(f"this is not a saved sandbox: {error!r}") from None
    if version != FORMAT:
        raise ArchiveDamaged(f"a saved sandbox of format {version!r}; this version reads {FORMAT}")
    return digest
