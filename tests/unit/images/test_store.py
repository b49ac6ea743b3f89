"""A digest that the store returned has its bytes; damage and absence name the file."""

import hashlib
import stat

import pytest

from rlpost.errors import CheckpointError, ImageError
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
