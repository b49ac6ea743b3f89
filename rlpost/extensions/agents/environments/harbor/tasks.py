"""Read tasks in Harbor's format, and name what a task needs that a sandbox does not have.

    NAME/instruction.md                  what the agent is asked
    NAME/task.toml                       times, resources, environment variables, steps
    NAME/environment/Dockerfile          describes the root; or ``docker_image`` in task.toml
    NAME/tests/test.sh                   writes /logs/verifier/reward.json or reward.txt
    NAME/solution/solve.sh               optional: a reference solution
    NAME/steps/STEP                      the files of a step (``steps``)

``parse_task`` is pure; ``read_task`` reads the files. Source: Harbor 0.26, harbor/models/task.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.files import OutsideFolder, below, read_regular
from rlpost.errors import DataError
from rlpost.extensions.agents.environments.harbor.build_digest import folder_digest
from rlpost.extensions.agents.environments.harbor.fields import (
    cores_of,
    image_of,
    memory_of,
    resolve,
    unknown_fields,
)
from rlpost.extensions.agents.environments.harbor.root_definition import (
    COMPOSE_NAMES,
    ENVIRONMENT,
    RootDefinition,
    TaskFiles,
    agent_root,
    build_folder,
)
from rlpost.extensions.agents.environments.harbor.steps import (
    HarborStep,
    folder_of_step,
    needs_of_environment,
    parse_steps,
    step_tables,
    unknown_variables,
)

FOLDERS = ("environment", "tests", "solution")
STEP_FOLDERS = ("tests", "solution", "workdir")
TOML_BYTES, TEXT_BYTES = 1 << 20, 8 << 20
"""Of task.toml, and of all instructions and compose files of a task together."""
MAX_LEVELS = 64
"""Of folders above a task; Python 3.11 walks them by recursion."""
MAX_DOTS = 500
"""Of one line of task.toml: the parser takes a second for a key of 10,000 parts, and grows with its
square."""
STRATEGIES = ("mean", "final")


class TaskUnreadable(DataError):
    """A folder is not a task: a file is missing, or task.toml is damaged."""


@dataclass(frozen=True)
class HarborTask:
    """One task.

    Attributes:
        root: in which the agent works.
        steps: at least one.
        strategy: of the reward of several steps: ``mean`` or ``final``.
        solution_env: variables of the solution beside those of the root.
        lacking: what it needs and a sandbox does not have, each as a clause. Empty: it may run.
    """

    name: str
    folder: Path
    root: RootDefinition
    steps: tuple[HarborStep, ...]
    strategy: str = "mean"
    cores: int | None = None
    memory_mib: int | None = None
    solution_env: Mapping[str, str] = field(default_factory=dict)
    lacking: tuple[str, ...] = ()


def task_names(folder: Path) -> tuple[str, ...]:
    """Return the names of the tasks below a folder, at any depth; a task holds no other.

    Links to folders are followed only where they stay below it. Folders below MAX_LEVELS others are
    left out. Raises DataError if there is none.
    """
    names, outside, num_older = list[str](), list[str](), 0
    seen = set[str]()
    for parent, folders, files in os.walk(folder, followlinks=True):
        at, inside = Path(parent), list[str]()
        if len(at.relative_to(folder).parts) > MAX_LEVELS:
            folders.clear()
            continue
        for name in sorted(folders):
            try:
                real = os.path.realpath(below(folder, (at / name).relative_to(folder).as_posix()))
            except OutsideFolder as error:
                outside.append(str(error))
                continue
            if real not in seen:  # a link may lead to a folder above itself
                seen.add(real)
                inside.append(name)
        folders[:] = inside
        if "task.toml" in files and ("instruction.md" in files or "steps" in folders):
            names.append(at.relative_to(folder).as_posix())
            folders.clear()
        num_older += "task.yaml" in files
    if not names:
        if num_older:
            raise DataError(
                f"{folder} has {num_older} tasks with task.yaml, the form of Terminal-Bench 1; convert "
                "them with `harbor task migrate --input FOLDER --output NEW_FOLDER`"
            )
        hint = f"; links that lead outside are not followed: {outside[0]}" if outside else ""
        raise DataError(
            f"{folder} has no task of Harbor: no folder below it has task.toml and instruction.md"
            + hint
        )
    return tuple(sorted(names))


def read_task(folder: Path, name: str, host_env: Mapping[str, str]) -> HarborTask:
    """Read a task. ``host_env``: values for variables that task.toml takes from the host.

    No path of a task leads out of its folder, links included. Raises TaskUnreadable.
    """
    try:
        if ".." in Path(name).parts:
            raise OutsideFolder(f"task {name!r} is not below {folder}")
        at = below(folder, name)
        settings = parse_toml(read_regular(below(at, "task.toml"), TOML_BYTES).decode())
        return parse_task(name, at, _task_files(at, settings), host_env)
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise TaskUnreadable(f"task {name}: {type(error).__name__}: {error}") from error


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of task.toml. Raises ValueError, RecursionError."""
    if any(line.count(".") > MAX_DOTS for line in text.splitlines()):
        raise ValueError(f"task.toml has a line with more than {MAX_DOTS} dots")
    return tomllib.loads(text)


def _task_files(at: Path, settings: Mapping[str, Any]) -> TaskFiles:
    """Read what decides what a task needs. Raises OSError, ValueError."""
    steps = [folder_of_step(table) for table in step_tables(settings)]
    folders = [*FOLDERS, *(f"{step}/{name}" for step in steps for name in STEP_FOLDERS)]
    names = {f"{each}/{path.name}" for each in folders for path in below(at, each).glob("*")}
    trajectories = [
        name for name in ("trajectory.json", *(f"{each}/trajectory.json" for each in steps))
    ]
    names |= {name for name in trajectories if below(at, name).exists()}
    tests = [f"{step}/tests" for step in steps]
    compose = [
        f"{each}/{name}" for each in ("environment", "tests", *tests) for name in COMPOSE_NAMES
    ]
    instructions = [
        f"{each}/instruction.md" if steps else "instruction.md" for each in steps or "."
    ]
    texts = _texts(at, [*instructions, *compose])
    return TaskFiles(
        settings,
        {
            folder: texts.get(name, "")
            for folder, name in zip(steps or ["."], instructions, strict=True)
        },
        {name: texts[name] for name in compose if name in texts},
        frozenset(names),
        lambda part: folder_digest(below(at, part)),
    )


def _texts(task: Path, names: Sequence[str]) -> dict[str, str]:
    """Return the texts of a task by their names, without missing ones. Raises OSError, ValueError."""
    texts, left = dict[str, str](), TEXT_BYTES
    for name in names:
        path = below(task, name)
        if path.is_file():
            data = read_regular(path, left)
            left -= len(data)
            texts[name] = data.decode()
    return texts


def parse_task(
    name: str, folder: Path, files: TaskFiles, host_env: Mapping[str, str]
) -> HarborTask:
    """Return the task that these files describe.

    Raises ValueError, TypeError, AttributeError, KeyError.
    """
    settings = files.settings
    environment = settings.get("environment", {})
    variables, unknown = resolve(environment.get("env", {}), host_env)
    solution_env, unknown_in_solution = resolve(
        settings.get("solution", {}).get("env", {}), host_env
    )
    folder_of_image, compose = build_folder(files)
    root = agent_root(name, folder_of_image, variables, files)
    steps, lacking_in_steps = parse_steps(name, root, files, host_env)
    strategy = settings.get("multi_step_reward_strategy") or STRATEGIES[0]
    if strategy not in STRATEGIES:
        raise ValueError(f"multi_step_reward_strategy = {strategy!r:.80} is not mean or final")
    lacking = [*_lacking(files, compose), *lacking_in_steps]
    lacking += [unknown_variables(each) for each in (unknown, unknown_in_solution) if each]
    return HarborTask(
        name,
        folder,
        root,
        steps,
        strategy,
        cores=cores_of(environment),
        memory_mib=memory_of(environment),
        solution_env=solution_env,
        lacking=tuple(dict.fromkeys(lacking)),
    )


def _lacking(files: TaskFiles, compose: str) -> list[str]:
    """Return what a task needs beside its steps that a sandbox does not have.

    ``compose``: why it needs Docker Compose, or ''.
    """
    environment = files.settings.get("environment", {})
    unknown = unknown_fields(files.settings)
    rules = [
        (bool(unknown), f"fields that are not known here: {', '.join(unknown)}"),
        (bool(compose), f"Docker Compose ({compose})"),
        (
            environment.get("network_mode") == "allowlist",
            "a network that reaches listed hosts alone",
        ),
        (
            not image_of(environment) and ENVIRONMENT not in files.names,
            f"docker_image, or {ENVIRONMENT}: neither names a root",
        ),
    ]
    needs = [what for is_needed, what in rules if is_needed]
    return [*needs, *needs_of_environment(environment)]
