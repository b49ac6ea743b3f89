"""The root of a task: chosen among what the nodes can read, and built in a sandbox.

``choose_root`` is pure, apart from ``exists``: the image of ``docker_image`` if there is one, which
holds everything; else the base of the Dockerfile, on which ``build`` performs its steps. ``images``
says where images are: patterns of their names, in order, and the path of each, with ``{name}`` for a
name without ``/`` and ``:``. The path ``node`` stands for /usr of the node.
"""

from __future__ import annotations

import fnmatch
import glob
import logging
import os
import posixpath
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from common.files import OutsideFolder, below
from rlpost.agents.environments.harbor.dockerfile import (
    HOME,
    PATH,
    Copy,
    MakeFolder,
    NotSupported,
    Recipe,
    Run,
    Step,
    Write,
    parse_dockerfile,
)
from rlpost.agents.environments.harbor.installers import FOLDER, PROGRAMS, VARIABLES
from rlpost.agents.environments.harbor.tasks import RootDefinition
from rlpost.agents.sandbox.archives import CONTENT_BYTES, END, ArchiveEntry, packed
from rlpost.agents.sandbox.protocol import Ended, Result, Sandbox, SandboxFileError
from rlpost.agents.sandbox.snapshots import Snapshot, SnapshotEntry, SnapshotRefused
from rlpost.errors import GradingLost, RlpostError

logger = logging.getLogger(__name__)

NODE = "node"
_EMPTY = "scratch"
_ENTERED = re.compile(r"^\s*cd ([\"']?)(/[^\"'\n&|;]*?)\1(?:\s|$)", re.MULTILINE)
SHOWN = 600  # characters of a failed command's output


class BuildFailed(GradingLost):
    """A step of a Dockerfile failed in the sandbox."""


class TaskSkipped(RlpostError):
    """A task cannot run; the text is the reason."""


@dataclass(frozen=True)
class ImageDefaults:
    """What an image says of commands: variables, and the folder in which they start."""

    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str = "/"


@dataclass(frozen=True)
class RootPlan:
    """Steps of a root, and what holds for commands in it afterwards."""

    steps: tuple[Step, ...]
    env: Mapping[str, str]
    workdir: str


@dataclass(frozen=True)
class TaskRoot:
    """How a task's sandbox begins.

    Attributes:
        image: folder or .sqsh file; None for that of the pool.
        folder: of the Dockerfile in the task.
        dockerfile: its text.
        is_complete: the image has what the Dockerfile does.
        env, workdir: of the task, which win over those of the Dockerfile.
    """

    image: str | None
    folder: str = "environment"
    dockerfile: str | None = None
    is_complete: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None

    def plan(self, defaults: ImageDefaults | None = None) -> RootPlan:
        """Return the steps, for an image with these defaults. Raises NotSupported."""
        defaults = defaults or ImageDefaults()
        recipe = Recipe("", (), defaults.env, defaults.workdir)
        if self.dockerfile is not None:
            recipe = parse_dockerfile(self.dockerfile, defaults.env, defaults.workdir)
        workdir = self.workdir or recipe.workdir
        steps: tuple[Step, ...] = () if self.is_complete else recipe.steps
        if workdir != "/":
            steps = (*steps, MakeFolder(workdir, 0))
        return RootPlan(steps, {**recipe.env, **self.env}, workdir)


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


def candidates(image: str, images: Mapping[str, str]) -> list[str]:
    """Return where an image may be, in the order of the patterns that its name matches.

    None for a name that leads out of the folder of images.
    """
    name = file_name(image)
    if name in ("", ".", "..") or "\0" in name:
        return []
    return [
        path.replace("{name}", name)
        for pattern, path in images.items()
        if fnmatch.fnmatchcase(image, pattern)
    ]


def choose_root(
    definition: RootDefinition, images: Mapping[str, str], exists: Callable[[str], bool]
) -> TaskRoot:
    """Return a root. Raises TaskSkipped with the reasons against it."""
    recipe, reasons = None, list[str]()
    if definition.dockerfile is not None:
        try:
            recipe = parse_dockerfile(definition.dockerfile)
        except NotSupported as error:
            reasons.append(f"{definition.folder}/Dockerfile: {error}")
    elif not definition.image:
        reasons.append(f"neither docker_image nor {definition.folder}/Dockerfile names a root")
    for image, is_complete in _possible(definition, recipe):
        paths = candidates(image, images)
        path = next((path for path in paths if path == NODE or exists(path)), None)
        if path is None:
            where = f"not at {', '.join(paths)}" if paths else "no path in the argument images"
            reasons.append(f"image {image}: {where}")
            continue
        # The Dockerfile of a complete image may be one that cannot be followed.
        dockerfile = definition.dockerfile if recipe is not None else None
        return TaskRoot(
            None if path == NODE else path,
            definition.folder,
            dockerfile,
            is_complete,
            definition.environment,
            definition.workdir,
        )
    raise TaskSkipped("; ".join(reasons))


def _possible(definition: RootDefinition, recipe: Recipe | None) -> Iterator[tuple[str, bool]]:
    """Yield the images a root can begin with, and whether they hold everything already."""
    if definition.image:
        yield definition.image, True
    if recipe is not None and recipe.base != _EMPTY:
        yield recipe.base, False


def command_env(env: Mapping[str, str], *, offline: bool) -> dict[str, str]:
    """Return the variables of commands in a root with these."""
    complete = {"HOME": HOME, "PATH": PATH, **(VARIABLES if offline else {}), **env}
    return {**complete, "PATH": f"{FOLDER}:{complete['PATH']}"} if offline else complete


async def read_plan(sandbox: Sandbox, root: TaskRoot) -> RootPlan:
    """Return the steps of a root, for the image of a fresh sandbox. Raises BuildFailed."""
    defaults = ImageDefaults()
    if root.image is not None:
        texts = [await _text(sandbox, path) for path in ("/etc/environment", "/etc/rc")]
        defaults = image_defaults(*texts)
    try:
        return root.plan(defaults)
    except NotSupported as error:
        raise BuildFailed(f"{root.folder}/Dockerfile: {error}") from error


async def build(
    sandbox: Sandbox, root: TaskRoot, task: Path, *, seconds: float, offline: bool
) -> RootPlan:
    """Perform the steps of a root in a fresh sandbox; return what holds for its commands.

    ``task`` is the task's folder. ``offline`` puts ``installers`` before the root's own programs.

    Raises:
        BuildFailed: a step failed, or they took longer than ``seconds``.
        SandboxLost: the sandbox is gone.
    """
    deadline, where = time.monotonic() + seconds, f"{root.folder}/Dockerfile"
    plan = await read_plan(sandbox, root)
    try:
        if offline:
            programs = [SnapshotEntry(name, "file", data, True) for name, data in PROGRAMS.items()]
            await sandbox.restore(Snapshot(tuple(programs)), FOLDER)
        await _checked(sandbox, ["mkdir", "-p", HOME], "mkdir", seconds)
        for step in plan.steps:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise BuildFailed(f"{where}: the build took more than {seconds:g} s")
            line = f"{where}, line {step.line}"
            files = BuildContext(task / root.folder, line)
            await _perform(sandbox, step, files, seconds=remaining, offline=offline)
        return plan
    except (SandboxFileError, SnapshotRefused, OSError) as error:
        raise BuildFailed(f"{where}: {error}") from error


@dataclass(frozen=True)
class BuildContext:
    """The folder from which a Dockerfile copies, and its line for messages."""

    folder: Path
    where: str


async def _text(sandbox: Sandbox, path: str) -> str:
    """Return a text of the root; empty if it has none."""
    try:
        return (await sandbox.read(path)).decode("utf-8", "replace")
    except SandboxFileError:
        return ""


async def _perform(
    sandbox: Sandbox, step: Step, context: BuildContext, *, seconds: float, offline: bool
) -> None:
    where = context.where
    match step:
        case MakeFolder():
            await _checked(sandbox, ["mkdir", "-p", step.path], where, seconds)
        case Write():
            await sandbox.write(step.target, step.content.encode())
        case Copy():
            await _copy(sandbox, step, context, seconds)
        case Run():
            env = command_env(step.env, offline=offline)
            result = await sandbox.run(step.argv, cwd=step.cwd, env=env, timeout=seconds)
            _check(result, f"{where}: RUN")


async def _copy(sandbox: Sandbox, step: Copy, context: BuildContext, seconds: float) -> None:
    where, top = context.where, context.folder
    files = [file for source in step.sources for file in copied_files(top, source, where=where)]
    is_folder = (
        step.is_folder
        or any(file.entry.path.count("/") or file.entry.kind == "folder" for file in files)
        or any((top / source.lstrip("/")).is_dir() for source in step.sources)
        or (await sandbox.run(["test", "-d", step.target], cwd="/")).ok
    )
    folder, name = posixpath.split(step.target)
    if is_folder:
        folder = step.target
    else:
        files = [replace(file, entry=replace(file.entry, path=name)) for file in files]
    if step.mode is not None:
        files = [replace(file, entry=replace(file.entry, mode=step.mode)) for file in files]
    await upload(sandbox, files, folder, seconds=seconds, where=where)


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


async def upload(
    sandbox: Sandbox, files: Sequence[CopiedFile], folder: str, *, seconds: float, where: str
) -> None:
    """Write files below a folder of a sandbox, with their modes and times; links as they are."""
    await _checked(sandbox, ["mkdir", "-p", folder], where, seconds)
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


def copied_files(context: Path, source: str, *, where: str = "COPY") -> list[CopiedFile]:
    """Return what COPY takes for one source: the content of a folder, or a file.

    Args:
        context: the folder that sources are relative to, and below which they must stay.
        source: a name or a pattern.

    Raises BuildFailed for a source that matches nothing or leads outside.
    """
    relative = posixpath.normpath(source.lstrip("/") or ".")
    paths = [context / relative]
    if glob.has_magic(relative):
        paths = [context / each for each in sorted(glob.glob(relative, root_dir=context))]
    files = list[CopiedFile]()
    for path in paths:
        if not os.path.lexists(path):
            raise BuildFailed(f"{where}: the task has no file {context.name}/{source}")
        try:
            below(context, "." if path == context else str(path.parent.relative_to(context)))
        except ValueError as error:
            text = f"{where}: {source} is outside of the task's folder {context.name}"
            raise BuildFailed(text) from error
        if path.is_dir() and not path.is_symlink():
            files += files_below(path)
        else:
            files.append(_file(path, path.name))
    if not files and not (context / relative).is_dir():
        raise BuildFailed(f"{where}: no file of {context.name}/ matches {source}")
    return files


def files_below(folder: Path) -> list[CopiedFile]:
    """Return everything below a folder of this node; links are not followed.

    Raises BuildFailed for a special file, or a folder that is a link out of its parent.
    """
    try:
        below(folder.parent, folder.name)
    except OutsideFolder as error:
        raise BuildFailed(str(error)) from error
    paths = sorted(folder.rglob("*"))
    return [_file(path, path.relative_to(folder).as_posix()) for path in paths]


def _file(path: Path, name: str) -> CopiedFile:
    status = path.lstat()
    kinds = [(stat.S_ISLNK, "link"), (stat.S_ISDIR, "folder"), (stat.S_ISREG, "file")]
    kind = next((kind for test, kind in kinds if test(status.st_mode)), None)
    if kind is None:
        raise BuildFailed(f"{path} is a special file")
    mode = stat.S_IMODE(status.st_mode) | 0o600
    return CopiedFile(ArchiveEntry(name, kind, mode, status.st_mtime_ns), path)


async def _checked(sandbox: Sandbox, argv: Sequence[str], where: str, seconds: float) -> None:
    _check(await sandbox.run(list(argv), cwd="/", timeout=seconds), f"{where}: {argv[0]}")


def _check(result: Result, where: str) -> None:
    if result.ok:
        return
    how = f"exit code {result.exit_code}" if result.ended is Ended.EXITED else result.ended.value
    said = (result.stderr or result.stdout).decode("utf-8", "replace").strip()[-SHOWN:]
    raise BuildFailed(f"{where}: {how}: {said}")
