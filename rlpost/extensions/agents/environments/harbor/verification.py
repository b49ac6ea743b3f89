"""Score a step: the agent's files and the step's tests in a fresh sandbox, out of the agent's reach.

The tests reach that sandbox after the agent's files, its home folder is an empty one, and the reward
is read when all processes have been ended. A program of the agent that the tests start runs as their
user, and may write the reward: the format has no place that would be out of its reach.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from common.files import below
from common.repeats import Repeats
from rlpost.config.masking import MASK
from rlpost.extensions.agents.environments.harbor.rewards import RewardUnreadable, rewards_of
from rlpost.extensions.agents.environments.harbor.roots import files_below, open_root, upload
from rlpost.extensions.agents.environments.harbor.runnable import RunnableTask
from rlpost.extensions.agents.sandbox.archives import Archives
from rlpost.extensions.agents.sandbox.protocol import (
    ArchiveRefused,
    Ended,
    Pool,
    Sandbox,
    SandboxFileError,
    retry,
)

logger = logging.getLogger(__name__)
_REPEATS = Repeats()

LOGS, TESTS = "/logs/verifier", "/tests"
VERIFIER_HOME = "/logs/home"
ARTIFACT_BYTES = 64 << 20  # of a single file that is handed to a verifier
SHORT = 8  # characters of a value that is no key
ENDED_BY_LIMIT = (Ended.TIMEOUT, Ended.CPU_TIME, Ended.MEMORY)


@dataclass(frozen=True)
class StepResult:
    """How a step was scored.

    Attributes:
        rewards: by name; None: the verifier gave none, or the step could not begin.
        reason: how the verifier ended, or why there is no reward.
    """

    rewards: Mapping[str, float] | None
    reason: str = ""


@dataclass(frozen=True)
class HandedOver:
    """What a verifier gets of an agent: saved folders, and contents of single files by path."""

    manifest: bytes
    files: Mapping[str, bytes] = field(default_factory=dict)


async def declared_files(
    sandbox: Sandbox, artifacts: Sequence[str], archives: Archives
) -> HandedOver:
    """Return what a separate verifier gets; a missing artifact is left out.

    Folders and single files together fit the bound of an archive.

    Raises:
        ArchiveRefused: they are too large, or a file cannot be read.
        ArchiveStoreFull, SandboxLost: see ``Archives.save``.
    """
    folders, files = list[str](), dict[str, bytes]()
    remaining = archives.max_bytes
    for path in artifacts:
        if (await sandbox.run(["test", "-d", path], cwd="/")).ok:
            folders.append(path)
        elif (await sandbox.run(["test", "-e", path], cwd="/")).ok:
            try:
                files[path] = await sandbox.read(path, limit=min(ARTIFACT_BYTES, remaining))
            except SandboxFileError as error:
                raise ArchiveRefused(
                    f"artifact {error}; one file may have {ARTIFACT_BYTES >> 20} MiB, all artifacts "
                    f"together --sandbox-archive-mib {archives.max_bytes >> 20}"
                ) from error
            remaining -= len(files[path])
    num_bytes = archives.max_bytes - remaining
    return HandedOver(await archives.save(sandbox, folders, beside=num_bytes), files)


class StepVerifier:
    """Scores one step of a task."""

    def __init__(self, runnable: RunnableTask, number: int, pool: Pool, archives: Archives) -> None:
        self._runnable, self._pool, self._archives = runnable, pool, archives
        self._step, self._root = runnable.task.steps[number], runnable.verifier_roots[number]

    async def score(self, handed: HandedOver) -> StepResult:
        """Score what the agent handed over. Raises UploadFailed, SandboxLost."""

        async def work(sandbox: Sandbox) -> StepResult:
            return await self._score(sandbox, handed)

        limits = self._runnable.limits(self._pool.limits, self._step, for_verifier=True)
        return await retry(self._pool, work, limits=limits, image=self._root.image)

    async def _score(self, sandbox: Sandbox, handed: HandedOver) -> StepResult:
        task, step = self._runnable.task, self._step
        defaults = await open_root(sandbox, self._root)
        await self._archives.restore(sandbox, handed.manifest)
        for path, data in handed.files.items():
            await sandbox.write(path, data)
        if not self._root.brings_tests:
            for folder in step.tests:
                tests = files_below(below(task.folder, folder))
                await upload(sandbox, tests, TESTS, where=folder)
        await sandbox.run(["mkdir", "-p", LOGS, VERIFIER_HOME], cwd="/")
        result = await sandbox.run(
            f"chmod +x {TESTS}/test.sh && exec {TESTS}/test.sh 2>&1",
            cwd=defaults.workdir,
            env={**defaults.command_env, "HOME": VERIFIER_HOME, **step.verifier_env},
            timeout=step.verifier_seconds,
        )
        await sandbox.end_processes()
        text = self._without_keys(result.text)[-2000:]
        how = f"tests/test.sh {result.ended.value} {result.exit_code}: {text}"
        if result.ended in ENDED_BY_LIMIT:  # a reward that it wrote before may be incomplete
            return self.unscored(how)
        return await self._result(sandbox, how)

    async def _result(self, sandbox: Sandbox, how: str) -> StepResult:
        """Read the file of a verifier that ended, as Harbor does: reward.json before reward.txt."""
        for name in ("reward.json", "reward.txt"):
            try:
                data = await sandbox.read(f"{LOGS}/{name}", limit=1 << 16)
            except SandboxFileError:
                continue
            try:
                text = data.decode("utf-8", "replace")
                return StepResult(rewards_of(text, is_json=name == "reward.json"), how)
            except RewardUnreadable as error:
                return self.unscored(f"{self._without_keys(str(error))}; {how}")
        return self.unscored(f"no file with a reward; {how}")

    def _without_keys(self, text: str) -> str:
        """Return a text of the tests without the values of ``env``, which may be keys."""
        values = [str(value) for value in self._runnable.options.env.values()]
        for value in sorted(values, key=len, reverse=True):
            if len(value) > SHORT:
                text = text.replace(value, MASK)
        return text

    def unscored(self, reason: str) -> StepResult:
        """Return the result of a step that got no reward, and report it with its reason.

        The agent may be the cause of each, so the reward is 0, and the episode is not left out.
        """
        report_unscored(self._runnable.task.name, reason)
        return StepResult(None, reason)


def report_unscored(task: str, reason: str) -> None:
    """Log why a task got no reward, the first time and at doubling counts."""
    count = _REPEATS.count(f"{task}: {reason}")
    if count is not None:
        often = "" if count == 1 else f" ({count} times for this reason)"
        logger.warning(
            "task %s: its verifier gave no reward, which is 0%s: %s", task, often, reason
        )
