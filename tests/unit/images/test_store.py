"""A digest that the store returned has its bytes; damage and absence name the file."""

import errno
import hashlib
import os
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlpost.errors import CheckpointError, ImageError
from rlpost.images import read_file
from rlpost.images import store as store_module
from rlpost.images.store import ImageStore

DATA = b"\x89PNG not decoded here"
DIGEST = hashlib.sha256(DATA).hexdigest()


def test_bytes_are_kept_by_their_digest_in_private_files(tmp_path):
    store = ImageStore(tmp_path)
    assert store.add(DATA) == store.add(DATA) == DIGEST
    path = tmp_path / "images" / DIGEST[:2] / DIGEST
    assert path.read_bytes() == DATA == ImageStore(tmp_path).read(DIGEST)
    modes = {stat.S_IMODE(each.stat().st_mode) for each in (path.parent, path.parent.parent)}
    assert modes == {0o700} and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in path.parent.iterdir()] == [DIGEST]  # nothing temporary


def test_the_file_and_its_name_are_synced_before_the_digest_is_returned(tmp_path, monkeypatch):
    events = []
    import os

    for name in ("fsync", "replace"):
        real = getattr(os, name)

        def call(*args, name=name, real=real):
            events.append(name)
            return real(*args)

        monkeypatch.setattr(os, name, call)
    ImageStore(tmp_path).add(DATA)
    at = events.index("replace")
    assert "fsync" in events[:at] and "fsync" in events[at:]


def test_folders_that_others_made_are_synced_once(tmp_path, monkeypatch):
    """Their writer may have died before their names were durable."""
    (tmp_path / "images" / DIGEST[:2]).mkdir(parents=True)
    synced = []
    monkeypatch.setattr(store_module, "sync", synced.append)
    store = ImageStore(tmp_path)
    store.add(DATA)
    parents = [tmp_path, tmp_path / "images"]
    assert synced[:2] == parents
    other = next(data for data in map(str, range(10_000)) if same_folder(data))
    store.add(other.encode())
    assert [path for path in synced if path in parents] == parents


def same_folder(text: str) -> bool:
    return hashlib.sha256(text.encode()).hexdigest()[:2] == DIGEST[:2]


class FailingStorage:
    """``open`` of images, which fails as often as it is told."""

    def __init__(self, monkeypatch, number: int, times: int) -> None:
        self.number, self.left = number, times
        self._open = os.open
        monkeypatch.setattr(os, "open", self)
        monkeypatch.setattr(read_file, "PAUSES_S", (0.0, 0.0))

    def __call__(self, path, *args, **keywords):
        if str(path).endswith(DIGEST) and self.left:
            self.left -= 1
            raise OSError(self.number, os.strerror(self.number))
        return self._open(path, *args, **keywords)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ENFILE])
def test_a_fault_of_the_storage_is_retried_and_is_not_wrong_data(tmp_path, monkeypatch, number):
    store = ImageStore(tmp_path)
    store.add(DATA)
    storage = FailingStorage(monkeypatch, number, times=2)
    assert store.read(DIGEST) == DATA and storage.left == 0
    storage.left = 3
    with pytest.raises(OSError, match=os.strerror(number)):
        store.read(DIGEST)
    assert storage.left == 0


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOTDIR, errno.ENAMETOOLONG])
def test_a_wrong_path_is_wrong_data_at_once(tmp_path, monkeypatch, number):
    store = ImageStore(tmp_path)
    store.add(DATA)
    storage = FailingStorage(monkeypatch, number, times=9)
    with pytest.raises(ImageError, match=f"{DIGEST}: cannot be read: {os.strerror(number)}"):
        store.read(DIGEST)
    assert storage.left == 8


@pytest.mark.parametrize("content", [b"", DATA[:-1], DATA[:-1] + b"!"])
def test_a_damaged_file_is_found_and_written_again(tmp_path, content):
    path = tmp_path / "images" / DIGEST[:2] / DIGEST
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.raises(ImageError, match=f"{DIGEST}: its {len(content)} bytes are not those"):
        ImageStore(tmp_path).read(DIGEST)
    store = ImageStore(tmp_path)
    assert store.add(DATA) == DIGEST and store.read(DIGEST) == DATA


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ImageError, match=f"{DIGEST}: cannot be read: No such file"):
        ImageStore(tmp_path).read(DIGEST)


def test_a_write_that_fails_leaves_no_file_and_is_tried_again(tmp_path, monkeypatch):
    import os

    store = ImageStore(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "full")))
        with pytest.raises(OSError, match="full"):
            store.add(DATA)
    assert not [each for each in (tmp_path / "images").rglob("*") if each.is_file()]
    assert store.add(DATA) == DIGEST and store.read(DIGEST) == DATA


def test_images_of_a_checkpoint_of_another_run_are_taken_from_its_folder(tmp_path):
    theirs, own = ImageStore(tmp_path / "theirs"), ImageStore(tmp_path / "own")
    for store in (theirs, own):
        store.folder.parent.mkdir()
    theirs.add(DATA)
    with pytest.raises(
        CheckpointError, match=f"{DIGEST}: an image .* is missing; copy the folder images"
    ):
        own.complete([DIGEST])
    own.complete([DIGEST], [tmp_path / "nowhere", theirs.folder.parent])
    assert own.read(DIGEST) == DATA
    own.complete([DIGEST])


def test_a_scaled_file_is_made_once_from_the_stored_bytes(tmp_path):
    store, calls = ImageStore(tmp_path), []

    def make(data):
        calls.append(data)
        return b"scaled"

    store.add(DATA)
    first, second = (store.scaled(DIGEST, (64, 32), make) for _ in range(2))
    assert first == second and first.read_bytes() == b"scaled" and calls == [DATA]
    first.unlink()  # someone made room
    assert store.scaled(DIGEST, (64, 32), make) == first and first.read_bytes() == b"scaled"
    assert first.suffix == ".png" and store.scaled(DIGEST, (32, 32), make) != first


def test_calls_at_once_convert_an_image_once(tmp_path):
    store, calls, ready = ImageStore(tmp_path), [], threading.Barrier(8)
    store.add(DATA)

    def make(data):
        calls.append(data)
        time.sleep(0.05)  # long enough for the others to ask
        return b"scaled"

    def ask(number):
        ready.wait()
        return store.scaled(DIGEST, (64, 32), make)

    with ThreadPoolExecutor(8) as threads:
        paths = set(threads.map(ask, range(8)))
    assert len(paths) == len(calls) == 1


def test_a_conversion_that_fails_is_tried_by_the_next_call(tmp_path):
    store = ImageStore(tmp_path)
    store.add(DATA)
    with pytest.raises(OSError, match="full"):
        store.scaled(DIGEST, (64, 32), lambda data: (_ for _ in ()).throw(OSError(28, "full")))
    assert store.scaled(DIGEST, (64, 32), lambda data: b"scaled").read_bytes() == b"scaled"


def test_a_writer_removes_what_a_killed_one_left_and_nothing_else(tmp_path):
    program = (
        "import os, sys; from rlpost.images import store; os.replace = lambda *_: os._exit(9)\n"
    )
    program += "store.ImageStore(sys.argv[1]).add(sys.stdin.buffer.read())"
    for _ in range(2):
        killed = subprocess.run([sys.executable, "-c", program, str(tmp_path)], input=DATA)
        assert killed.returncode == 9
    folder = tmp_path / "images" / DIGEST[:2]
    assert len(list(folder.iterdir())) == 2 and not (folder / DIGEST).exists()
    writer = ImageStore(tmp_path)
    writer.add(DATA)
    in_progress = folder / f".{DIGEST}-8x8.png.1.{writer._writer}"
    in_progress.write_bytes(DATA)
    writer.remove_unfinished()
    assert {path.name for path in folder.iterdir()} == {DIGEST, in_progress.name}
