"""Built roots of a run, by content: each is built once, and later episodes get its files.

    RUN/sandboxes/roots/KEY.json     the manifest of a root; written when all its contents are on disk
    RUN/sandboxes/roots/contents/    contents of files, once each (``content_store``)

A key is the digest of what decides a root: the steps of its Dockerfile, the files it may copy, the
base root, and the programs that stand in for installers. What is kept are the changes of the build:
new and changed files, and the names in each changed folder, so that deletions are repeated. A root
is saved before the agent has run a command, and lies outside of every sandbox, which gets copies.

Not kept: a root that deletes folders of ``/``, exceeds the bounds below, or leaves processes running.
It is built in each episode, as without a cache, and the log says why.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import weakref
from pathlib import Path

from common.files import discard, write_atomic
from rlpost.agents.environments.harbor.dockerfile import MakeFolder
from rlpost.agents.environments.harbor.installers import PROGRAMS
from rlpost.agents.environments.harbor.roots import (
    BuildFailed,
    RootPlan,
    TaskRoot,
    build,
    files_below,
    read_plan,
)
from rlpost.agents.sandbox.archives import Archives
from rlpost.agents.sandbox.protocol import (
    ArchiveRefused,
    Sandbox,
    SandboxFileError,
    SandboxLost,
)
from rlpost.durable.daemon_threads import in_daemon
from rlpost.errors import RlpostError

logger = logging.getLogger(__name__)

FORMAT = 1
FOLDER = "roots"
"""Beside the folder of saved sandboxes."""
MAX_MIB, MAX_FILES = 4096, 200_000  # of one root
SYSTEM = ("/usr/bin", "/usr/lib", "/usr/local/bin", "/usr/local/lib", "/opt")
"""Folders of a base root whose times change when something is installed into it."""
IDENTITY = "stat -c '%n %Y' \"$@\" 2>/dev/null; cat /usr/lib/os-release 2>/dev/null"


class RootCache:
    """The built roots of a run."""

    def __init__(self, folder: Path, *, max_gib: float) -> None:
        """``max_gib``: of all roots; those that exceed it are not kept."""
        self._folder = folder
        self._archives = Archives(
            folder / "contents", max_mib=MAX_MIB, max_files=MAX_FILES, max_store_gib=max_gib
        )
        self._building: dict[str, asyncio.Lock] = {}
        self._digests: dict[Path, str] = {}
        self._refused: set[str] = set()

    async def build(
        self, sandbox: Sandbox, root: TaskRoot, task: Path, *, seconds: float, offline: bool
    ) -> RootPlan:
        """Give a fresh sandbox the root of a task; see ``roots.build``.

        One caller builds a root; others wait for it, at most ``seconds``.

        Raises:
            BuildFailed: as ``roots.build``, or the other build took longer.
            SandboxLost: the sandbox is gone, or has a part of a damaged root.
        """
        plan = await read_plan(sandbox, root)

        async def build_here() -> RootPlan:
            return await build(sandbox, root, task, seconds=seconds, offline=offline)

        if all(isinstance(step, MakeFolder) for step in plan.steps):
            return await build_here()
        key = await self._key(sandbox, root, plan, task, offline=offline)
        if key in self._refused:
            return await build_here()
        if await self._restore(sandbox, key):
            return plan
        lock = self._building.setdefault(key, asyncio.Lock())
        try:
            async with asyncio.timeout(seconds):
                await lock.acquire()
        except TimeoutError:
            raise BuildFailed(
                f"{root.folder}/Dockerfile: another episode builds this root, for {seconds:g} s"
            ) from None
        try:
            if key in self._refused or not await self._restore(sandbox, key):
                began, names = await self._archives.time(sandbox), await _top_names(sandbox)
                plan = await build_here()
                await self._keep(sandbox, key, since=began, names=names)
            return plan
        finally:
            lock.release()

    async def _key(
        self, sandbox: Sandbox, root: TaskRoot, plan: RootPlan, task: Path, *, offline: bool
    ) -> str:
        """Return the name of a root. Raises BuildFailed."""
        context = task / root.folder
        if context not in self._digests:
            self._digests[context] = await in_daemon(lambda: digest_of_files(context))
        parts = [
            FORMAT,
            repr(plan.steps),
            self._digests[context],
            root.image,
            await _base_identity(sandbox),
            sandbox.limits.network,
            {name: text.decode() for name, text in PROGRAMS.items()} if offline else None,
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    async def _restore(self, sandbox: Sandbox, key: str) -> bool:
        """Give a sandbox a root; return False if it is not here."""
        path = self._folder / f"{key}.json"
        try:
            manifest = await in_daemon(path.read_bytes)
            is_complete = await self._archives.is_complete(manifest)
        except FileNotFoundError:
            return False
        if not is_complete:  # contents that no episode used for hours are deleted
            await in_daemon(lambda: discard(path))
            return False
        try:
            await self._archives.restore(sandbox, manifest, clear=False)
        except (RlpostError, SandboxFileError) as error:
            if isinstance(error, SandboxLost):
                raise
            await in_daemon(lambda: discard(path))
            raise SandboxLost(
                f"a built root is damaged and will be built again: {error}"
            ) from error
        return True

    async def _keep(self, sandbox: Sandbox, key: str, *, since: int, names: frozenset[str]) -> None:
        """Save what changed in a sandbox since a time (``Archives.time``)."""
        try:
            if lost := names - await _top_names(sandbox):
                raise ArchiveRefused(f"the build deletes /{', /'.join(sorted(lost))}")
            manifest = await self._archives.save(sandbox, ("/",), since=since)
            await in_daemon(lambda: write_atomic(self._folder / f"{key}.json", manifest.decode()))
        except (ArchiveRefused, OSError) as error:
            self._refused.add(key)
            logger.warning("a root is built in each episode, because it is not kept: %s", error)


_CACHES: weakref.WeakKeyDictionary[Archives, RootCache] = weakref.WeakKeyDictionary()


def cache_beside(archives: Archives, *, max_gib: float) -> RootCache:
    """Return the cache of a run, whose saved sandboxes are in ``archives``."""
    if archives not in _CACHES:
        folder = archives.store.folder.with_name(FOLDER)
        _CACHES[archives] = RootCache(folder, max_gib=max_gib)
    return _CACHES[archives]


def digest_of_files(folder: Path) -> str:
    """Return the digest of names, modes and contents below a folder. Raises BuildFailed."""
    digest = hashlib.sha256()
    for file in files_below(folder) if folder.is_dir() else ():
        entry = file.entry
        content = b""
        if entry.kind == "link":
            content = os.fsencode(os.readlink(file.source))
        elif entry.kind == "file":
            content = hashlib.sha256(file.source.read_bytes()).digest()
        digest.update(f"{entry.path}\0{entry.kind}\0{entry.mode}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


async def _top_names(sandbox: Sandbox) -> frozenset[str]:
    """Return the names in the sandbox's ``/``."""
    return frozenset((await sandbox.run(["ls", "-A", "/"], cwd="/")).text.split("\n"))


async def _base_identity(sandbox: Sandbox) -> str:
    """Return the times of a base root's folders and mounts, and the text of its os-release."""
    mounts = (await sandbox.read("/proc/self/mountinfo")).decode().splitlines()
    points = sorted({line.split()[4] for line in mounts})
    kept = [each for each in points if each.split("/")[1] not in ("", "dev", "proc", "sys")]
    folders = list(dict.fromkeys((*SYSTEM, *kept)))
    return (await sandbox.run(["/bin/sh", "-c", IDENTITY, "sh", *folders], cwd="/")).text
