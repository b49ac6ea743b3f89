"""The adapter for tasks in Harbor's format, such as Terminal-Bench 2, without Docker.

    --env harbor:FOLDER         a folder with tasks, at any depth

A turn of the model ends with a command between <bash> and </bash>, which runs in the task's sandbox;
its output is added after it. A turn without a command ends the step: the instruction of the next one
is added, and after the last one the episode is over. The reward is that of the task's verifiers,
which run elsewhere (``harbor.trial``). A prompt names its task by ``task`` in the
metadata; ``rlpost.extensions.agents.environments.export`` writes such prompts, and leaves out tasks that cannot
run here.

An interrupted episode goes on: the agent's folders are saved at each turn. A turn that leaves a
process in the background is not saved.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rlpost.errors import ConfigError, DataError
from rlpost.extensions.agents.environments.harbor.roots import TaskSkipped
from rlpost.extensions.agents.environments.harbor.runnable import (
    RunnableTask,
    TrialOptions,
    runnable,
)
from rlpost.extensions.agents.environments.harbor.tasks import TaskUnreadable, task_names
from rlpost.extensions.agents.environments.harbor.trial import Trial
from rlpost.extensions.agents.environments.protocol import Step, Turn
from rlpost.extensions.agents.sandbox.archives import Archives
from rlpost.extensions.agents.sandbox.protocol import Ended, Pool, Result
from rlpost.tasks.answer_text import END_OF_THOUGHT
from rlpost.types import Prompt

OPEN, CLOSE = "<bash>", "</bash>"
GONE = ("offline", "test_python", "root_cache_gib")
"""Options of 0.2, which installed packages into roots."""
USAGE = f"""{{instruction}}

You work on a Linux machine without a network, through a shell. Write one command at the end of a
turn, like this:

{OPEN}
ls -l
{CLOSE}

Its output follows. Every command begins in the same folder; files stay. When the task is done, write
a turn without a command.
"""
STEPS = """
This is the first of {count} steps. After a turn without a command your work is tested, and the next
step is shown if there is one.
"""
NEXT = """
<next-step>
{instruction}
</next-step>
"""


@dataclass(frozen=True)
class SkippedTask:
    """A task that cannot run, and why."""

    name: str
    reason: str


class HarborEnvironment:
    """One episode on one task."""

    stop = (CLOSE,)
    uses_sandboxes = True
    sandboxes: Pool
    archives: Archives

    def __init__(self, target: str, *, shown: int = 4000, **options: Any) -> None:
        """
        Args:
            target: the folder with the tasks.
            shown: characters of an output that the model reads: of its begin and of its end.
            options: those of ``TrialOptions``.

        Raises ConfigError.
        """
        self._folder, self._options = folder_of(target), options_of(target, options)
        self._shown = shown
        self._trial: Trial | None = None
        self.info: dict[str, object] = {}

    async def reset(self, prompt: Prompt) -> None:
        """Start the sandbox of a prompt's task. Raises DataError."""
        name = prompt.metadata.get("task")
        if not isinstance(name, str):
            raise DataError(
                f"prompt {prompt.prompt_id}: 'task' in its metadata is {name!r}; it has to name a task of "
                f"{self._folder} (python -m rlpost.extensions.agents.environments.export writes such prompts)"
            )
        await self._trial_of(name).begin()

    def _trial_of(self, name: str) -> Trial:
        try:
            task = runnable(self._folder, name, self._options)
        except TaskSkipped as why:
            raise DataError(f"task {name} of {self._folder} cannot run here: {why}") from why
        self._trial = Trial(task, self.sandboxes, self.archives)
        return self._trial

    @property
    def trial(self) -> Trial:
        assert self._trial is not None, "reset or restore comes first"
        return self._trial

    async def step(self, turn: Turn) -> Step:
        """Run a command, or end the step and begin the next one."""
        command, text, tool = command_of(turn), "", None
        if command is not None:
            text, tool = shown(await self.trial.run(command), self._shown), "bash"
            if self.trial.remaining_seconds > 0:
                return Step(text, tool=tool)
        if not (self.trial.has_next and await self.trial.finish_step()):
            return Step(text, tool=tool, done=True)
        instruction = self.trial.step.instruction.strip()
        return Step(text + NEXT.format(instruction=instruction), tool=tool)

    async def score(self) -> float:
        """Run the task's verifier on the agent's files; its reason is in the episode's record."""
        verdict, task = await self.trial.verify(), self.trial.runnable.task
        self.info = {"task": task.name, "verifier": verdict.reason}
        if len(task.steps) > 1:
            self.info["steps"] = [dict(each.rewards or {}) for each in self.trial.results]
        return verdict.score

    async def save(self) -> bytes:
        """Save the agent's folders; refused while a command runs in the background."""
        files = await self.trial.save()
        state = {
            "task": self.trial.runnable.task.name,
            "files": files.decode(),
            **self.trial.progress(),
        }
        return json.dumps(state).encode()

    async def restore(self, data: bytes) -> None:
        """Start the sandbox of the saved task, with the folders that were saved."""
        state = json.loads(data)
        await self._trial_of(state["task"]).restore(state["files"].encode(), state)

    async def close(self) -> None:
        """Close the sandbox."""
        if self._trial is not None:
            await self._trial.close()


def folder_of(target: str) -> Path:
    """Return the folder with the tasks. Raises ConfigError."""
    folder = Path(target).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"--env harbor:{target}: no such folder; download a data set with "
            "`harbor datasets download NAME@VERSION`, or give the folder of a checkout"
        )
    return folder.resolve()


def options_of(target: str, arguments: Mapping[str, Any]) -> TrialOptions:
    """Return the options of --env-args. Raises ConfigError for an unknown name or a wrong type."""
    known = {entry.name for entry in fields(TrialOptions)}
    unknown = sorted(arguments.keys() - known)
    if removed := [name for name in unknown if name in GONE]:
        raise ConfigError(
            f"--env harbor:{target}: {', '.join(removed)} of --env-args: gone: build an image with what "
            "tasks and tests need (docs/agents.md)"
        )
    if unknown:
        raise ConfigError(
            f"--env harbor:{target}: --env-args has {', '.join(unknown)}; it may have "
            f"{', '.join(sorted(known | {'shown'}))}"
        )
    for name in ("images", "env"):
        if not isinstance(arguments.get(name, {}), Mapping):
            raise ConfigError(f"--env harbor:{target}: {name} of --env-args must be an object")
    return TrialOptions(**arguments)


def command_of(turn: Turn) -> str | None:
    """Return the command of a turn, None if it has none.

    It is the last one after ``</think>``. In a thought that never closes a command counts, unlike in
    ``Turn.answer``: the turn stopped at its ``</bash>``, so the model gets its output.
    """
    before, mark, command = turn.text.rpartition(END_OF_THOUGHT)[2].rpartition(OPEN)
    del before
    command = command.partition(CLOSE)[0].strip("\n")
    return command if mark and command.strip() else None


def shown(result: Result, size: int) -> str:
    """Return what the model reads of a result: how it ended, begin and end of its output."""
    text = result.text.strip("\n")
    if len(text) > 2 * size:
        dropped = len(text) - 2 * size
        text = f"{text[:size]}\n[{dropped} characters are left out]\n{text[-size:]}"
    ended = result.ended
    how = f"exit code {result.exit_code}" if ended is Ended.EXITED else ended.value
    return f"\n<output>\n{text}\n[{how}]\n</output>\n"


def sort_tasks(
    target: str, options: TrialOptions, limit: int | None = None
) -> tuple[list[RunnableTask], list[SkippedTask]]:
    """Return the tasks of a folder that may run here, and the others. Raises ConfigError.

    ``limit``: consider the first ones alone.
    """
    folder = folder_of(target)
    running, skipped = list[RunnableTask](), list[SkippedTask]()
    try:
        names = task_names(folder)[:limit]
    except DataError as error:
        raise ConfigError(f"--env harbor:{target}: {error}") from error
    for name in names:
        try:
            running.append(runnable(folder, name, options))
        except (TaskSkipped, TaskUnreadable) as why:
            skipped.append(SkippedTask(name, str(why)))
    return running, skipped


def prompts(tasks: Sequence[RunnableTask], label: str) -> Iterator[dict[str, object]]:
    """Yield the rows of a prompt file."""
    for each in tasks:
        first, *others = each.task.steps
        text = USAGE.format(instruction=first.instruction.strip())
        if others:
            text += STEPS.format(count=len(others) + 1)
        yield {"prompt": text, "env": label, "task": each.task.name}
