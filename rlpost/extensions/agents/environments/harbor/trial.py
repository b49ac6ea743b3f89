"""One trial of a task: a sandbox for the agent, its files, and a verifier out of its reach.

``begin`` starts a sandbox with the task's image. ``verify`` ends the agent's processes, saves its
folders, closes its sandbox, and runs tests/test.sh in a fresh one with the same root, in which the
agent's folders replace those of the root. The tests reach that sandbox after the agent's files, its
home folder is an empty one, and the reward is read when all processes have been ended. A task whose
verifier has its own root gives it only the files that it declares.

A program of the agent that the tests start runs as their user, and may write the reward: the format
has no place that would be out of its reach.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from common.repeats import Repeats
from rlpost.config.masking import MASK
from rlpost.extensions.agents.environments.harbor.roots import (
    ImageDefaults,
    TaskRoot,
    TaskSkipped,
    choose_root,
    files_below,
    open_root,
    upload,
)
from rlpost.extensions.agents.environments.harbor.tasks import (
    HarborTask,
    RewardUnreadable,
    read_task,
    reward_of,
)
from rlpost.extensions.agents.sandbox.archives import Archives
from rlpost.extensions.agents.sandbox.protocol import (
    ArchiveRefused,
    ArchiveStoreFull,
    Limits,
    Pool,
    Result,
    Sandbox,
    SandboxFileError,
    Verdict,
    retry,
)

logger = logging.getLogger(__name__)
_REPEATS = Repeats()

LOGS, TESTS, SOLUTION = "/logs/verifier", "/tests", "/solution"
VERIFIER_HOME = "/logs/home"
ARTIFACT_BYTES = 64 << 20  # of a single file that is handed to a verifier
SHORT = 8  # characters of a value that is no key
LIFETIME_SECONDS = 7 * 86400.0  # of a sandbox: --env-timeout-s ends episodes earlier
EXCLUDED = frozenset(
    (
        *("bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "opt", "proc", "run"),
        *("sbin", "srv", "sys", "usr", "var"),
        *("logs", "tests", "solution", "lost+found", "media", "mnt"),
    )
)
"""Folders of a root that the verifier does not take from the agent."""
_FOLDER = re.compile(r"[A-Za-z0-9_][\w.+@ -]*")


@dataclass(frozen=True)
class TrialOptions:
    """What a user chooses for all tasks.

    Attributes:
        images: where images are (``roots``).
        env: values for variables that task.toml takes from the host.
        folders: that the verifier takes from the agent; empty: all but ``EXCLUDED``.
        reward_key: of a reward.json with several values.
        verifier_network: let the verifier use the node's network.
        max_memory_mib: of one task; those that ask for more are skipped.
        command_seconds: of one command of the agent.
    """

    images: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    folders: Sequence[str] = ()
    reward_key: str = "reward"
    verifier_network: bool = False
    max_memory_mib: int = 16384
    command_seconds: float = 60.0


@dataclass(frozen=True)
class RunnableTask:
    """A task and how its sandbox begins."""

    task: HarborTask
    root: TaskRoot
    verifier_root: TaskRoot
    options: TrialOptions

    def limits(self, base: Limits, *, verifies: bool = False) -> Limits:
        """Return the limits of its sandboxes: those of the pool, with the task's own.

        A task that forbids the network has none, also where the pool's sandboxes have one.
        """
        task = self.task
        seconds = max(task.agent_seconds, task.verifier_seconds)
        cores = (task.verifier_cores if verifies else task.cores) or base.cores
        memory_mib = task.verifier_memory_mib if verifies else task.memory_mib
        network = base.network and (task.verifier_network if verifies else task.network)
        return replace(
            base,
            wall_seconds=seconds,
            cpu_seconds=seconds * cores,
            lifetime_seconds=LIFETIME_SECONDS,
            cores=cores,
            memory_mib=memory_mib or base.memory_mib,
            network=network or (verifies and self.options.verifier_network),
        )


def runnable(
    folder: Path,
    name: str,
    options: TrialOptions,
    exists: Callable[[str], bool] = lambda path: Path(path).exists(),
) -> RunnableTask:
    """Return a task that may run.

    Raises:
        TaskUnreadable: it is damaged.
        TaskSkipped: it cannot run here, with the reason.
    """
    task = read_task(folder, name, options.env)
    memory_mib = max(task.memory_mib or 0, task.verifier_memory_mib or 0)
    if memory_mib > options.max_memory_mib:
        more = f"{memory_mib} MiB of memory (max_memory_mib: {options.max_memory_mib})"
        task = replace(task, lacking=(*task.lacking, more))
    reasons, roots = [f"it needs {what}" for what in task.lacking], list[TaskRoot]()
    for definition in (task.root, task.verifier_root or task.root):
        try:
            roots.append(choose_root(definition, options.images, exists))
        except TaskSkipped as why:
            reasons.append(str(why))
    if reasons:
        raise TaskSkipped("; ".join(dict.fromkeys(reasons)))
    root, verifier_root = roots
    return RunnableTask(task, root, verifier_root, options)


@dataclass(frozen=True)
class HandedOver:
    """What a verifier gets of an agent: saved folders, and contents of single files by path."""

    manifest: bytes
    files: Mapping[str, bytes] = field(default_factory=dict)


class Trial:
    """A sandbox in which an agent works on a task."""

    def __init__(self, runnable: RunnableTask, pool: Pool, archives: Archives) -> None:
        self.runnable, self.pool, self.archives = runnable, pool, archives
        self.used_seconds = 0.0
        """Time of the commands so far."""
        self._sandbox: Sandbox | None = None
        self._defaults = ImageDefaults()
        self._shell = ("/bin/sh", "-c")

    @property
    def sandbox(self) -> Sandbox:
        assert self._sandbox is not None, "begin or restore comes first"
        return self._sandbox

    @property
    def remaining_seconds(self) -> float:
        """Time that the agent's commands may still take."""
        return self.runnable.task.agent_seconds - self.used_seconds

    async def begin(self) -> None:
        """Start the sandbox with the task's image. Raises UploadFailed, SandboxLost."""
        limits = self.runnable.limits(self.pool.limits)
        self._sandbox = await self.pool.acquire(limits, self.runnable.root.image)
        self._defaults = await open_root(self._sandbox, self.runnable.root)
        if (await self.sandbox.run(["test", "-x", "/bin/bash"], cwd="/")).ok:
            self._shell = ("/bin/bash", "-c")

    async def run(self, command: str, *, seconds: float | None = None) -> Result:
        """Run a command of the agent; its standard error is in its output.

        ``seconds``: at most what remains of the agent's time.
        """
        wanted = self.runnable.options.command_seconds if seconds is None else seconds
        result = await self.sandbox.run(
            [*self._shell, f"exec 2>&1\n{command}"],
            cwd=self._defaults.workdir,
            env=self._defaults.command_env,
            timeout=max(0.1, min(wanted, self.remaining_seconds)),
        )
        self.used_seconds += result.seconds
        return result

    async def run_solution(self) -> Result:
        """Run the task's solution as the agent would run it; it is not there before."""
        task = self.runnable.task
        files = files_below(task.folder / "solution")
        await upload(self.sandbox, files, SOLUTION, where="solution")
        variables = "".join(
            f"export {name}={shlex.quote(value)}\n" for name, value in task.solution_env.items()
        )
        command = f"{variables}chmod +x {SOLUTION}/solve.sh && exec {SOLUTION}/solve.sh"
        return await self.run(command, seconds=task.agent_seconds)

    async def save(self) -> bytes:
        """Save the agent's folders; see ``Archives.save``."""
        return await self.archives.save(self.sandbox, await self.folders())

    async def restore(self, manifest: bytes, used_seconds: float) -> None:
        """Begin, with the folders that were saved."""
        await self.begin()
        await self.archives.restore(self.sandbox, manifest)
        self.used_seconds = used_seconds

    async def folders(self) -> list[str]:
        """Return the folders that are the agent's."""
        options = self.runnable.options
        if options.folders:
            return list(options.folders)
        names = await self.sandbox.run(["/bin/sh", "-c", "ls -1d */"], cwd="/")
        mounts = await self.sandbox.read("/proc/self/mountinfo")
        return agent_folders(names.text, mounts.decode(), self._defaults.workdir)

    async def verify(self) -> Verdict:
        """Score the agent's files; its sandbox is closed.

        Raises UploadFailed, SandboxLost, ArchiveStoreFull.
        """
        try:
            await self.sandbox.end_processes()
            handed = await self._hand_over()
        except ArchiveStoreFull:  # also filled by other episodes: no reward of this one
            raise
        except (ArchiveRefused, SandboxFileError) as error:
            return self._unscored(f"the agent's files cannot be handed to it: {error}")
        finally:
            await self.close()
        limits = self.runnable.limits(self.pool.limits, verifies=True)

        async def work(sandbox: Sandbox) -> Verdict:
            return await self._score(sandbox, handed)

        image = self.runnable.verifier_root.image
        return await retry(self.pool, work, limits=limits, image=image)

    async def _hand_over(self) -> HandedOver:
        """Return what the verifier gets of the agent."""
        task = self.runnable.task
        if task.verifier_root is None:
            return HandedOver(await self.save())
        folders, files = list[str](), dict[str, bytes]()
        for path in task.artifacts:
            if (await self.sandbox.run(["test", "-d", path], cwd="/")).ok:
                folders.append(path)
            else:
                with contextlib.suppress(SandboxFileError):  # it is missing
                    files[path] = await self.sandbox.read(path, limit=ARTIFACT_BYTES)
        return HandedOver(await self.archives.save(self.sandbox, folders), files)

    async def _score(self, sandbox: Sandbox, handed: HandedOver) -> Verdict:
        task, root = self.runnable.task, self.runnable.verifier_root
        defaults = await open_root(sandbox, root)
        await self.archives.restore(sandbox, handed.manifest)
        for path, data in handed.files.items():
            await sandbox.write(path, data)
        if not root.brings_tests:
            tests = files_below(task.folder / "tests")
            await upload(sandbox, tests, TESTS, where="tests")
        await sandbox.run(["mkdir", "-p", LOGS, VERIFIER_HOME], cwd="/")
        result = await sandbox.run(
            f"chmod +x {TESTS}/test.sh && exec {TESTS}/test.sh 2>&1",
            cwd=defaults.workdir,
            env={**defaults.command_env, "HOME": VERIFIER_HOME, **task.verifier_env},
            timeout=task.verifier_seconds,
        )
        await sandbox.end_processes()
        text = self._without_keys(result.text)[-2000:]
        how = f"tests/test.sh {result.ended.value} {result.exit_code}: {text}"
        return await self._verdict(sandbox, how)

    async def _verdict(self, sandbox: Sandbox, how: str) -> Verdict:
        """Read the verifier's file, as Harbor does: reward.json before reward.txt."""
        for name in ("reward.json", "reward.txt"):
            try:
                data = await sandbox.read(f"{LOGS}/{name}", limit=1 << 16)
            except SandboxFileError:
                continue
            try:
                text, key = data.decode("utf-8", "replace"), self.runnable.options.reward_key
                return Verdict(reward_of(text, is_json=name == "reward.json", key=key), how)
            except RewardUnreadable as error:
                return self._unscored(f"{self._without_keys(str(error))}; {how}")
        return self._unscored(f"no file with a reward; {how}")

    def _without_keys(self, text: str) -> str:
        """Return a text of the tests without the values of ``env``, which may be keys."""
        values = [str(value) for value in self.runnable.options.env.values()]
        for value in sorted(values, key=len, reverse=True):
            if len(value) > SHORT:
                text = text.replace(value, MASK)
        return text

    def _unscored(self, reason: str) -> Verdict:
        """Return the reward of an episode that the verifier gave none: 0, reported with its reason.

        The agent may be the cause of each, so the episode is not left out.
        """
        name = self.runnable.task.name
        count = _REPEATS.count(f"{name}: {reason}")
        if count is not None:
            often = "" if count == 1 else f" ({count} times for this reason)"
            logger.warning(
                "task %s: its verifier gave no reward, which is 0%s: %s", name, often, reason
            )
        return Verdict(0.0, reason)

    async def close(self) -> None:
        """End the sandbox."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await asyncio.shield(sandbox.close())


def agent_folders(names: str, mounts: str, workdir: str) -> list[str]:
    """Return the folders of a root that the verifier takes from the agent.

    Left out are those of the system and those with mounts, but for ``workdir``.

    Args:
        names: of the folders in ``/``, one a line.
        mounts: the text of /proc/self/mountinfo.
        workdir: the folder in which commands start.

    >>> agent_folders("app/\\nusr/\\ntmp/\\n", "", "/var/www")
    ['/app', '/tmp', '/var/www']
    """
    points = [line.split()[4] for line in mounts.splitlines()]
    excluded = EXCLUDED | {point.split("/")[1] for point in points}
    root_folders = {line.strip().rstrip("/") for line in names.splitlines()}
    chosen = {f"/{name}" for name in root_folders - excluded if _FOLDER.fullmatch(name)}
    if workdir.count("/") > 1 and workdir.split("/")[1] in excluded:
        chosen.add(workdir)
    return sorted(chosen)
