"""A fingerprint changes with the content of weights, and with nothing else."""

import os
import shutil

import pytest

from rlpost.durable import run_files, weights_fingerprint
from rlpost.durable.weights_fingerprint import BLOCK_BYTES, fingerprint

BETWEEN = 300_000
"""A byte between two of the blocks that are read."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model whose files are larger than what is read of them in full."""
    monkeypatch.setattr(weights_fingerprint, "WHOLE_BYTES", 1 << 10)
    path = tmp_path / "model"
    (path / "inner").mkdir(parents=True)
    (path / "config.json").write_text("{}")
    header = b"tensors" * 30_000
    data = len(header).to_bytes(8, "little") + header + bytes(20 * BLOCK_BYTES)
    (path / "model.safetensors").write_bytes(data)
    (path / "inner" / ".metadata").write_bytes(b"m")
    return path


def test_a_copy_has_an_equal_fingerprint_and_texts_for_readers_do_not_count(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "README.md").write_text("text")
    (copy / ".cache").mkdir()
    (copy / ".cache" / "x.json").write_text("{}")
    assert fingerprint(copy) == fingerprint(folder) is not None
    assert fingerprint(tmp_path / "missing") is None


@pytest.mark.parametrize("where", [9, 8 + 7 * 30_000 - 1, BETWEEN, -1])
def test_a_change_of_the_header_or_of_a_sampled_block_is_seen(folder, where):
    before, file = fingerprint(folder), folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[where] ^= 1
    file.write_bytes(bytes(data))
    assert (fingerprint(folder) != before) == (where != BETWEEN)


@pytest.mark.parametrize("how", ["size", "name", "config", "inner"])
def test_a_change_of_names_sizes_or_small_files_is_seen(folder, how):
    before = fingerprint(folder)
    if how == "size":
        with open(folder / "model.safetensors", "ab") as file:
            file.write(b"0")
    elif how == "name":
        (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    elif how == "config":
        (folder / "config.json").write_text("[]")
    else:
        (folder / "inner" / ".metadata").write_bytes(b"n")
    assert fingerprint(folder) != before


def test_links_are_followed_to_files_and_folders_and_not_in_circles(folder, tmp_path):
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in folder.iterdir():
        (linked / path.name).symlink_to(path)
    assert fingerprint(linked) == fingerprint(folder)
    before = fingerprint(folder)
    (folder / "inner" / "above").symlink_to(folder)
    assert fingerprint(folder) == before and fingerprint(linked) is not None
    (folder / "inner" / "above").unlink()
    (folder / "inner" / ".metadata").write_bytes(b"n")
    (folder / "model.safetensors").unlink()  # leaves a link to nothing
    assert fingerprint(linked) == fingerprint(folder) != before


def test_a_listing_that_fails_for_a_moment_is_repeated(folder, monkeypatch):
    before, scandir, failures = fingerprint(folder), os.scandir, ["inner"]

    def fail_once(path):
        if failures and str(path).endswith(failures[0]):
            failures.clear()
            raise OSError(5, "Input/output error")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", fail_once)
    monkeypatch.setattr(run_files, "RETRY_AFTER_S", (0.0,))
    assert fingerprint(folder) == before and not failures
