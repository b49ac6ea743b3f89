"""Which tasks run here: a task, the roots that its sandboxes begin with, and their limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rlpost.extensions.agents.environments.harbor.roots import TaskRoot, TaskSkipped, choose_root
from rlpost.extensions.agents.environments.harbor.steps import HarborStep
from rlpost.extensions.agents.environments.harbor.tasks import HarborTask, read_task
from rlpost.extensions.agents.sandbox.protocol import Limits

LIFETIME_SECONDS = 7 * 86400.0  # of a sandbox: --env-timeout-s ends episodes earlier


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
    """A task, how the agent's sandbox begins, and that of each step's verifier."""

    task: HarborTask
    root: TaskRoot
    verifier_roots: tuple[TaskRoot, ...]
    options: TrialOptions

    def limits(self, base: Limits, step: HarborStep, *, for_verifier: bool = False) -> Limits:
        """Return the limits of a step's sandbox: those of the pool, with the task's own.

        A step that forbids the network has none, also where the pool's sandboxes have one.

        Args:
            for_verifier: the step's verifier gets the sandbox, not the agent.
        """
        task = self.task
        seconds = max(max(each.agent_seconds, each.verifier_seconds) for each in task.steps)
        cores, memory_mib = task.cores, task.memory_mib
        network = base.network and step.network
        if for_verifier:
            cores, memory_mib = step.verifier_cores, step.verifier_memory_mib
            network = self.options.verifier_network or (base.network and step.verifier_network)
        return replace(
            base,
            wall_seconds=seconds,
            cpu_seconds=seconds * (cores or base.cores),
            lifetime_seconds=LIFETIME_SECONDS,
            cores=cores or base.cores,
            memory_mib=memory_mib or base.memory_mib,
            network=network,
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
    memory_mib = max(task.memory_mib or 0, *(step.verifier_memory_mib or 0 for step in task.steps))
    if memory_mib > options.max_memory_mib:
        more = f"{memory_mib} MiB of memory (max_memory_mib: {options.max_memory_mib})"
        task = replace(task, lacking=(*task.lacking, more))
    reasons, roots = [f"it needs {what}" for what in task.lacking], list[TaskRoot]()
    for definition in (task.root, *(step.verifier_root or task.root for step in task.steps)):
        try:
            roots.append(choose_root(definition, options.images, exists))
        except TaskSkipped as why:
            reasons.append(str(why))
    if reasons:
        raise TaskSkipped("; ".join(dict.fromkeys(reasons)))
    return RunnableTask(task, roots[0], tuple(roots[1:]), options)
