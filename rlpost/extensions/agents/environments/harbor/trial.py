"""One trial of a task: a sandbox for the agent, its files, and a verifier out of its reach.

``begin`` starts a sandbox with the task's image. ``verify`` ends the agent's processes, saves its
folders, closes its sandbox, and runs tests/test.sh in a fresh one with the same root, in which the
agent's folders replace those of the root (``verification``). A task whose verifier has its own root
gives it only the files that it declares.

``finish_step`` does the same after a step of several, and begins the next one in a fresh sandbox
with the agent's folders: no trial holds two sandboxes, and no process of a step lives on.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any

from common.files import below
from rlpost.extensions.agents.environments.harbor.rewards import (
    RewardUnreadable,
    chosen,
    rewards_of_steps,
    shortfall,
)
from rlpost.extensions.agents.environments.harbor.roots import (
    ImageDefaults,
    UploadFailed,
    files_below,
    open_root,
    upload,
)
from rlpost.extensions.agents.environments.harbor.runnable import RunnableTask
from rlpost.extensions.agents.environments.harbor.steps import HarborStep, HealthCheck
from rlpost.extensions.agents.environments.harbor.verification import (
    HandedOver,
    StepResult,
    StepVerifier,
    declared_files,
    report_unscored,
)
from rlpost.extensions.agents.sandbox.archives import Archives
from rlpost.extensions.agents.sandbox.protocol import (
    ArchiveRefused,
    ArchiveStoreFull,
    Pool,
    Result,
    Sandbox,
    SandboxFileError,
    Verdict,
)

SOLUTION = "/solution"
SETUP_SECONDS = 600.0  # of a step's setup.sh, for which Harbor has no limit
KEPT_CHARS = 500  # of the reason of a step among several
EXCLUDED = frozenset(
    (
        *("bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "opt", "proc", "run"),
        *("sbin", "srv", "sys", "usr", "var"),
        *("logs", "tests", "solution", "lost+found", "media", "mnt"),
    )
)
"""Folders of a root that the verifier does not take from the agent."""
_FOLDER = re.compile(r"[A-Za-z0-9_][\w.+@ -]*")


class StepNotReady(UploadFailed):
    """A step cannot begin: its setup.sh or its health check fails."""


class Trial:
    """A sandbox in which an agent works on a task."""

    def __init__(self, runnable: RunnableTask, pool: Pool, archives: Archives) -> None:
        self.runnable, self.pool, self.archives = runnable, pool, archives
        self.used_seconds = 0.0
        """Time of the commands of the step so far."""
        self.results: list[StepResult] = []
        """Of the steps that were scored, or could not begin."""
        self.is_over = False
        """No command may follow."""
        self._number = 0
        self._sandbox: Sandbox | None = None
        self._defaults = ImageDefaults()
        self._shell = ("/bin/sh", "-c")

    @property
    def sandbox(self) -> Sandbox:
        assert self._sandbox is not None, "begin or restore comes first"
        return self._sandbox

    @property
    def step(self) -> HarborStep:
        """The step that the agent works on."""
        return self.runnable.task.steps[self._number]

    @property
    def has_next(self) -> bool:
        """Whether another step may follow."""
        return self._number + 1 < len(self.runnable.task.steps)

    @property
    def remaining_seconds(self) -> float:
        """Time that the agent's commands may still take in this step."""
        return self.step.agent_seconds - self.used_seconds

    async def begin(self) -> None:
        """Start the sandbox with the task's image, and the first step.

        Raises UploadFailed, SandboxLost.
        """
        await self._open()
        await self._prepare()

    async def _open(self) -> None:
        """Start a sandbox with the task's image."""
        limits = self.runnable.limits(self.pool.limits, self.step)
        self._sandbox = await self.pool.acquire(limits, self.runnable.root.image)
        self._defaults = await open_root(self._sandbox, self.runnable.root)
        if (await self.sandbox.run(["test", "-x", "/bin/bash"], cwd="/")).ok:
            self._shell = ("/bin/bash", "-c")

    async def _prepare(self) -> None:
        """Put the files of the step into the agent's folder, run its setup.sh and health check.

        Raises UploadFailed, StepNotReady, SandboxFileError.
        """
        step = self.step
        if step.workdir is not None:
            files = files_below(below(self.runnable.task.folder, step.workdir))
            await upload(self.sandbox, files, self._defaults.workdir, where=step.workdir)
        if step.has_setup:
            script = f"{self._defaults.workdir.rstrip('/')}/setup.sh"
            done = await self._run(["bash", script], SETUP_SECONDS)
            if not done.ok:
                raise StepNotReady(f"setup.sh: {_how(done)}")
        if step.health_check is not None:
            await self._wait_until_healthy(step.health_check)

    async def _wait_until_healthy(self, check: HealthCheck) -> None:
        """Repeat a command until it succeeds. Raises StepNotReady."""
        began, failures = time.monotonic(), 0
        while not (done := await self._run([*self._shell, check.command], check.timeout)).ok:
            is_starting = time.monotonic() - began < check.start_period
            failures += not is_starting
            if failures >= check.retries:
                raise StepNotReady(f"the health check {check.command!r:.200}: {_how(done)}")
            await asyncio.sleep(check.start_interval if is_starting else check.interval)

    async def _run(self, argv: Sequence[str], seconds: float) -> Result:
        return await self.sandbox.run(
            argv, cwd=self._defaults.workdir, env=self._defaults.command_env, timeout=seconds
        )

    async def run(self, command: str, *, seconds: float | None = None) -> Result:
        """Run a command of the agent; its standard error is in its output.

        ``seconds``: at most what remains of the agent's time.
        """
        wanted = self.runnable.options.command_seconds if seconds is None else seconds
        limit = max(0.1, min(wanted, self.remaining_seconds))
        result = await self._run([*self._shell, f"exec 2>&1\n{command}"], limit)
        self.used_seconds += result.seconds
        return result

    async def run_solution(self) -> Result:
        """Run the step's solution as the agent would run it; it is not there before."""
        task = self.runnable.task
        files = files_below(below(task.folder, self.step.solution))
        await upload(self.sandbox, files, SOLUTION, where="solution")
        variables = "".join(
            f"export {name}={shlex.quote(value)}\n" for name, value in task.solution_env.items()
        )
        command = f"{variables}chmod +x {SOLUTION}/solve.sh && exec {SOLUTION}/solve.sh"
        return await self.run(command, seconds=self.step.agent_seconds)

    async def save(self) -> bytes:
        """Save the agent's folders; see ``Archives.save``."""
        return await self.archives.save(self.sandbox, await self.folders())

    def progress(self) -> dict[str, Any]:
        """Return what ``restore`` needs beside the files, as JSON values."""
        results = [[each.rewards, each.reason[-KEPT_CHARS:]] for each in self.results]
        return {"seconds": self.used_seconds, **({"steps": results} if results else {})}

    async def restore(self, manifest: bytes, progress: Mapping[str, Any]) -> None:
        """Start a sandbox with the folders that were saved, in the step of that time."""
        self.results = [StepResult(*each) for each in progress.get("steps", [])]
        self._number, self.used_seconds = len(self.results), progress["seconds"]
        await self._open()
        await self.archives.restore(self.sandbox, manifest)

    async def folders(self) -> list[str]:
        """Return the folders that are the agent's."""
        options = self.runnable.options
        if options.folders:
            return list(options.folders)
        names = await self.sandbox.run(["/bin/sh", "-c", "ls -1d */"], cwd="/")
        mounts = await self.sandbox.read("/proc/self/mountinfo")
        return agent_folders(names.text, mounts.decode(), self._defaults.workdir)

    async def finish_step(self) -> bool:
        """Score the step; begin the next one if there is one and the reward lets it.

        Returns whether a step has begun. The agent's sandbox is another one then.

        Raises UploadFailed, SandboxLost, ArchiveStoreFull.
        """
        kept = await self._score(keeps_files=self.has_next)
        result = self.results[-1]
        is_enough = result.rewards is not None and not shortfall(result.rewards, self.step.least)
        if kept is None or not is_enough:
            self.is_over = True
            return False
        self._number, self.used_seconds = self._number + 1, 0.0
        await self._open()
        await self.archives.restore(self.sandbox, kept)
        try:
            await self._prepare()
        except (UploadFailed, SandboxFileError) as error:  # the agent's files may be the cause
            self.results.append(self._verifier.unscored(f"it could not begin: {error}"))
            self.is_over = True
            await self.close()
            return False
        return True

    @property
    def _verifier(self) -> StepVerifier:
        return StepVerifier(self.runnable, self._number, self.pool, self.archives)

    async def _score(self, *, keeps_files: bool) -> bytes | None:
        """Score the step, with the agent's sandbox closed; return its folders if they are kept."""
        kept = None
        try:
            await self.sandbox.end_processes()
            if keeps_files or self.step.verifier_root is None:
                kept = await self.save()
            handed = await self._hand_over(kept)
        except ArchiveStoreFull:  # also filled by other episodes: no reward of this one
            raise
        except (ArchiveRefused, SandboxFileError) as error:
            why = f"the agent's files cannot be handed to it: {error}"
            self.results.append(self._verifier.unscored(why))
            return None
        finally:
            await self.close()
        self.results.append(await self._verifier.score(handed))
        return kept if keeps_files else None

    async def _hand_over(self, kept: bytes | None) -> HandedOver:
        """Return what the verifier gets of the agent: ``kept``, or files that the task declares."""
        if self.step.verifier_root is None:
            assert kept is not None
            return HandedOver(kept)
        return await declared_files(self.sandbox, self.step.artifacts, self.archives)

    async def verify(self) -> Verdict:
        """Score the task by its steps; the agent's sandbox is closed.

        A step that the agent has not ended is scored as it is.

        Raises UploadFailed, SandboxLost, ArchiveStoreFull.
        """
        if not self.is_over:
            await self._score(keeps_files=False)
            self.is_over = True
        task, options = self.runnable.task, self.runnable.options
        verified = [each.rewards for each in self.results]
        least = [step.least for step in task.steps]
        rewards = rewards_of_steps(verified, least, task.strategy, options.reward_key)
        reason = self.results[-1].reason
        if len(task.steps) > 1:
            reason = "\n".join(
                f"step {step.name}: {dict(result.rewards or {})}: {result.reason[-KEPT_CHARS:]}"
                for step, result in zip(task.steps, self.results, strict=False)
            )
        if not rewards:
            return Verdict(0.0, reason)
        try:
            return Verdict(chosen(rewards, options.reward_key), reason)
        except RewardUnreadable as error:
            report_unscored(task.name, str(error))
            return Verdict(0.0, f"{error}; {reason}")

    async def close(self) -> None:
        """End the sandbox."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await asyncio.shield(sandbox.close())


def _how(result: Result) -> str:
    """Return how a command ended, with the end of its output."""
    said = (result.stderr or result.stdout).decode("utf-8", "replace").strip()[-500:]
    return f"{result.ended.value} {result.exit_code}: {said}"


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
