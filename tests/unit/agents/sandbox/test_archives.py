"""Archives without namespaces: streams, listings, the store and its rules, errors.

``FolderSandbox`` runs the operations that a sandbox runs, in a child process on a folder of the
test; ``tests/contract/test_sandbox_archives.py`` uses real sandboxes.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import stat
import struct
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import pytest

from common.files import check_path
from rlpost.extensions.agents.sandbox import archives as module
from rlpost.extensions.agents.sandbox import content_store
from rlpost.extensions.agents.sandbox.archives import (
    ArchiveDamaged,
    ArchiveEntry,
    Archives,
    Scan,
    decode_listing,
    decode_scan,
    encode_listing,
    trusted_digests,
)
from rlpost.extensions.agents.sandbox.content_store import (
    ContentMissing,
    ContentStore,
    StoreFull,
    digest_of,
)
from rlpost.extensions.agents.sandbox.inner import archive as inner
from rlpost.extensions.agents.sandbox.inner.files import FileRefused
from rlpost.extensions.agents.sandbox.protocol import (
    ArchiveRefused,
    ArchiveStoreFull,
    Ended,
    Limits,
    Result,
    Sandbox,
    SandboxFileError,
)

ROOT = Path(__file__).parents[4]
PROGRAM = """
import json, sys
from rlpost.extensions.agents.sandbox.inner.init import perform
sys.exit(perform(json.loads(sys.argv[1])))
"""
FOLDERS = ("/work", "/tmp")


class FolderSandbox(Sandbox):
    """Performs file operations on folders below ``root``; counts the bytes that it sends."""

    def __init__(self, root: Path) -> None:
        super().__init__(Limits(), "test")
        self.root, self.sent = root, 0
        for folder in FOLDERS:
            (root / folder.strip("/")).mkdir(parents=True, exist_ok=True)

    @property
    def work(self) -> Path:
        return self.root / "work"

    async def perform(self, request: Any, stdin: bytes = b"") -> Result:
        path = str(self.root) + request["path"]
        process = await asyncio.create_subprocess_exec(
            # -S: the program needs no installed package, whose paths take longest to find
            *(sys.executable, "-S", "-c", PROGRAM, json.dumps(request | {"path": path})),
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate(stdin)
        self.sent += len(out)
        return Result(Ended.EXITED, process.returncode or 0, out, err)

    async def close(self) -> None:
        pass


def state(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Return what an archive has to keep of everything below a folder."""
    found: dict[str, tuple[Any, ...]] = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        kept: list[Any] = [stat.S_IFMT(status.st_mode), status.st_mtime_ns]
        if path.is_symlink():
            kept.append(os.readlink(path))
        else:
            kept.append(stat.S_IMODE(status.st_mode))
            if path.is_file():
                kept.append(path.read_bytes())
        found[str(path.relative_to(folder))] = tuple(kept)
    return found


def moved(tmp_path: Path, manifest: bytes, archives: Archives) -> FolderSandbox:
    """Restore a manifest in another sandbox, which has files of its own already."""
    other = FolderSandbox(tmp_path / f"other{random.random()}")
    (other.work / "locked" / "below").mkdir(parents=True)
    (other.work / "locked" / "below" / "file").write_text("from reset")
    (other.work / "locked").chmod(0o500)
    (other.work / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "outside").mkdir(exist_ok=True)
    (tmp_path / "outside" / "precious").write_text("stays")
    asyncio.run(archives.restore(other, manifest))
    assert (tmp_path / "outside" / "precious").read_text() == "stays"
    return other


def test_a_restored_folder_equals_the_saved_one_in_all_that_is_kept(tmp_path: Path) -> None:
    sandbox, archives = FolderSandbox(tmp_path / "a"), Archives(tmp_path / "store")
    work = sandbox.work
    (work / "deep" / "er").mkdir(parents=True)
    (work / "deep" / "program").write_bytes(b"#!/bin/sh\n")
    (work / "deep" / "program").chmod(0o751)
    (work / "empty").mkdir(mode=0o700)
    (work / "empty file").touch()
    (work / "same").write_bytes(b"#!/bin/sh\n")
    (work / "link").symlink_to("/usr/bin/python3")
    (work / "up").symlink_to("../../..")
    (work / "dangling").symlink_to(os.fsdecode(b"no\xffthing"))
    os.mkfifo(work / "pipe", 0o640)
    (work / os.fsdecode(b"not \xff UTF-8")).write_bytes(b"\0\xff")
    (work / "sealed").mkdir()
    (work / "sealed" / "secret").write_text("mode 0")
    (work / "sealed" / "secret").chmod(0)
    (work / "sealed").chmod(0o500)
    os.utime(work / "deep" / "program", ns=(5, 1_234_567_890_123_456_789))
    os.utime(work / "deep", ns=(5, 987_654_321))
    (sandbox.root / "tmp" / "note").write_text("of /tmp")
    manifest = asyncio.run(archives.save(sandbox, FOLDERS))
    assert len(manifest) < 200
    before = {folder: state(sandbox.root / folder.strip("/")) for folder in FOLDERS}
    other = moved(tmp_path, manifest, archives)
    after = {folder: state(other.root / folder.strip("/")) for folder in FOLDERS}
    assert after == before
    assert len(before["/work"]) == 13


def test_a_socket_is_omitted_and_a_deleted_file_is_gone(tmp_path: Path, monkeypatch: Any) -> None:
    sandbox, archives = FolderSandbox(tmp_path / "a"), Archives(tmp_path / "store")
    (sandbox.work / "first").write_text("1")
    asyncio.run(archives.save(sandbox, ["/work"]))
    (sandbox.work / "first").unlink()
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(sandbox.work)  # the path of a socket is short
        server.bind("socket")
    manifest = asyncio.run(archives.save(sandbox, ["/work"]))
    assert state(moved(tmp_path, manifest, archives).work) == {}


def test_only_files_that_changed_are_read_again(tmp_path: Path) -> None:
    sandbox, archives = FolderSandbox(tmp_path / "a"), Archives(tmp_path / "store")
    (sandbox.work / "data").mkdir()
    for number in range(20):
        (sandbox.work / "data" / f"{number}").write_bytes(os.urandom(100_000))
    time.sleep(0.1)  # the files are older than a tick of the kernel's clock
    asyncio.run(archives.save(sandbox, ["/work"]))
    assert sandbox.sent > 2_000_000
    before = sandbox.sent
    asyncio.run(archives.save(sandbox, ["/work"]))
    assert sandbox.sent - before < 20_000, "nothing changed"
    (sandbox.work / "data").rename(sandbox.work / "renamed")
    (sandbox.work / "renamed" / "3").write_bytes(b"x" * 100_000)
    times = (sandbox.work / "renamed" / "4").stat()
    (sandbox.work / "renamed" / "4").write_bytes(b"y" * 100_000)  # same size, and its old mtime
    os.utime(sandbox.work / "renamed" / "4", ns=(times.st_atime_ns, times.st_mtime_ns))
    before = sandbox.sent
    manifest = asyncio.run(archives.save(sandbox, ["/work"]))
    assert 200_000 < sandbox.sent - before < 220_000, "two contents, and a list of 21 entries"
    assert state(moved(tmp_path, manifest, archives).work) == state(sandbox.work)


def test_a_file_as_young_as_the_scan_is_read_again() -> None:
    tick = 20_000_000
    scan = Scan(began=10**18, digests={b"old": "d1", b"young": "d2"})
    scan.changed = {b"old": 10**18 - tick - 1, b"young": 10**18 - tick}
    assert trusted_digests(scan) == {b"old": "d1"}


def test_large_folders_are_sent_in_parts_of_bounded_size(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "CONTENT_BYTES", 250_000)
    sandbox, archives = FolderSandbox(tmp_path / "a"), Archives(tmp_path / "store")
    for number in range(10):
        (sandbox.work / f"{number}").write_bytes(os.urandom(100_000))
    (sandbox.work / "large").write_bytes(os.urandom(700_000))
    streams: list[int] = []
    perform = sandbox.perform

    async def measured(request: Any, stdin: bytes = b"") -> Result:
        result = await perform(request, stdin)
        streams.append(len(result.stdout))
        return result

    monkeypatch.setattr(sandbox, "perform", measured)
    manifest = asyncio.run(archives.save(sandbox, ("/work",)))
    assert len(streams) == 8, "five times two files, and the large one in three parts"
    assert max(streams) < 260_000
    assert state(moved(tmp_path, manifest, archives).work) == state(sandbox.work)


@pytest.mark.parametrize("num_parts", [1, 3])
def test_a_file_of_several_parts_is_kept_whole_and_known_by_all_of_them(
    tmp_path: Path, monkeypatch: Any, num_parts: int
) -> None:
    """With modes that forbid its owner to write; and a part that is lost is read again."""
    monkeypatch.setattr(module, "CONTENT_BYTES", 10_000)
    monkeypatch.setattr(module, "TICK_NS", -(10**12))  # trust also what has just changed
    sandbox, archives = FolderSandbox(tmp_path / "a"), Archives(tmp_path / "store")
    large = sandbox.work / "large"
    large.write_bytes(os.urandom(10_000 * num_parts))  # the last part is as large as the others
    large.chmod(0o400)
    first = asyncio.run(archives.save(sandbox, ["/work"]))
    assert state(moved(tmp_path, first, archives).work) == state(sandbox.work)
    sandbox.sent = 0
    assert asyncio.run(archives.save(sandbox, ["/work"])) == first and sandbox.sent < 2000
    assert asyncio.run(archives.keep_only([first])) == 0, "all parts are needed"
    lost = digest_of(large.read_bytes()[-10_000:])
    (tmp_path / "store" / lost[:2] / lost).unlink()
    archives.store._used.clear()
    assert asyncio.run(archives.save(sandbox, ["/work"])) == first
    assert state(moved(tmp_path, first, archives).work) == state(sandbox.work)


def test_a_file_that_changes_between_its_parts_is_sent_from_its_begin(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(module, "CONTENT_BYTES", 10_000)
    sandbox, archives = FolderSandbox(tmp_path / "a"), Archives(tmp_path / "store")
    large = sandbox.work / "large"
    large.write_bytes(os.urandom(35_000))
    perform, requests = sandbox.perform, list[Any]()

    async def changed(request: Any, stdin: bytes = b"") -> Result:
        if len(requests) == 2:
            large.write_bytes(os.urandom(25_000))
        requests.append(request)
        return await perform(request, stdin)

    monkeypatch.setattr(sandbox, "perform", changed)
    manifest = asyncio.run(archives.save(sandbox, ["/work"]))
    assert [each["offset"] for each in requests] == [0, 10_000, 20_000, 10_000, 20_000]
    monkeypatch.setattr(sandbox, "perform", perform)
    assert state(moved(tmp_path, manifest, archives).work) == state(sandbox.work)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [({"max_mib": 1}, "more than 1 MiB"), ({"max_files": 3}, "more than 1024 MiB or 3 files")],
)
def test_a_folder_beyond_its_bounds_is_refused_with_the_bound(
    tmp_path: Path, bounds: dict[str, Any], message: str
) -> None:
    sandbox, archives = FolderSandbox(tmp_path / "a"), Archives(tmp_path / "store", **bounds)
    for number in range(4):
        (sandbox.work / f"{number}").write_bytes(bytes(400_000))
    with pytest.raises(ArchiveRefused, match=message):
        asyncio.run(archives.save(sandbox, FOLDERS))


def test_the_bounds_are_those_of_all_folders_together(tmp_path: Path) -> None:
    sandbox = FolderSandbox(tmp_path / "a")
    paths = ["/work", "/tmp"]
    for path in paths:
        (sandbox.root / path[1:] / "f").write_bytes(bytes(600_000))
    refused = (
        r"/tmp: more than 0 MiB or 99999 files and folders, 0 MiB of them in 'f' so far "
        r"\(--sandbox-archive-mib 1, --sandbox-archive-files 100000 over all folders, /work has 1 "
        r"MiB in 1 files\)"
    )
    for number, path in enumerate(paths):
        asyncio.run(Archives(tmp_path / f"{number}", max_mib=1).save(sandbox, [path]))
    with pytest.raises(ArchiveRefused, match=refused):
        asyncio.run(Archives(tmp_path / "both", max_mib=1).save(sandbox, paths))
    with pytest.raises(ArchiveRefused, match="over all folders, single files have 1 MiB"):
        asyncio.run(Archives(tmp_path / "c", max_mib=1).save(sandbox, paths[:1], beside=600_000))


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "log").write_bytes(b"x" * 200_000)
    read, begun = os.read, []

    def grow(handle: int, size: int) -> bytes:
        if not begun:
            begun.append(True)
            with (tmp_path / "log").open("ab") as file:
                file.write(b"y")
        return read(handle, size)

    monkeypatch.setattr(inner.os, "read", grow)
    request: Any = {"max_bytes": 1 << 20, "max_files": 9, "max_content": 1 << 20}
    request |= {"partial": "", "offset": 0}
    saving = inner._Saving(request, frozenset(), (tmp_path / "stream").open("wb"))
    folder = os.open(tmp_path, os.O_RDONLY)
    (tmp_path / "stream").rename(tmp_path.with_name("stream"))
    with pytest.raises(FileRefused, match="log changes while it is read"):
        inner._save_below(folder, "", saving, 0)
    os.close(folder)
    saving.stream.close()


def test_a_damaged_stream_or_path_is_refused_at_every_place() -> None:
    content = b"0123456789"
    signature = inner.SIGNATURE.pack(1, 2, len(content), 3, 4)
    head = {"path": "a", "kind": "file", "mode": 0o644, "mtime": 3, "state": "sent"}
    head |= {
        "signature": signature.hex(),
        "file_size": len(content),
        "size": len(content),
        "offset": 0,
    }
    text = json.dumps(head).encode()
    stream = struct.pack(">I", len(text)) + text + content + struct.pack(">I", 0)
    scan = decode_scan(stream, {})
    assert scan.entries == [ArchiveEntry("a", "file", 0o644, 3, 10, digest_of(content))]
    assert scan.contents == {digest_of(content): content}
    for end in range(len(stream)):
        with pytest.raises(ArchiveRefused, match="damaged list"):
            decode_scan(stream[:end], {})
    for path in ("../a", "/a", "a//b", "a/../../b", "", "a\0b"):
        with pytest.raises(ValueError, match="relative and inside"):
            check_path(path)


def test_a_listing_survives_its_encoding_and_a_damaged_one_is_named() -> None:
    entries = (ArchiveEntry("a", "folder", 0o755, 5), ArchiveEntry("a/\udcff", "link", 0o777, 6))
    data = encode_listing({"/work": entries})
    assert decode_listing(data) == {"/work": entries}
    for damaged in (data[:-3], b"", b"x" + data):
        with pytest.raises(ArchiveDamaged, match="cannot be read"):
            decode_listing(damaged)
    outside = encode_listing({"/work": (ArchiveEntry("../a", "folder", 0o755, 5),)})
    with pytest.raises(ArchiveDamaged, match="must be relative and inside"):
        decode_listing(outside)


def test_restore_names_what_is_missing_damaged_or_of_another_format(tmp_path: Path) -> None:
    sandbox, archives = FolderSandbox(tmp_path / "a"), Archives(tmp_path / "store")
    (sandbox.work / "notes").write_text("the content")
    manifest = asyncio.run(archives.save(sandbox, ["/work"]))
    name = digest_of(b"the content")
    path = tmp_path / "store" / name[:2] / name
    path.write_text("other bytes")
    with pytest.raises(ArchiveDamaged, match=r"notes of a saved sandbox: .* digest of its name"):
        asyncio.run(archives.restore(sandbox, manifest))
    with pytest.raises(ArchiveDamaged, match=r"notes of a saved sandbox: .*No such file"):
        asyncio.run(archives.restore(sandbox, manifest))
    (sandbox.work / "notes").write_text("the content")
    again = asyncio.run(archives.save(sandbox, ["/work"]))
    asyncio.run(archives.restore(sandbox, again))
    assert path.read_text() == "the content", "a content that was lost is written again"
    with pytest.raises(ArchiveDamaged, match="not a saved sandbox"):
        asyncio.run(archives.restore(sandbox, b"{}"))
    newer = manifest.replace(b'"archive": 2', b'"archive": 3')
    with pytest.raises(ArchiveDamaged, match="of format 3; this version reads 2"):
        asyncio.run(archives.restore(sandbox, newer))


def test_an_entry_that_a_sandbox_refuses_is_its_error(tmp_path: Path, monkeypatch: Any) -> None:
    sandbox, archives = FolderSandbox(tmp_path / "a"), Archives(tmp_path / "store")
    manifest = asyncio.run(archives.save(sandbox, FOLDERS))

    async def refuse(request: Any, stdin: bytes = b"") -> Result:
        return Result(Ended.EXITED, 1, stderr=b"no space left on device")

    monkeypatch.setattr(sandbox, "perform", refuse)
    with pytest.raises(SandboxFileError, match=r"/tmp is not restored: .*no space left"):
        asyncio.run(archives.restore(sandbox, manifest))


def test_the_store_is_private_and_keeps_one_file_for_each_content(tmp_path: Path) -> None:
    archives = Archives(tmp_path / "sandboxes" / "archives")
    sandboxes = [FolderSandbox(tmp_path / name) for name in "ab"]
    for sandbox in sandboxes:
        for name in ("one", "two"):
            (sandbox.work / name).write_text("equal")
        (sandbox.work / "one").chmod(0o777)
        asyncio.run(archives.save(sandbox, ("/work",)))
    paths = list((tmp_path / "sandboxes").rglob("*"))
    files = [path for path in paths if path.is_file()]
    assert len(files) == 1 + 2, "a content and two listings, which have times of their own"
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    folders = [tmp_path / "sandboxes", *(path for path in paths if path.is_dir())]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}


def test_a_full_store_refuses_and_leaves_nothing_behind(tmp_path: Path) -> None:
    store = ContentStore(tmp_path / "store", max_bytes=1000)
    kept, large = b"x" * 900, b"y" * 200
    store.add({digest_of(kept): kept})
    for _ in range(2):
        with pytest.raises(StoreFull, match="would exceed its bound"):
            store.add({digest_of(large): large})
    assert [path.name for path in (tmp_path / "store").glob("??/*")] == [digest_of(kept)]
    small = b"z" * 100
    store.add({digest_of(small): small})
    sandbox = FolderSandbox(tmp_path / "a")
    (sandbox.work / "f").write_bytes(large)
    with pytest.raises(ArchiveStoreFull, match=r"deleted after 6 h"):
        asyncio.run(Archives(tmp_path / "other", max_store_gib=1e-8).save(sandbox, ("/work",)))


def test_a_write_that_fails_leaves_no_content(tmp_path: Path, monkeypatch: Any) -> None:
    store = ContentStore(tmp_path / "store")

    def fail(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(content_store, "sync", fail)
    with pytest.raises(OSError, match="No space left"):
        store.add({digest_of(b"a"): b"a"})
    monkeypatch.undo()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    store.add({digest_of(b"a"): b"a"})
    assert store.read(digest_of(b"a")) == b"a"


def put(store: ContentStore, *contents: bytes) -> list[str]:
    store.add({digest_of(content): content for content in contents})
    return [digest_of(content) for content in contents]


def make_old(store: ContentStore, seconds: float, *digests: str) -> None:
    for digest in digests:
        then = time.time() - seconds
        os.utime(store.folder / digest[:2] / digest, (then, then))


def there(store: ContentStore) -> set[str]:
    return {path.name for path in store.folder.glob("??/*")}


def test_contents_that_no_save_used_for_hours_are_deleted(tmp_path: Path) -> None:
    now = [0.0]
    earlier = ContentStore(tmp_path / "store", keep_s=100)
    first, second = put(earlier, b"first", b"second")
    make_old(earlier, 5000, first, second)  # the run waited in the queue
    store = ContentStore(tmp_path / "store", keep_s=100, clock=lambda: now[0])
    assert store.sweep_unused() == 0 and there(store) == {first, second}
    now[0] = 60
    assert store.missing([second]) == []  # a save or a restore uses it
    now[0] = 101
    (third,) = put(store, b"third")  # sweeps by itself after a quarter of the time
    assert there(store) == {second, third}
    now[0] = 202
    make_old(store, 142, second)
    make_old(store, 101, third)
    now[0] = 303
    assert store.sweep_unused() == len(b"second") + len(b"third")
    with pytest.raises(ContentMissing):
        store.read(second)


def test_what_no_unfinished_episode_needs_is_deleted_at_a_resume(tmp_path: Path) -> None:
    sandbox, former = FolderSandbox(tmp_path / "a"), Archives(tmp_path / "store")
    (sandbox.work / "kept").write_text("kept")
    kept = asyncio.run(former.save(sandbox, ["/work"]))
    (sandbox.work / "dropped").write_text("dropped")
    dropped = asyncio.run(former.save(sandbox, ["/work"]))
    archives = Archives(tmp_path / "store")
    saves = [json.dumps({"turn": 3, "files": kept.decode()}).encode(), b"bytes of another kind"]
    assert asyncio.run(archives.keep_only(saves)) > len("dropped")
    assert set(state(moved(tmp_path, kept, archives).work)) == {"kept"}
    with pytest.raises(ArchiveDamaged):
        asyncio.run(archives.restore(sandbox, dropped))
    asyncio.run(archives.save(FolderSandbox(tmp_path / "b"), ["/work"]))
    before = there(archives.store)
    assert asyncio.run(archives.keep_only([])) == 0, "all of it was used by this process"
    assert there(archives.store) == before


def hostile_contents() -> dict[str, bytes]:
    """Files that an agent may write, to be taken for a listing."""
    forged = encode_listing({"/work": (ArchiveEntry("a", "file", 0o644, 1, 1, "0" * 64),)})
    deep = [b"[" * 200_000, b'{"a":' * 200_000]
    bomb = zlib.compressobj(9)
    blank = bytes(module.MIB).replace(b"\0", b" ")
    parts = [bomb.compress(blank) for _ in range(module.LISTING_BYTES // module.MIB + 1)]
    shapes = [b"[1]", b'{"a": 1}', b'{"a": [[1]]}', b'{"a": [[[], [], [], []]]}', b"null", b"7"]
    return {
        "forged": forged,
        "bomb": b"".join([*parts, bomb.flush()]),
        **{f"deep {text[:1]!r}": zlib.compress(text) for text in deep},
        **{repr(text): zlib.compress(text) for text in shapes},
    }


def test_no_content_of_an_agent_stops_a_resume_or_is_taken_for_a_listing(tmp_path: Path) -> None:
    """Whatever it holds, and wherever its digest is written."""
    contents = hostile_contents()
    sandbox, former = FolderSandbox(tmp_path / "a"), Archives(tmp_path / "store")
    for number, content in enumerate(contents.values()):
        (sandbox.work / f"{number}").write_bytes(content)
    manifest = asyncio.run(former.save(sandbox, ("/work",)))
    archives = Archives(tmp_path / "store")
    for content in contents.values():
        said = f"$ sha256sum x\n{digest_of(content)}  x"
        state = json.dumps({"files": manifest.decode(), "said": said}).encode()
        assert asyncio.run(archives.keep_only([state, said.encode()])) == 0
    asyncio.run(archives.restore(FolderSandbox(tmp_path / "b"), manifest))
    for name, content in contents.items():
        claimed = json.dumps(json.loads(manifest) | {"listing": digest_of(content)}).encode()
        with pytest.raises(ArchiveDamaged):
            asyncio.run(archives.restore(sandbox, claimed))
        if name != "forged":
            with pytest.raises(ArchiveDamaged, match="cannot be read"):
                decode_listing(content)


@pytest.mark.parametrize("text", [b"[" * 200_000, b'{"size": -9, "kind": "x"}', b"[]"])
def test_what_a_sandbox_sends_is_bounded_in_depth_and_form(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(ArchiveRefused, match="damaged list"):
        decode_scan(struct.pack(">I", len(text)) + text + struct.pack(">I", 0), {})
    with pytest.raises(ArchiveDamaged):
        asyncio.run(Archives(tmp_path / "store").restore(FolderSandbox(tmp_path / "a"), text))


def test_names_that_exceed_the_bound_of_a_listing_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "LISTING_BYTES", 1000)
    entries = tuple(ArchiveEntry(f"{n}" * 9, "folder", 0o755, 5) for n in range(100))
    with pytest.raises(ArchiveRefused, match="at most 1000"):
        encode_listing({"/work": entries})


def test_a_content_that_vanished_from_the_store_is_read_again(tmp_path: Path) -> None:
    sandbox, archives = FolderSandbox(tmp_path / "a"), Archives(tmp_path / "store")
    (sandbox.work / "file").write_text("content")
    time.sleep(0.1)
    asyncio.run(archives.save(sandbox, ["/work"]))
    name = digest_of(b"content")
    (tmp_path / "store" / name[:2] / name).unlink()
    archives.store._used.clear()  # as after the time for which a use counts
    manifest = asyncio.run(archives.save(sandbox, ["/work"]))
    assert (moved(tmp_path, manifest, archives).work / "file").read_text() == "content"


def test_many_random_turns_restore_exactly(tmp_path: Path) -> None:
    dice = random.Random(4)
    sandbox, archives = FolderSandbox(tmp_path / "a"), Archives(tmp_path / "store")
    for turn in range(12):
        for _ in range(6):
            path = sandbox.work / dice.choice(["", "x/", "x/y/"]) / f"f{dice.randrange(5)}"
            path.parent.mkdir(parents=True, exist_ok=True)
            match dice.randrange(5):
                case 0:
                    path.unlink(missing_ok=True)
                case 1 if not os.path.lexists(path):
                    path.symlink_to(f"../f{turn}")
                case 2 if path.is_file() and not path.is_symlink():
                    path.chmod(dice.choice([0o600, 0o644, 0o755]))
                case _ if not path.is_symlink():
                    path.write_bytes(dice.randbytes(dice.randrange(2000)))
        manifest = asyncio.run(archives.save(sandbox, ["/work"]))
        assert state(moved(tmp_path, manifest, archives).work) == state(sandbox.work), turn
