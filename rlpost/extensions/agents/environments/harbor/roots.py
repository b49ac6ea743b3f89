"""The root of a task: an image that the nodes can read, with everything that the task needs.

``choose_root`` is pure, apart from ``exists``. An image has the name that ``docker_image`` gives, or,
for a task with a Dockerfile alone, that of the task, with ``-tests`` for the verifier's and a digest
of the folder from which it is built. ``images`` says where images are: patterns of their names, in
order, and the path of each, with ``{name}`` for a name without ``/`` and ``:``. The path ``node``
stands for /usr of the node.
"""

from __future__ import annotations

import fnmatch
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.files import OutsideFolder, below
from rlpost.errors import GradingLost, RlpostError
from rlpost.extensions.agents.environments.harbor.root_definition import RootDefinition
from rlpost.extensions.agents.sandbox.archives import CONTENT_BYTES, END, ArchiveEntry, packed
from rlpost.extensions.agents.sandbox.protocol import Ended, Result, Sandbox, SandboxFileError

NODE = "node"
HOME = "/root"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ENTERED = re.compile(r"^\s*cd ([\"']?)(/[^\"'\n&|;]*?)\1(?:\s|$)", re.MULTILINE)
SHOWN = 600  # characters of a failed command's output
FILE_BYTES = 256 << 20
"""Of a task's file, which is read into memory."""
BUILD = "; build one where Docker and enroot are: "


class UploadFailed(GradingLost):
    """Files of a task cannot be put into its sandbox."""


class TaskSkipped(RlpostError):
    """A task cannot run; the text is the reason."""


@dataclass(frozen=True)
class ImageDefaults:
    """What an image says of commands: variables, and the folder in which they start."""

    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str = "/"

    @property
    def command_env(self) -> dict[str, str]:
        """The variables of commands in a root with these."""
        return {"HOME": HOME, "PATH": PATH, **self.env}


@dataclass(frozen=True)
class TaskRoot:
    """How a task's sandbox begins.

    Attributes:
        image: folder or .sqsh file; None for that of the pool.
        brings_tests: a verifier's image, which has its tests.
        env, workdir: of the task, which win over those of the image.
    """

    image: str | None
    brings_tests: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None


def image_defaults(environment: str, script: str) -> ImageDefaults:
    """Return what enroot writes of an image's configuration.

    ``environment``: the text of /etc/environment; ``script``: that of /etc/rc, which enters the
    image's folder.

    >>> image_defaults('A="1"\\nPATH=/x:/bin\\n', 'mkdir -p "/app"\\ncd "/app" || exit 1').workdir
    '/app'
    """
    env = {}
    for line in environment.splitlines():
        name, equals, value = line.removeprefix("export ").partition("=")
        if equals and name.isidentifier():
            env[name] = value.strip().strip("\"'")
    entered = _ENTERED.search(script)
    return ImageDefaults(env, entered[2] if entered else "/")


def file_name(image: str) -> str:
    """Return the name of an image as that of a file.

    >>> file_name("ghcr.io/org/name:1.0")
    'ghcr.io+org+name+1.0'
    """
    return re.sub(r"[/:@]", "+", image)


def candidates(image: str, images: Mapping[str, str], *, short: str | None = None) -> list[str]:
    """Return where an image may be, in the order of the patterns that its name matches.

    None for a name that leads out of the folder of images. ``short``: another name of an image that
    is built for one task. Its root has the steps of a Dockerfile, so a path that other tasks share
    counts only if its pattern is one of the two names: a path of the user's choice for this task.
    """
    name = file_name(image)
    if name in ("", ".", "..") or "\0" in name:
        return []
    names = (image, image if short is None else short)
    return [
        path.replace("{name}", name)
        for pattern, path in images.items()
        if pattern in names
        or (
            any(fnmatch.fnmatchcase(each, pattern) for each in names)
            and (short is None or "{name}" in path)
        )
    ]


def choose_root(
    definition: RootDefinition, images: Mapping[str, str], exists: Callable[[str], bool]
) -> TaskRoot:
    """Return a root. Raises TaskSkipped with the reason against it, and the remedy."""
    paths = candidates(definition.image, images, short=definition.short)
    path = next((path for path in paths if path == NODE or exists(path)), None)
    if path is not None:
        image = None if path == NODE else path
        tests = definition.brings_tests
        return TaskRoot(image, tests, definition.environment, definition.workdir)
    where = f"not at {', '.join(paths)}" if paths else "no path in the argument images"
    if definition.short is None:
        raise TaskSkipped(f"image {definition.image}: {where}")
    if not paths and candidates(definition.image, images):
        where += f" that has {{name}} or is that of {definition.short} alone"
    tag = re.sub(r"[^a-z0-9]+", "-", definition.image.lower()).strip("-")
    target = next((path for path in paths if path.endswith(".sqsh")), None)
    target = target or f"IMAGES/{file_name(definition.image)}.sqsh"
    raise TaskSkipped(
        f"{definition.dockerfile} describes a root that is not built{BUILD}in the task's folder "
        f"`docker build -t {tag} -f {definition.dockerfile} {definition.folder}` and "
        f"`enroot import -o {target} dockerd://{tag}`; image {definition.image}: {where}"
    )


async def open_root(sandbox: Sandbox, root: TaskRoot) -> ImageDefaults:
    """Return what holds for commands in a fresh sandbox of a root, and make their folders.

    Raises:
        UploadFailed: a folder cannot be made.
        SandboxLost: the sandbox is gone.
    """
    defaults = ImageDefaults()
    if root.image is not None:
        texts = [await _text(sandbox, path) for path in ("/etc/environment", "/etc/rc")]
        defaults = image_defaults(*texts)
    workdir = root.workdir or defaults.workdir
    await _checked(sandbox, ["mkdir", "-p", HOME, workdir], "the task's root", 60)
    return ImageDefaults({**defaults.env, **root.env}, workdir)


async def _text(sandbox: Sandbox, path: str) -> str:
    """Return a text of the root; empty if it has none."""
    try:
        return (await sandbox.read(path)).decode("utf-8", "replace")
    except SandboxFileError:
        return ""


@dataclass(frozen=True)
class CopiedFile:
    """A file, folder or link of this node, for a sandbox. ``source`` is that of a file."""

    entry: ArchiveEntry
    source: Path

    def packed(self) -> bytes:
        """Return it as an entry of the stream that a sandbox unpacks."""
        if self.entry.kind == "link":
            return packed(self.entry, "link", os.fsencode(os.readlink(self.source)))
        content = self.source.read_bytes() if self.entry.kind == "file" else b""
        return packed(self.entry, self.entry.kind, content)


async def upload(sandbox: Sandbox, files: Sequence[CopiedFile], folder: str, *, where: str) -> None:
    """Write files below a folder of a sandbox, with their modes and times; links as they are."""
    await _checked(sandbox, ["mkdir", "-p", folder], where, 60)
    # Links on the way, such as /bin, which ``unpack`` does not follow.
    real = (await sandbox.run(["readlink", "-f", folder], cwd="/")).text.strip()
    batch, size = list[bytes](), 0
    for file in files:
        batch.append(file.packed())
        size += len(batch[-1])
        if size > CONTENT_BYTES:
            await sandbox.unpack(real or folder, b"".join([*batch, END]), clear=False)
            batch, size = [], 0
    await sandbox.unpack(real or folder, b"".join([*batch, END]), clear=False)


def files_below(folder: Path) -> list[CopiedFile]:
    """Return everything below a folder of this node; links are not followed.

    Raises UploadFailed for a special file, one of more than FILE_BYTES, a folder that is a link out
    of its parent, or folders that are nested too deep to be listed.
    """
    try:
        below(folder.parent, folder.name)
        paths = sorted(folder.rglob("*"))
    except (OutsideFolder, OSError, RecursionError) as error:
        raise UploadFailed(f"{folder}: {error}") from error
    return [_file(path, path.relative_to(folder).as_posix()) for path in paths]


def _file(path: Path, name: str) -> CopiedFile:
    status = path.lstat()
    kinds = [(stat.S_ISLNK, "link"), (stat.S_ISDIR, "folder"), (stat.S_ISREG, "file")]
    kind = next((kind for test, kind in kinds if test(status.st_mode)), None)
    if kind is None:
        raise UploadFailed(f"{path} is a special file")
    if kind == "file" and status.st_size > FILE_BYTES:  # a sparse file needs no disk
        raise UploadFailed(
            f"{path} has {status.st_size} bytes; at most {FILE_BYTES >> 20} MiB fit: build large "
            "files into the task's image"
        )
    mode = stat.S_IMODE(status.st_mode) | 0o600
    return CopiedFile(ArchiveEntry(name, kind, mode, status.st_mtime_ns), path)


async def _checked(sandbox: Sandbox, argv: Sequence[str], where: str, seconds: float) -> None:
    _check(await sandbox.run(list(argv), cwd="/", timeout=seconds), f"{where}: {argv[0]}")


def _check(result: Result, where: str) -> None:
    if result.ok:
        return
    how = f"exit code {result.exit_code}" if result.ended is Ended.EXITED else result.ended.value
    said = (result.stderr or result.stdout).decode("utf-8", "replace").strip()[-SHOWN:]
    raise UploadFailed(f"{where}: {how}: {said}")
