"""The fingerprint of prompt files: which changes it detects, and how little it reads."""

import os

import pytest

from rlpost.errors import DataError
from rlpost.tasks import prompt_settings
from rlpost.tasks.prompt_settings import BLOCK_BYTES, NUM_BLOCKS, data_fingerprint


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
    real = prompt_settings._blocks
    monkeypatch.setattr(
        prompt_settings, "_blocks", lambda *given: (blocks.append(b) or b for b in real(*given))
    )
    data_fingerprint([path])
    assert sum(map(len, blocks)) == NUM_BLOCKS * BLOCK_BYTES == 16 << 20


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(DataError, match=r"--prompt-data .*none\.jsonl: cannot read the prompts"):
        data_fingerprint([tmp_path / "none.jsonl"])
