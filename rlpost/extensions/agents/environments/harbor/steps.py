"""The steps of a task: what each asks of the agent, and how it is scored. Pure.

A task without ``[[steps]]`` is one step, whose files are those of the task's folder. With them, the
steps have one agent and one root, and each has its files below steps/NAME:

    instruction.md      what the agent is asked in this step
    workdir/            files that are put into the agent's folder before; setup.sh among them is run
    tests/              replace those of the task's ``tests`` of the same name
    solution/           optional; without it, that of the task

Source: Harbor 0.26, harbor/trial/multi_step.py and harbor/models/task.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.files import check_path
from rlpost.extensions.agents.environments.harbor.fields import (
    DEFAULT_SECONDS,
    Table,
    artifact_paths,
    cores_of,
    has_excludes,
    has_network,
    is_separate,
    memory_of,
    resolve,
    seconds_of,
)
from rlpost.extensions.agents.environments.harbor.rewards import REWARD
from rlpost.extensions.agents.environments.harbor.root_definition import (
    RootDefinition,
    TaskFiles,
    verifier_root,
)

AGENT_SECONDS = 3600.0  # of an agent whose task names no limit
MAX_STEPS = 1000
MAX_RETRIES = 100
"""Of a health check."""


@dataclass(frozen=True)
class HealthCheck:
    """A command that must succeed before the agent of a step begins. Times are in seconds."""

    command: str
    interval: float = 5.0
    timeout: float = 30.0
    start_period: float = 0.0
    start_interval: float = 5.0
    retries: int = 3


@dataclass(frozen=True)
class HarborStep:
    """One step.

    Attributes:
        name: '' for the step of a task without steps.
        folder: of its files, relative to the task's: ``.`` or steps/NAME.
        agent_seconds: time of all commands of the agent.
        tests: folders of tests, relative to the task's; files of a later one replace those before.
        solution: folder of the solution, relative to the task's.
        workdir: folder of the files that are put into the agent's; None: there is none.
        has_setup: ``workdir`` has setup.sh, which is run.
        network, verifier_network: whether the agent and the verifier may use a network.
        verifier_root: of a verifier that gets ``artifacts`` alone; None: the root and the folders of
            the agent.
        artifacts: absolute paths.
        verifier_env: variables beside those of the root.
        verifier_cores, verifier_memory_mib: of a verifier with its own root, else those of the agent.
        least: rewards that it needs for the next step to begin.
    """

    name: str
    folder: str
    instruction: str
    agent_seconds: float = AGENT_SECONDS
    verifier_seconds: float = DEFAULT_SECONDS
    tests: tuple[str, ...] = ()
    solution: str = "solution"
    workdir: str | None = None
    has_setup: bool = False
    network: bool = True
    verifier_network: bool = True
    verifier_root: RootDefinition | None = None
    artifacts: tuple[str, ...] = ()
    verifier_env: Mapping[str, str] = field(default_factory=dict)
    verifier_cores: int | None = None
    verifier_memory_mib: int | None = None
    least: Mapping[str, float] = field(default_factory=dict)
    health_check: HealthCheck | None = None


def step_tables(settings: Table) -> list[Table]:
    """Return the tables of ``[[steps]]``, which name folders. Raises ValueError."""
    steps = settings.get("steps") or []
    if not isinstance(steps, list) or len(steps) > MAX_STEPS:
        raise ValueError(f"steps must be at most {MAX_STEPS} tables [[steps]]")
    names = [each.get("name") for each in steps]
    for name in names:
        if not isinstance(name, str) or "/" in name or not name.isprintable():
            raise ValueError(f"a step has the name {name!r:.80}, which is no name of a folder")
        check_path(name)
    if len({str(name).casefold() for name in names}) < len(names):
        raise ValueError("two steps have one name")
    return steps


def folder_of_step(table: Table) -> str:
    """Return the folder of a step, relative to the task's."""
    return f"steps/{table['name']}"


@dataclass(frozen=True)
class _Tables:
    """The tables of task.toml that hold for one step: of the task, then of the step itself."""

    prefix: str
    """Of the step's files: '', or steps/NAME/."""
    own: Table
    agent: tuple[Table, Table]
    verifier: tuple[Table, Table]
    environment: Table
    artifacts: Sequence[str | Table]

    @classmethod
    def of(cls, settings: Table, step: Table | None) -> _Tables:
        """Return those of a step; None: the task has no steps."""
        own = step or {}
        return cls(
            "" if step is None else f"{folder_of_step(step)}/",
            own,
            (settings.get("agent", {}), own.get("agent", {})),
            (settings.get("verifier", {}), own.get("verifier", {})),
            settings.get("environment", {}),
            [*settings.get("artifacts", []), *own.get("artifacts", [])],
        )

    @property
    def is_separate(self) -> bool:
        """Whether the verifier has its own root."""
        task, step = self.verifier
        says = "environment_mode" in step or "environment" in step
        return is_separate(step if says else task)

    @property
    def verifier_environment(self) -> Table:
        """The environment of the verifier."""
        if not self.is_separate:
            return self.environment
        own: Table | None = last_of(self.verifier, "environment")
        return self.environment if own is None else own


def last_of(tables: Sequence[Table], name: str) -> Any:
    """Return the value of the last table that has one; None if none has."""
    values = [each[name] for each in tables if each.get(name) is not None]
    return values[-1] if values else None


def parse_steps(
    task: str, root: RootDefinition, files: TaskFiles, host_env: Mapping[str, str]
) -> tuple[tuple[HarborStep, ...], list[str]]:
    """Return the steps of a task, and what they need that a sandbox does not have.

    ``root``: of the agent. Raises ValueError, TypeError, AttributeError.
    """
    steps, lacking = list[HarborStep](), list[str]()
    declared: list[Table | None] = [*step_tables(files.settings)]
    for each in declared or [None]:
        tables = _Tables.of(files.settings, each)
        variables = {**tables.verifier[0].get("env", {}), **tables.verifier[1].get("env", {})}
        resolved, unknown = resolve(variables, host_env)
        step = _step(task, root, tables, files, resolved)
        needs = list(_lacking(step, tables, files, unknown))
        steps.append(step)
        lacking += needs if each is None else [f"step {step.name}: {what}" for what in needs]
    return tuple(steps), lacking


def _step(
    task: str,
    root: RootDefinition,
    tables: _Tables,
    files: TaskFiles,
    verifier_env: Mapping[str, str],
) -> HarborStep:
    """Return one step."""
    table, prefix, used = tables.own, tables.prefix, tables.verifier_environment
    own_root, artifacts = None, tuple[str, ...]()
    if tables.is_separate:
        artifacts = artifact_paths(tables.artifacts)
        own_root = _verifier_root(task, root, tables, files)
    # A step's verifier without a limit has Harbor's default, not the task's.
    limited = tables.verifier[1 if prefix else 0]
    folders = dict.fromkeys(("tests", f"{prefix}tests"))
    solution, workdir = f"{prefix}solution", f"{prefix}workdir"
    return HarborStep(
        name=str(table.get("name", "")),
        folder=prefix.rstrip("/") or ".",
        instruction=files.instructions.get(prefix.rstrip("/") or ".", ""),
        agent_seconds=seconds_of(last_of(tables.agent, "timeout_sec"), AGENT_SECONDS),
        verifier_seconds=seconds_of(limited.get("timeout_sec"), DEFAULT_SECONDS),
        tests=tuple(each for each in folders if _has(files, each)),
        solution=solution if _has(files, solution) else "solution",
        workdir=workdir if prefix and _has(files, workdir) else None,
        has_setup=bool(prefix) and f"{workdir}/setup.sh" in files.names,
        network=_network(tables.agent, tables.environment),
        verifier_network=_network(tables.verifier, used),
        verifier_root=own_root,
        artifacts=artifacts,
        verifier_env=verifier_env,
        verifier_cores=cores_of(used),
        verifier_memory_mib=memory_of(used),
        least=_least(table.get("min_reward")),
        health_check=_health_check(table.get("healthcheck")),
    )


def _verifier_root(
    task: str, root: RootDefinition, tables: _Tables, files: TaskFiles
) -> RootDefinition:
    """Return the root of a separate verifier, whose tables may name an image, the step's first."""
    of_task, of_step = (each.get("environment") or {} for each in tables.verifier)
    candidates = [(of_task, "tests")]
    if tables.prefix:
        candidates.insert(0, (of_step, f"{tables.prefix}tests"))
    environment = last_of(tables.verifier, "environment") or {}
    return verifier_root(task, root, environment, candidates, files)


def _network(phase: Sequence[Table], environment: Table) -> bool:
    return has_network({"network_mode": last_of(phase, "network_mode")}, environment)


def _has(files: TaskFiles, folder: str) -> bool:
    return any(name.startswith(f"{folder}/") for name in files.names)


def _least(value: object) -> dict[str, float]:
    """Return ``min_reward``: a number, which is that of ``reward``, or a table of them."""
    if value is None:
        return {}
    values: Table = value if isinstance(value, Mapping) else {REWARD: value}
    least = {str(name): float(each) for name, each in values.items()}
    if any(math.isnan(each) for each in least.values()):
        raise ValueError(f"min_reward = {value!r:.80} is not a number")
    return least


def _health_check(table: Table | None) -> HealthCheck | None:
    if table is None:
        return None
    names = ("interval", "timeout", "start_period", "start_interval")
    times = {name: float(table[f"{name}_sec"]) for name in names if f"{name}_sec" in table}
    check = HealthCheck(str(table["command"]), **times, retries=int(table.get("retries", 3)))
    if not all(0 <= each < math.inf for each in times.values()) or check.timeout == 0:
        raise ValueError("a time of a health check is not above 0")
    if not 1 <= check.retries <= MAX_RETRIES:
        raise ValueError(f"a health check has {check.retries} retries; use 1 to {MAX_RETRIES}")
    return check


def _lacking(
    step: HarborStep, tables: _Tables, files: TaskFiles, unknown: Sequence[str]
) -> Iterator[str]:
    """Yield what a step needs and a sandbox does not have. ``unknown``: variables without a value."""
    phases = [*tables.agent, *tables.verifier]
    if tables.is_separate:
        phases.append(tables.verifier_environment)
        yield from needs_of_environment(tables.verifier_environment)
        if has_excludes(tables.artifacts):
            yield "artifacts without some of their files (exclude)"
    if "allowlist" in [each.get("network_mode") for each in phases]:
        yield "a network that reaches listed hosts alone"
    for who, phase in (("agent", tables.agent), ("verifier", tables.verifier)):
        if last_of(phase, "user") not in (None, "root", 0, "0"):
            yield f"a second user for the {who}"
    if any(each.get("collect") for each in tables.verifier):
        yield "commands that collect the state of services"
    brings_tests = step.verifier_root is not None and step.verifier_root.brings_tests
    if not brings_tests and not {"tests/test.sh", f"{tables.prefix}tests/test.sh"} & files.names:
        yield f"{tables.prefix}tests/test.sh, which is missing"
    if not step.instruction:
        yield f"{tables.prefix}instruction.md, which is missing"
    if f"{tables.prefix}trajectory.json" in files.names:
        yield f"a conversation before its first turn ({tables.prefix}trajectory.json)"
    if unknown:
        yield unknown_variables(unknown)


def unknown_variables(names: Sequence[str]) -> str:
    """Return what a task needs that takes variables of the host which have no value."""
    return (
        f"variables of the host ({', '.join(names)}): give values in the argument env, "
        'a key as "${NAME_ENGINES_KEY}"'
    )


def needs_of_environment(environment: Table) -> list[str]:
    """Return what an environment needs that a sandbox does not have."""
    rules = [
        (bool(environment.get("gpus")), f"{environment.get('gpus')} GPUs"),
        (bool(environment.get("tpu")), "a TPU"),
        (str(environment.get("os", "linux")).lower() != "linux", "Windows"),
        (bool(environment.get("mcp_servers")), "MCP servers"),
        (bool(environment.get("skills_dir")), "skills of an agent (skills_dir)"),
        (bool(environment.get("healthcheck")), "a service with a health check"),
    ]
    return [what for is_needed, what in rules if is_needed]
