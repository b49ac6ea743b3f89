"""The fingerprint of prompt files: which changes it detects, and how little it reads."""

import os

import pytest

from rlpost.errors import DataError
from rlpost.images.store import WITH_IMAGES
from rlpost.tasks import fingerprint
from rlpost.tasks.fingerprint import BLOCK_BYTES, NUM_BLOCKS, data_fingerprint
from rlpost.tasks.prompts import PromptFields
from tests.image_model import noise
from tests.unit.tasks.sets import write


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"input": "a"}\n' * 11)
    return path


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-15],
        lambda text: text + text[:30],
        lambda text: text.replace('"a"', '"b"', 1),
        lambda text: text[:20] + "#" + text[21:],
    ],
    ids=["fewer rows", "more rows", "another prompt", "a row became bad"],
)
def test_every_change_of_a_small_file_changes_it(file, change):
    before = data_fingerprint([file])
    file.write_text(change(file.read_text()))
    assert data_fingerprint([file]) != before


def test_neither_path_nor_time_changes_it(file, tmp_path):
    before = data_fingerprint([f"{file}@[0:5]"])
    os.utime(file, (1, 1))
    assert data_fingerprint([file.rename(tmp_path / "moved.jsonl")]) == before


def test_the_order_of_files_changes_it(file, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text("{}\n")
    assert data_fingerprint([file, other]) != data_fingerprint([other, file])


def test_of_a_large_file_only_size_head_tail_and_some_blocks_are_read(tmp_path, monkeypatch):
    path, size = tmp_path / "large.jsonl", (8 << 30) + 12345  # without blocks on the disk
    path.touch()
    os.truncate(path, size)
    before = data_fingerprint([path])

    def changed(at):
        with path.open("r+b") as file:
            file.seek(at)
            old = file.read(1)
            file.seek(at)
            file.write(b"x")
        found = data_fingerprint([path])
        with path.open("r+b") as file:
            file.seek(at)
            file.write(old)
        return found != before

    assert changed(0) and changed(size - 1) and changed(size // (NUM_BLOCKS - 1) + BLOCK_BYTES // 2)
    # a change between two blocks goes unnoticed; the digests of single prompts detect it
    assert not changed(BLOCK_BYTES)
    os.truncate(path, size + 1)
    assert data_fingerprint([path]) != before
    blocks = []
    real = fingerprint._blocks
    monkeypatch.setattr(
        fingerprint, "_blocks", lambda *given: (blocks.append(b) or b for b in real(*given))
    )
    data_fingerprint([path])
    assert sum(map(len, blocks)) == NUM_BLOCKS * BLOCK_BYTES == 16 << 20


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(DataError, match=r"--prompt-data .*none\.jsonl: cannot read the prompts"):
        data_fingerprint([tmp_path / "none.jsonl"])


IMAGES = PromptFields("input", image_key="images")


def part(**source):
    return [
        {"role": "user", "content": [{"type": "image", **source}, {"type": "text", "text": "?"}]}
    ]


@pytest.fixture
def with_images(tmp_path):
    """A file whose rows name images in each of the ways that name a path."""
    folder = tmp_path / "data"
    (folder / "inner").mkdir(parents=True)
    for name in ("a.png", "inner/b.png", "c.png", "d.png"):
        (folder / name).write_bytes(noise(40, 40, len(name)))
    rows = [
        {"input": "<image>?", "images": ["a.png"]},
        {"input": "<image><image>", "images": [{"path": "inner/b.png"}, "a.png"]},
        {"input": part(image="c.png")},
        {"input": part(image_url={"url": str(folder / "d.png")})},
        {"input": "no image"},
        {"input": "<image> a bad row"},
    ]
    return write(folder / "rows.jsonl", *rows)


@pytest.mark.parametrize("name", ["a.png", "inner/b.png", "c.png", "d.png"])
def test_an_image_that_changes_under_its_path_changes_it(with_images, name):
    """Also one byte of it, with its size and time; and one that is removed, or comes back."""
    image, before = with_images.parent / name, data_fingerprint([with_images], IMAGES)
    data, state = image.read_bytes(), image.stat()
    image.write_bytes(data[:30] + bytes([data[30] ^ 1]) + data[31:])
    os.utime(image, ns=(state.st_atime_ns, state.st_mtime_ns))
    changed = data_fingerprint([with_images], IMAGES)
    image.unlink()
    removed = data_fingerprint([with_images], IMAGES)
    assert len({before, changed, removed}) == 3
    image.write_bytes(data)
    assert data_fingerprint([with_images], IMAGES) == before
    files, mark, images = before.partition(WITH_IMAGES)
    assert mark and images and files == data_fingerprint([with_images]), "as rlpost 0.2 has it"


def test_images_of_many_rows_are_read_of_some_with_the_first_and_the_last(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "NUM_ROWS", 5)
    names = [f"{number}.png" for number in range(17)]
    for name in names:
        (tmp_path / name).write_bytes(name.encode())
    path = write(tmp_path / "rows.jsonl", *({"input": "<image>", "images": name} for name in names))
    read, real = [], fingerprint.read_file
    monkeypatch.setattr(fingerprint, "read_file", lambda one: read.append(one.name) or real(one))
    data_fingerprint([path], IMAGES)
    assert read == ["0.png", "4.png", "8.png", "12.png", "16.png"]
