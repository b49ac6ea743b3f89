"""Names of images and the cache of imported ones, against the stand-in for enroot."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slurm.image import ImageError, describe, ensure, key, uri

ROOT = Path(__file__).parents[3]
NAME, URI, TEXT = "registry.site.org/rl/train:1.2", "docker://registry.site.org#rl/train:1.2", "hsqs" + "x" * 1000


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ("ubuntu:24.04", "docker://ubuntu:24.04"),
        ("lmsysorg/sglang:latest", "docker://lmsysorg/sglang:latest"),
        ("nvcr.io/nvidia/pytorch:25.01-py3", "docker://nvcr.io#nvidia/pytorch:25.01-py3"),
        ("nvcr.io#nvidia/pytorch:25.01-py3", "docker://nvcr.io#nvidia/pytorch:25.01-py3"),
        ("docker://nvcr.io/nvidia/pytorch", "docker://nvcr.io#nvidia/pytorch"),
        ("localhost:5000/a/b", "docker://localhost:5000#a/b"),
        ("dockerd://train:1", "dockerd://train:1"),
    ],
)
def test_an_image_is_named_as_enroot_names_it(image: str, expected: str) -> None:
    assert uri(image) == expected


def test_different_images_have_different_keys() -> None:
    names = ["a/b:c", "a_b:c", "a/b_c", "docker://a/b", "dockerd://a/b"]
    assert len({key(name) for name in names}) == len(names)
    assert key("docker://a/b:c") == key("a/b:c")


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A registry with one image; ``pulled`` counts."""
    (tmp_path / "images.json").write_text(json.dumps({URI: TEXT}))
    monkeypatch.setenv("STANDIN_REGISTRY", str(tmp_path))
    monkeypatch.setenv("PATH", f"{ROOT / 'tests/fakes/bin'}:{os.environ['PATH']}")
    return tmp_path


def test_of_many_jobs_one_imports_and_all_get_the_whole_image(registry: Path) -> None:
    """One pull, one file, named by the digest of its content; nothing half or hidden is left."""
    cache = registry / "cache"
    command = [sys.executable, "-m", "slurm.image", NAME, "--cache", str(cache)]

    def ask(_: int) -> str:
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()

    with ThreadPoolExecutor(4) as jobs:
        paths = set(jobs.map(ask, range(4)))
    assert paths == {f"{cache}/sha256-{hashlib.sha256(TEXT.encode()).hexdigest()}.sqsh"}
    assert Path(paths.pop()).read_text() == TEXT
    assert (registry / "pulled").read_text() == URI + "\n"
    assert sorted(path.suffix for path in cache.iterdir()) == [".json", ".lock", ".sqsh"]


def test_what_a_killed_import_left_is_removed_and_a_lost_file_imported_anew(registry: Path) -> None:
    cache = registry / "cache"
    cache.mkdir()
    (cache / f".{key(NAME)}.dead.sqsh").write_text("half")
    path = ensure(NAME, cache)
    assert not list(cache.glob(".*.sqsh"))
    path.unlink()
    assert ensure(NAME, cache) == path and path.read_text() == TEXT


def test_what_the_registry_says_is_shown_and_nothing_is_published(registry: Path) -> None:
    with pytest.raises(ImageError, match=r"docker://nowhere/x failed.*\n.*404"):
        ensure("nowhere/x", registry / "cache")
    assert [path.suffix for path in (registry / "cache").iterdir()] == [".lock"]


def test_without_enroot_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ImageError, match=r"enroot import --output FILE.sqsh docker://a.*container_image"):
        ensure("a", tmp_path)


def test_an_image_is_described_by_its_digest_or_by_its_file(tmp_path: Path) -> None:
    """An image that lies on the nodes alone is known by its path."""
    file = tmp_path / "image.sqsh"
    file.write_text("hsqs")
    assert describe(file) == {"path": str(file), "size": 4, "mtime": int(file.stat().st_mtime)}
    assert describe(tmp_path / f"sha256-{'a' * 64}.sqsh")["sha256"] == "a" * 64
    assert describe(Path("/local/on/nodes.sqsh")) == {"path": "/local/on/nodes.sqsh"}
