"""Container images as files: import once, keep by digest. Runs on the batch host, before any node starts a container.

    python -m slurm.image docker://REGISTRY#NAME:TAG --cache FOLDER      prints the path of the file

Comes in: the name of an image in a registry (or of the node's Docker or Podman). Goes out: a squashfs file in the
cache that all nodes see, named by the digest of its content, so that the registry is asked once and never by N nodes.

    CACHE/sha256-HEX.sqsh       an image
    CACHE/NAME-KEY.json         which digest a name stands for; remove it to import the name anew
    CACHE/NAME-KEY.lock

Invariants: an image appears whole or not at all; of several jobs that want the same name one imports and the
others wait. A user who can read the cache's folder can use its images, and one who can write to it can import: the
files have the folder's permissions, whatever the umask. Only the standard library of Python 3.8 and later, see
``ledger``.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import pwd
import re
import stat
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any, Iterator  # noqa: UP035

_CHUNK_BYTES = 1 << 24
_DIGEST_NAME = re.compile(r"sha256-([0-9a-f]{64})\.sqsh")


class ImageError(Exception):
    """An image cannot be had; the message says why and what to do."""


def is_file_name(image: str) -> bool:
    """Whether an image is named by its path."""
    return image.startswith("/")


def uri(image: str) -> str:
    """The name of an image as ``enroot import`` takes it (enroot, doc/cmd/import.md).

    ``nvcr.io/nvidia/pytorch:25.01-py3`` is ``docker://nvcr.io#nvidia/pytorch:25.01-py3``: the first part is a registry
    where it holds a dot or a colon or is ``localhost``, as Docker reads it.
    """
    if "://" in image:
        scheme, _, rest = image.partition("://")
        return f"{scheme}://{_with_registry(rest)}" if scheme == "docker" else image
    return f"docker://{_with_registry(image)}"


def _with_registry(name: str) -> str:
    first, slash, rest = name.partition("/")
    is_registry = "#" not in name and slash and ("." in first or ":" in first or first == "localhost")
    return f"{first}#{rest}" if is_registry else name


def key(image: str) -> str:
    """The name of an image as a file name: readable, and different for different images."""
    name = uri(image)
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name.split("://")[1]) + "-" + hashlib.sha256(name.encode()).hexdigest()[:12]


def describe(path: Path) -> dict[str, Any]:
    """What the ledger keeps of an image: its digest where it lies in a cache, else path, size and time of the file."""
    match = _DIGEST_NAME.fullmatch(path.name)
    if match:
        return {"path": str(path), "sha256": match.group(1)}
    try:
        status = path.stat()
    except OSError:
        return {"path": str(path)}  # on the nodes alone
    return {"path": str(path), "size": status.st_size, "mtime": int(status.st_mtime)}


def ensure(image: str, cache: Path) -> Path:
    """The file of an image, imported if the cache has none.

    Raises:
        ImageError: no enroot here, or it failed (holds what it said); or the cache is not one that this user may use.
    """
    entry = cache / f"{key(image)}.json"
    # Before the lock: reading needs no permission to write.
    known = _known(entry)
    if known is not None:
        return known
    cache.mkdir(parents=True, exist_ok=True)
    if not os.access(cache, os.W_OK | os.X_OK):
        raise ImageError(
            f"image_cache = {cache} (--image-cache) holds no {image}, and {_user()} cannot write to it; import "
            f"the image as a user who can (python3 -m slurm.image {image} --cache {cache}), or give another folder"
        )
    with _lock(cache / f"{key(image)}.lock"):
        known = _known(entry)
        if known is not None:
            return known
        for stale in cache.glob(f".{key(image)}.*.sqsh"):
            with contextlib.suppress(OSError):  # another user's in a folder with the sticky bit
                stale.unlink()  # of an import that was killed: we hold the lock
        path = _import(image, cache)
        beside = entry.with_name(f".{entry.name}.{uuid.uuid4().hex}")
        beside.write_text(json.dumps({"image": uri(image), "file": path.name}) + "\n")
        _share(beside)
        beside.replace(entry)
        return path


def _known(entry: Path) -> Path | None:
    """Raises ImageError for an image that is there and that this user may not read."""
    try:
        path: Path = entry.parent / json.loads(entry.read_text())["file"]
    except PermissionError:
        raise _unreadable(entry) from None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not path.exists():
        return None
    for file in (entry, path):  # imported before the folder was shared, or by a version that did not share
        _share(file)
    if not os.access(path, os.R_OK):
        raise _unreadable(path)
    return path


def _unreadable(path: Path) -> ImageError:
    return ImageError(
        f"image_cache (--image-cache): {path} exists and {_user()} cannot read it; its owner has to share it "
        f"(chmod g+r,o+r {path}), or give another folder"
    )


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"user {os.getuid()}"


def _share(path: Path) -> None:
    """Give a file its folder's permissions to read, which the batch script's umask withholds.

    Only the owner of a file can do this. The group of the file is the folder's where that is setgid.
    """
    folder = path.parent.stat()
    readable = 0o600 | (folder.st_mode & 0o044)
    with contextlib.suppress(OSError):
        file = path.stat()
        if file.st_uid != os.geteuid():
            return
        if file.st_mode & readable != readable:
            path.chmod(stat.S_IMODE(file.st_mode) | readable)


def _import(image: str, cache: Path) -> Path:
    beside = cache / f".{key(image)}.{uuid.uuid4().hex}.sqsh"
    command = ["enroot", "import", "--output", str(beside), "--", uri(image)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0 or not beside.exists():
            raise ImageError(f"enroot import {uri(image)} failed (exit {done.returncode}):\n{done.stdout[-2000:]}")
        digest = hashlib.sha256()
        with beside.open("rb") as file:
            for chunk in iter(lambda: file.read(_CHUNK_BYTES), b""):
                digest.update(chunk)
            os.fsync(file.fileno())
        path = cache / f"sha256-{digest.hexdigest()}.sqsh"
        _share(beside)
        beside.replace(path)
        return path
    except FileNotFoundError:
        raise ImageError(
            f"no enroot on this host to import {image}; import it where there is one (enroot import --output FILE.sqsh "
            f"{uri(image)}) and give the path of the file as container_image"
        ) from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            beside.unlink()


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    try:
        descriptor = _open_lock(path)
    except OSError as error:
        _say_without_lock(path, error)
        yield
        return
    with os.fdopen(descriptor) as file:
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"another job imports this image ({path}); waiting for it", file=sys.stderr)
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            _say_without_lock(path, error)
        yield


def _open_lock(path: Path) -> int:
    """A descriptor to lock; for writing if possible, for over NFS flock wants that (flock(2)), else for reading."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except PermissionError:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    # A user who can write to the folder can lock; _share gives permission to read only.
    writable = path.parent.stat().st_mode & 0o066
    with contextlib.suppress(OSError):  # another user's
        os.fchmod(descriptor, 0o600 | writable)
    return descriptor


def _say_without_lock(path: Path, error: OSError) -> None:
    """A file system without locks, or another user's lock: jobs may import twice, and each image appears whole."""
    print(f"{path}: no lock ({error}); importing without", file=sys.stderr)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m slurm.image", description="The file of a container image.")
    parser.add_argument("image")
    parser.add_argument("--cache", type=Path, required=True, metavar="FOLDER")
    options = parser.parse_args()
    try:
        print(ensure(options.image, options.cache))
    except (ImageError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
