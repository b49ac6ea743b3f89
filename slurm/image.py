"""Container images as files: import once, keep by digest. Runs on the batch host, before any node starts a container.

    python -m slurm.image docker://REGISTRY#NAME:TAG --cache FOLDER      prints the path of the file

Comes in: the name of an image in a registry (or of the node's Docker or Podman). Goes out: a squashfs file in the
cache that all nodes see, named by the digest of its content, so that the registry is asked once and never by N nodes.

    CACHE/sha256-HEX.sqsh       an image
    CACHE/NAME-KEY.json         which digest a name stands for; remove it to import the name anew
    CACHE/NAME-KEY.lock

Invariants: an image appears whole or not at all; of several jobs that want the same name one imports and the
others wait. Only the standard library of Python 3.8 and later, see ``ledger``.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
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
        stat = path.stat()
    except OSError:
        return {"path": str(path)}  # on the nodes alone
    return {"path": str(path), "size": stat.st_size, "mtime": int(stat.st_mtime)}


def ensure(image: str, cache: Path) -> Path:
    """The file of an image, imported if the cache has none.

    Raises:
        ImageError: no enroot here, or it failed; holds what it said.
    """
    cache.mkdir(parents=True, exist_ok=True)
    entry = cache / f"{key(image)}.json"
    with _lock(cache / f"{key(image)}.lock"):
        known = _known(entry)
        if known is not None:
            return known
        for stale in cache.glob(f".{key(image)}.*.sqsh"):
            stale.unlink()  # of an import that was killed: we hold the lock
        path = _import(image, cache)
        beside = entry.with_name(f".{entry.name}.{uuid.uuid4().hex}")
        beside.write_text(json.dumps({"image": uri(image), "file": path.name}) + "\n")
        beside.replace(entry)
        return path


def _known(entry: Path) -> Path | None:
    try:
        path = entry.parent / json.loads(entry.read_text())["file"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return path if path.exists() else None


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
    with path.open("w") as file:
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"another job imports this image ({path}); waiting for it", file=sys.stderr)
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:  # a file system without locks: then jobs may import twice, and still never half
            print(f"{path}: no lock ({error}); importing without", file=sys.stderr)
        yield


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
