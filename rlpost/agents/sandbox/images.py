"""The root of an image as a folder: enroot unpacks a squashfs file, a folder is used as it is.

enroot does not isolate (network and processes are the node's); it only unpacks. Isolation is that
of ``inner`` over the unpacked folder, which stays read-only under a writable layer.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rlpost.errors import ConfigError

PREFIX = "rlpost-sandbox-image-"
MARK = ".made-by"  # a file with the name of the server, beside the image


@contextlib.contextmanager
def unpacked(image: str | None, name: str) -> Iterator[str | None]:
    """Yield the folder of an image; an unpacked folder is removed at the end.

    Raises ConfigError when the image is missing or enroot cannot unpack it.
    """
    if image is None or Path(image).is_dir():
        yield image
        return
    if not Path(image).is_file():
        raise ConfigError(f"--sandbox-image {image} is neither a folder nor a .sqsh file")
    remove_leftovers(name)
    folder = _folder(name)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:  # of another user
        folder = Path(tempfile.mkdtemp(prefix=f"{folder.name}-"))
    try:
        (folder / MARK).write_text(name)
        environment = {**os.environ, "ENROOT_DATA_PATH": str(folder)}
        command = ["enroot", "create", "--name", "root", image]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
        except FileNotFoundError:
            raise ConfigError(
                f"--sandbox-image {image}: no enroot on this node; give an unpacked folder"
            ) from None
        if done.returncode:
            raise ConfigError(f"enroot cannot unpack {image}: {done.stderr.strip()[-500:]}")
        yield str(folder / "root")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_leftovers(name: str) -> None:
    """Remove the folders that a killed server of this name left; no folder of another owner."""
    nominal = _folder(name)
    for folder in (nominal, *nominal.parent.glob(f"{glob.escape(nominal.name)}-*")):
        try:
            is_own = folder.lstat().st_uid == os.getuid() and (folder / MARK).read_text() == name
        except OSError:
            continue
        if is_own and not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)


def _folder(name: str) -> Path:
    safe_name = re.sub(r"[^A-Za-z0-9_.-]", "_", name)
    return Path(tempfile.gettempdir()) / f"{PREFIX}{safe_name}"
