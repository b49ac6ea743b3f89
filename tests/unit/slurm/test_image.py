"""Image names and the cache of imported images, with a fake enroot."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slurm.image import ImageError, UnusableImageError, describe, ensure, key, main, uri

ROOT = Path(__file__).parents[3]
NAME, URI, TEXT = (
    "registry.site.org/rl/train:1.2",
    "docker://registry.site.org#rl/train:1.2",
    "hsqs" + "x" * 1000,
)


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
    """A registry with one image; ``pulled`` counts the requests."""
    (tmp_path / "images.json").write_text(json.dumps({URI: TEXT}))
    monkeypatch.setenv("STANDIN_REGISTRY", str(tmp_path))
    monkeypatch.setenv("PATH", f"{ROOT / 'tests/fakes/bin'}:{os.environ['PATH']}")
    return tmp_path


def test_of_many_jobs_one_imports_and_all_get_the_whole_image(registry: Path) -> None:
    """One request, one file named by the digest of its content; no partial or temporary file is
    left.
    """
    cache = registry / "cache"
    command = [sys.executable, "-m", "slurm.image", NAME, "--cache", str(cache)]

    def ask(_: int) -> str:
        return subprocess.run(
            command, cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.strip()

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


def test_a_full_disk_is_named_with_the_space_of_every_folder(
    registry: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What tar says of ENROOT_TEMP_PATH names neither host nor folder; a retry may succeed."""
    (registry / "bin").mkdir()
    program = registry / "bin/enroot"
    program.write_text(
        "#!/bin/sh\necho tar: ./x: Cannot write: No space left on device >&2\nexit 2\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("ENROOT_TEMP_PATH", "/dev/shm/not-yet")
    monkeypatch.setattr(sys, "argv", ["image", NAME, "--cache", str(registry / "cache")])
    assert main() == 1
    last = capfd.readouterr().err.splitlines()[-1]
    free = shutil.disk_usage("/dev/shm").free >> 20
    assert re.match(rf"on {os.uname().nodename}: ENROOT_TEMP_PATH /dev/shm/not-yet: \d+ MB", last)
    assert abs(int(last.split(": ")[2].split(" ")[0]) - free) < 1000
    assert "ENROOT_CACHE_PATH /" in last and f"--image-cache {registry}/cache: " in last


def test_a_cache_that_cannot_be_made_is_refused_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", ["image", NAME, "--cache", str(tmp_path / "file/cache")])
    assert main() == 78
    assert "file/cache cannot be created (Not a directory)" in capfd.readouterr().err


def test_without_enroot_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        UnusableImageError, match=r"enroot import --output FILE.sqsh docker://a.*--container-image"
    ):
        ensure("a", tmp_path)


def test_a_file_that_is_missing_is_named_and_enroot_is_not_blamed(
    registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clean-up of the cache deletes the image between the import and its publication."""
    monkeypatch.setattr("slurm.image._share", Path.unlink)
    with pytest.raises(
        ImageError, match=r"cache/\..*\.sqsh is missing, so .*was not imported"
    ) as it:
        ensure(NAME, registry / "cache")
    assert "no enroot" not in str(it.value)


def test_an_enroot_whose_interpreter_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "enroot"
    program.write_text("#!/nowhere/bash\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnusableImageError, match=f"the interpreter of {program} is missing"):
        ensure("a", tmp_path / "cache")


def test_an_image_is_described_by_its_digest_or_by_its_file(tmp_path: Path) -> None:
    """An image that only compute nodes have is described by its path."""
    file = tmp_path / "image.sqsh"
    file.write_text("hsqs")
    assert describe(file) == {"path": str(file), "size": 4, "mtime": int(file.stat().st_mtime)}
    cached = tmp_path / f"sha256-{'a' * 64}.sqsh"
    (tmp_path / "damaged.json").write_text("[")
    for name, target in (("docker://r#a@sha256:1", cached), ("docker://r#b", file)):
        entry = {"image": name, "file": target.name}
        (tmp_path / f"{key(name)}.json").write_text(json.dumps(entry))
    assert describe(cached) == {
        "path": str(cached),
        "sha256": "a" * 64,
        "names": ["docker://r#a@sha256:1"],
    }
    assert describe(Path("/local/on/nodes.sqsh")) == {"path": "/local/on/nodes.sqsh"}


USER, OTHER = 61_001, 61_002  # ids that nobody has
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users")


@pytest.fixture
def open_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Like ``registry``, in a folder that every user can read; pytest makes its own folders
    private.
    """
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="rlpost-images-") as folder:
        Path(folder).chmod(0o755)
        (Path(folder) / "images.json").write_text(json.dumps({URI: TEXT}))
        monkeypatch.setenv("STANDIN_REGISTRY", folder)
        monkeypatch.setenv("PATH", f"{ROOT / 'tests/fakes/bin'}:{os.environ['PATH']}")
        yield Path(folder)


def ask_as(user: int, registry: Path, *, umask: int = 0o077) -> subprocess.CompletedProcess[str]:
    """What a batch script runs, as one of two users of a group."""
    code = registry / "code"
    if not code.exists():  # the checkout may lie where only its owner looks
        (code / "slurm").mkdir(parents=True)
        (code / "slurm/__init__.py").touch()
        for name in ("image", "causes", "enroot"):
            shutil.copy(ROOT / f"slurm/{name}.py", code / "slurm")
        shutil.copytree(ROOT / "common", code / "common")
        shutil.copytree(ROOT / "tests/fakes/bin", code / "bin")
    (registry / "pulled").touch()
    (registry / "pulled").chmod(0o666)
    return subprocess.run(
        ["/usr/bin/python3", "-B", "-m", "slurm.image", NAME, "--cache", str(registry / "cache")],
        cwd=code,
        env={"PATH": f"{code}/bin:/usr/bin:/bin", "STANDIN_REGISTRY": str(registry)},
        capture_output=True,
        text=True,
        user=user,
        group=USER,
        extra_groups=[],
        umask=umask,
    )


@needs_root
@pytest.mark.parametrize(
    ("mode", "image", "lock"),
    [(0o2770, 0o640, 0o660), (0o1777, 0o644, 0o666), (0o700, 0o600, 0o600)],
)
def test_a_cache_is_shared_as_its_folder_is(
    open_registry: Path, mode: int, image: int, lock: int
) -> None:
    """Under the batch script's umask. The user who imports first owns the files; others can read
    and lock them.
    """
    cache = open_registry / "cache"
    cache.mkdir()
    os.chown(cache, USER, USER)
    cache.chmod(mode)
    first = ask_as(USER, open_registry)
    assert first.returncode == 0, first.stderr
    modes = {path.suffix: path.stat().st_mode & 0o777 for path in cache.iterdir()}
    assert modes == {".sqsh": image, ".json": image, ".lock": lock}
    if mode == 0o700:
        return
    second = ask_as(OTHER, open_registry)
    assert (second.returncode, second.stdout) == (0, first.stdout), second.stderr
    assert (open_registry / "pulled").read_text() == URI + "\n"


@needs_root
@pytest.mark.parametrize("file", ["ROOT/evil.sqsh", "../evil.sqsh", f"sha256-{'0' * 64}.sqsh"])
def test_an_entry_of_another_user_in_a_folder_open_to_all_chooses_no_image(
    open_registry: Path, file: str
) -> None:
    """A job runs the image with the rights and the secrets of its user."""
    cache = open_registry / "cache"
    cache.mkdir()
    cache.chmod(0o1777)
    entry = cache / f"{key(NAME)}.json"
    file = file.replace("ROOT", str(open_registry))
    entry.write_text(json.dumps({"image": URI, "file": file}))
    evil = Path(cache / file)
    evil.write_text("hsqs evil")
    try:
        for path in (entry, evil):
            os.chown(path, OTHER, OTHER)
            path.chmod(0o644)
        done = ask_as(USER, open_registry)
        assert str(evil.name) not in done.stdout
        if file.startswith("sha256"):
            assert done.returncode == 78
            assert f"{entry.name} belongs to user {OTHER}, who could have chosen" in done.stderr
        else:  # imported, although the name of the entry is taken
            digest = hashlib.sha256(TEXT.encode()).hexdigest()
            assert done.stdout == f"{cache}/sha256-{digest}.sqsh\n", done.stderr
    finally:
        evil.unlink()


@needs_root
def test_what_is_found_needs_no_right_to_write(open_registry: Path) -> None:
    """A folder that an administrator fills for a site; only the administrator can write the lock of
    an earlier import.
    """
    cache = open_registry / "cache"
    ensure(NAME, cache)
    cache.chmod(0o755)
    (path,) = cache.glob("*.sqsh")
    for file in (path, *cache.glob("*.json")):
        file.chmod(0o644)
    (cache / f"{key(NAME)}.lock").chmod(0o600)
    done = ask_as(USER, open_registry)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{path}\n", "")


@needs_root
def test_a_miss_where_one_may_not_write_says_so(open_registry: Path) -> None:
    (open_registry / "cache").mkdir(mode=0o755)
    done = ask_as(USER, open_registry)
    assert (
        done.returncode == 78
        and f"does not contain {NAME}, and user {USER} cannot write to it" in done.stderr
    )
    assert "--image-cache" in done.stderr


@needs_root
def test_an_image_that_its_owner_did_not_share_is_named_and_shared_when_the_owner_comes(
    open_registry: Path,
) -> None:
    """Earlier versions created 0600 in any folder."""
    cache = open_registry / "cache"
    ensure(NAME, cache)
    cache.chmod(0o777)
    (path,) = cache.glob("*.sqsh")
    path.chmod(0o600)
    done = ask_as(USER, open_registry)
    assert done.returncode == 78 and f"{path} exists but user {USER} cannot read it" in done.stderr
    ensure(NAME, cache)
    assert ask_as(USER, open_registry).stdout == f"{path}\n"
