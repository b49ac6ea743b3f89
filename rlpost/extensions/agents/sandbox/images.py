"""The root of an image as a folder: enroot unpacks a squashfs file, a folder is used as it is.

enroot does not isolate (network and processes are the node's); it only unpacks. Isolation is that
of ``inner`` over the unpacked folder, which stays read-only under a writable layer.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlpost.config.keys import without_keys
from rlpost.durable.daemon_threads import in_daemon
from rlpost.errors import ConfigError

PREFIX = "rlpost-sandbox-image-"
OF_PROCESS = "process-"
IMAGE_USER = 0x7FFF_FFFF  # the last of the users that systemd leaves unassigned
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
        raise ConfigError(f"image {image} is neither a folder nor a .sqsh file")
    remove_leftovers(name)
    folder = _folder(name)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:  # of another user
        folder = Path(tempfile.mkdtemp(prefix=f"{folder.name}-"))
    try:
        (folder / MARK).write_text(name)
        environment = without_keys(os.environ) | {"ENROOT_DATA_PATH": str(folder)}
        command = ["enroot", "create", "--name", "root", image]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
        except FileNotFoundError:
            raise ConfigError(
                f"image {image}: no enroot on this node; give an unpacked folder"
            ) from None
        if done.returncode:
            raise ConfigError(f"enroot cannot unpack {image}: {done.stderr.strip()[-500:]}")
        if os.geteuid() == 0:
            give_to_sandboxes(folder / "root")
        yield str(folder / "root")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def give_to_sandboxes(root: Path) -> None:
    """Make IMAGE_USER the owner of everything below a folder; that takes root.

    Sandboxes that root starts run as the owner of their image (``local.host_identity``). They write
    to a layer of their own.
    """
    for folder, names, files in os.walk(root):
        for name in (*names, *files):
            os.lchown(f"{folder}/{name}", IMAGE_USER, IMAGE_USER)
    os.lchown(root, IMAGE_USER, IMAGE_USER)


@dataclass
class _Unpacked:
    """An image in the cache: the work that unpacks it, its removal, and its sandboxes."""

    folder: asyncio.Future[str]
    stack: contextlib.ExitStack
    users: int = 0


class ImageCache:
    """The images of single sandboxes: each unpacked once, and kept while a sandbox uses it.

    ``max_unused`` further ones are kept, those of the last use.
    """

    def __init__(self, name: str | None = None, *, max_unused: int = 4) -> None:
        """``name``: of this server, the same after a restart; default: one of this process."""
        self._name = name or f"{OF_PROCESS}{os.getpid()}"
        self._max_unused = max_unused
        self._images: dict[str, _Unpacked] = {}
        self._changing = asyncio.Lock()

    async def take(self, image: str) -> str:
        """Return the folder of an image, which stays until ``give_back``.

        Raises ConfigError when it cannot be unpacked.
        """
        if Path(image).is_dir():
            return image
        entry = self._images.pop(image, None)
        if entry is None:
            stack = contextlib.ExitStack()
            entry = _Unpacked(asyncio.ensure_future(self._unpack(image, stack)), stack)
        self._images[image] = entry  # the newest is the last
        entry.users += 1
        try:
            return str(await asyncio.shield(entry.folder))
        except BaseException as error:
            entry.users -= 1
            if not isinstance(error, asyncio.CancelledError) and self._images.get(image) is entry:
                del self._images[image]
            raise

    async def _unpack(self, image: str, stack: contextlib.ExitStack) -> str:
        digest = hashlib.sha256(image.encode()).hexdigest()[:16]
        context = unpacked(image, f"{self._name}-{digest}")
        async with self._changing:
            await in_daemon(remove_images_of_ended_processes)
            return str(await in_daemon(lambda: stack.enter_context(context)))

    async def give_back(self, image: str) -> None:
        """End one use of an image; remove those that are too many."""
        entry = self._images.get(image)
        if entry is None:  # a folder
            return
        entry.users -= 1
        unused = [each for each, entry in self._images.items() if entry.users == 0]
        excess = unused[: max(0, len(unused) - self._max_unused)]
        stacks = [self._images.pop(each).stack for each in excess]
        async with self._changing:  # an image that is taken again has the same folder
            for stack in stacks:
                await in_daemon(stack.close)

    async def close(self) -> None:
        """Remove all unpacked images."""
        while self._images:
            _, entry = self._images.popitem()
            await asyncio.gather(entry.folder, return_exceptions=True)
            await in_daemon(entry.stack.close)


def remove_images_of_ended_processes() -> None:
    """Remove the images that a killed process of this node left, if they are this user's."""
    folder = Path(tempfile.gettempdir())
    for path in folder.glob(f"{PREFIX}{OF_PROCESS}*"):
        pid = path.name.removeprefix(f"{PREFIX}{OF_PROCESS}").partition("-")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            remove_leftovers(path.name.removeprefix(PREFIX))


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
