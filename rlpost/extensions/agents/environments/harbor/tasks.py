"""Read tasks in Harbor's format, and name what a task needs that a sandbox does not have.

    NAME/instruction.md                  what the agent is asked
    NAME/task.toml                       times, resources, environment variables
    NAME/environment/Dockerfile          describes the root; or ``docker_image`` in task.toml
    NAME/tests/test.sh                   writes /logs/verifier/reward.json or reward.txt
    NAME/solution/solve.sh               optional: a reference solution

``parse_task`` is pure; ``read_task`` reads the files. Source: Harbor 0.26, harbor/models/task.
"""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.files import OutsideFolder, below, read_regular
from rlpost.errors import DataError
from rlpost.extensions.agents.environments.harbor.build_digest import folder_digest
from rlpost.extensions.agents.environments.harbor.compose import ComposeUnsupported, read_compose

DEFAULT_SECONDS = 600.0  # Harbor's default for the verifier
AGENT_SECONDS = 3600.0  # of an agent whose task names no limit
SIZES = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
ENVIRONMENT, VERIFIER = "environment/Dockerfile", "tests/Dockerfile"
FOLDERS = ("environment", "tests", "solution")
TEXT_BYTES = 8 << 20
"""Of task.toml or an instruction."""
_PHASE = {"timeout_sec", "user", "network_mode", "allowed_hosts"}
_ENVIRONMENT = {
    *("build_timeout_sec", "docker_image", "os", "cpus", "memory_mb", "storage_mb", "gpus"),
    *("gpu_types", "tpu", "mcp_servers", "env", "skills_dir", "healthcheck", "workdir"),
    *("allow_internet", "network_mode", "allowed_hosts"),
    *("memory", "storage"),  # an older form
}
FIELDS: Mapping[str, set[str]] = {
    "": {
        *("schema_version", "version", "task", "metadata", "source", "agent", "verifier"),
        *("environment", "solution", "steps", "multi_step_reward_strategy", "artifacts"),
    },
    "agent": _PHASE,
    "verifier": {*_PHASE, "env", "environment_mode", "environment", "collect"},
    "environment": _ENVIRONMENT,
    "verifier.environment": _ENVIRONMENT,
    "solution": {"env"},
}
"""Fields of task.toml by table (Harbor 0.26, schema 1.4); a task with others is skipped."""
COMPOSE = tuple(
    f"{folder}/{name}"
    for folder in ("environment", "tests")
    for name in ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
)


class TaskUnreadable(DataError):
    """A folder is not a task: a file is missing, or task.toml is damaged."""


@dataclass(frozen=True)
class TaskFiles:
    """The texts of a task's folder, and the names of those files that decide what it needs."""

    settings: Mapping[str, Any]
    instruction: str
    compose: Mapping[str, str] = field(default_factory=dict)
    """Texts of compose files, by their name relative to the folder."""
    names: frozenset[str] = frozenset()
    """Relative to the folder, such as ``environment/docker-compose.yaml``."""
    digest_of: Callable[[str], str] = lambda folder: "00000000"
    """The digest of a folder from which an image is built: ``environment``, ``tests`` or ``.``."""


@dataclass(frozen=True)
class RootDefinition:
    """What a task says of a root.

    Attributes:
        folder: from which a Dockerfile copies: ``environment``, ``tests`` or ``.``.
        image: that ``docker_image`` names, or the name of one that is built from the Dockerfile,
            which ends with a digest of ``folder``.
        dockerfile: of the image, relative to the task; None with a ``docker_image``.
        short: the image's name without the digest; None with a ``docker_image``.
        environment: variables of every command.
    """

    folder: str
    image: str
    dockerfile: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    short: str | None = None


@dataclass(frozen=True)
class HarborTask:
    """One task.

    Attributes:
        root: in which the agent works.
        verifier_root: of a verifier that gets ``artifacts`` alone; None: the root and the folders of
            the agent.
        artifacts: absolute paths.
        agent_seconds: time of all commands of an episode.
        verifier_env, solution_env: variables beside those of the root.
        network, verifier_network: whether the task lets the agent, and its verifier, use a network.
        verifier_cores, verifier_memory_mib: of a verifier with its own root, else those of the agent.
        lacking: what it needs and a sandbox does not have, each as a clause. Empty: it may run.
    """

    name: str
    folder: Path
    instruction: str
    root: RootDefinition
    agent_seconds: float = AGENT_SECONDS
    verifier_seconds: float = DEFAULT_SECONDS
    cores: int | None = None
    memory_mib: int | None = None
    network: bool = True
    verifier_network: bool = True
    verifier_cores: int | None = None
    verifier_memory_mib: int | None = None
    verifier_root: RootDefinition | None = None
    artifacts: tuple[str, ...] = ()
    verifier_env: Mapping[str, str] = field(default_factory=dict)
    solution_env: Mapping[str, str] = field(default_factory=dict)
    lacking: tuple[str, ...] = ()


def task_names(folder: Path) -> tuple[str, ...]:
    """Return the names of the tasks below a folder, at any depth; a task holds no other.

    Links to folders are followed only where they stay below it. Raises DataError if there is none.
    """
    names, outside, num_older = list[str](), list[str](), 0
    seen = set[str]()
    for parent, folders, files in os.walk(folder, followlinks=True):
        at, inside = Path(parent), list[str]()
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
        paths = [path for each in FOLDERS for path in below(at, each).glob("*")]
        files = TaskFiles(
            tomllib.loads(read_regular(below(at, "task.toml"), TEXT_BYTES).decode()),
            _text(at, "instruction.md") or "",
            {name: text for name in COMPOSE if (text := _text(at, name)) is not None},
            frozenset(f"{path.parent.name}/{path.name}" for path in paths),
            lambda part: folder_digest(below(at, part)),
        )
        return parse_task(name, at, files, host_env)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise TaskUnreadable(f"task {name}: {type(error).__name__}: {error}") from error


def _text(task: Path, name: str) -> str | None:
    """Return a text of a task; None if it has none. Raises OSError, ValueError."""
    path = below(task, name)
    return read_regular(path, TEXT_BYTES).decode() if path.is_file() else None


def parse_task(
    name: str, folder: Path, files: TaskFiles, host_env: Mapping[str, str]
) -> HarborTask:
    """Return the task that these files describe. Raises ValueError, TypeError, AttributeError."""
    settings = files.settings
    agent, verifier = settings.get("agent", {}), settings.get("verifier", {})
    environment = settings.get("environment", {})
    lacking = list(_lacking(settings, files))
    resolved = []
    for values in (environment, verifier, settings.get("solution", {})):
        variables, unknown = resolve(values.get("env", {}), host_env)
        resolved.append(variables)
        if unknown:
            lacking.append(
                f"variables of the host ({', '.join(unknown)}): give values in the argument env, "
                'a key as "${NAME_ENGINES_KEY}"'
            )
    network = _has_network(agent, environment)
    verifier_environment = environment
    root = _root(name, build_folder(files)[0], ENVIRONMENT, environment, resolved[0], files)
    verifier_root, artifacts = None, tuple[str, ...]()
    if is_separate(verifier):
        artifacts = artifact_paths(settings.get("artifacts", []))
        verifier_root = _verifier_root(name, root, verifier.get("environment", {}), files)
        verifier_environment = verifier.get("environment", environment)
    return HarborTask(
        name,
        folder,
        files.instruction,
        root,
        agent_seconds=_seconds(agent.get("timeout_sec"), AGENT_SECONDS),
        verifier_seconds=_seconds(verifier.get("timeout_sec"), DEFAULT_SECONDS),
        cores=_cores(environment),
        memory_mib=_memory(environment),
        network=network,
        verifier_network=_has_network(verifier, verifier_environment),
        verifier_cores=_cores(verifier_environment),
        verifier_memory_mib=_memory(verifier_environment),
        verifier_root=verifier_root,
        artifacts=artifacts,
        verifier_env=resolved[1],
        solution_env=resolved[2],
        lacking=tuple(dict.fromkeys(lacking)),
    )


def _lacking(settings: Mapping[str, Any], files: TaskFiles) -> list[str]:
    """Return what a task needs and a sandbox does not have."""
    agent, verifier = settings.get("agent", {}), settings.get("verifier", {})
    environment = settings.get("environment", {})
    verifier_environment = verifier.get("environment", {}) if is_separate(verifier) else {}
    has_steps = bool(settings.get("steps"))
    compose = build_folder(files)[1]
    unknown = unknown_fields(settings)
    phases = (environment, agent, verifier, verifier_environment)
    rules = [
        (bool(unknown), f"fields that are not known here: {', '.join(unknown)}"),
        (bool(compose), f"Docker Compose ({compose})"),
        *_environment_rules(environment),
        *_environment_rules(verifier_environment),
        (
            "allowlist" in [phase.get("network_mode") for phase in phases],
            "a network that reaches listed hosts alone",
        ),
        (
            is_separate(verifier) and _has_excludes(settings.get("artifacts", [])),
            "artifacts without some of their files (exclude)",
        ),
        (agent.get("user") not in (None, "root", 0, "0"), "a second user for the agent"),
        (verifier.get("user") not in (None, "root", 0, "0"), "a second user for the verifier"),
        (has_steps, "several steps with a verifier each"),
        (
            not has_steps and not _image(environment) and ENVIRONMENT not in files.names,
            f"docker_image, or {ENVIRONMENT}: neither names a root",
        ),
        (bool(verifier.get("collect")), "commands that collect the state of services"),
        (not has_steps and "tests/test.sh" not in files.names, "tests/test.sh, which is missing"),
        (not has_steps and not files.instruction, "instruction.md, which is missing"),
    ]
    return [what for is_needed, what in rules if is_needed]


def _environment_rules(environment: Mapping[str, Any]) -> list[tuple[bool, str]]:
    """Return what an environment may need that a sandbox does not have, and whether it does."""
    return [
        (bool(environment.get("gpus")), f"{environment.get('gpus')} GPUs"),
        (bool(environment.get("tpu")), "a TPU"),
        (str(environment.get("os", "linux")).lower() != "linux", "Windows"),
        (bool(environment.get("mcp_servers")), "MCP servers"),
        (bool(environment.get("skills_dir")), "skills of an agent (skills_dir)"),
        (bool(environment.get("healthcheck")), "a service with a health check"),
    ]


def _has_excludes(artifacts: Sequence[str | Mapping[str, Any]]) -> bool:
    return any(not isinstance(each, str) and bool(each.get("exclude")) for each in artifacts)


def unknown_fields(settings: Mapping[str, Any]) -> list[str]:
    """Return the fields of task.toml that no part of this reader knows, as dotted names.

    >>> unknown_fields({"agent": {"timeout_sec": 1.0, "budget": 2}, "metadata": {"any": 1}})
    ['agent.budget']
    """
    names = list[str]()
    for table, known in FIELDS.items():
        values: Any = settings
        for part in table.split(".") if table else ():
            values = values.get(part) or {}
        names += [f"{table}.{name}".lstrip(".") for name in values if name not in known]
    return names


def _has_network(phase: Mapping[str, Any], environment: Mapping[str, Any]) -> bool:
    """Return whether a phase may use a network: its own mode, else that of its environment."""
    mode = phase.get("network_mode") or environment.get("network_mode")
    if mode is None:
        return environment.get("allow_internet") is not False
    return bool(mode != "no-network")


def _cores(environment: Mapping[str, Any]) -> int | None:
    cores = environment.get("cpus")
    return None if cores is None else max(1, math.ceil(cores))


def _memory(environment: Mapping[str, Any]) -> int | None:
    return _mib(environment.get("memory_mb", environment.get("memory")))


def build_folder(files: TaskFiles) -> tuple[str, str]:
    """Return the folder from which environment/Dockerfile copies, and why Compose is needed, or ''."""
    folder = "environment"
    for name, text in files.compose.items():
        if not name.startswith("environment/") or ENVIRONMENT not in files.names:
            return folder, name
        try:
            folder = read_compose(text)
        except ComposeUnsupported as why:
            return folder, f"{name}: {why}"
    return folder, ""


def is_separate(verifier: Mapping[str, Any]) -> bool:
    """Return whether a verifier has its own root."""
    mode = verifier.get("environment_mode")
    return mode == "separate" or (mode is None and "environment" in verifier)


def _verifier_root(
    name: str, root: RootDefinition, environment: Mapping[str, Any], files: TaskFiles
) -> RootDefinition:
    """Return the root of a separate verifier: its image, that of tests/Dockerfile, or the agent's.

    The first two bring their tests with them.
    """
    image = _image(environment)
    if image is None and VERIFIER not in files.names:
        return root
    variables = {str(name): str(value) for name, value in environment.get("env", {}).items()}
    return _root(f"{name}-tests", "tests", VERIFIER, environment, variables, files)


def _root(
    name: str,
    folder: str,
    dockerfile: str,
    environment: Mapping[str, Any],
    variables: Mapping[str, str],
    files: TaskFiles,
) -> RootDefinition:
    """Return the root of an image that is named, or built from a Dockerfile."""
    image, workdir = _image(environment), environment.get("workdir")
    if image:
        return RootDefinition(folder, image, None, variables, workdir)
    built = f"{name}-{files.digest_of(folder)}"
    return RootDefinition(folder, built, dockerfile, variables, workdir, name)


def _image(environment: Mapping[str, Any]) -> str | None:
    """Return ``docker_image``. Raises ValueError unless it is a text."""
    image = environment.get("docker_image")
    if image is not None and not isinstance(image, str):
        raise ValueError(f"docker_image = {image!r} is not a text")
    return image


def artifact_paths(entries: Sequence[str | Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the paths that a separate verifier gets of the agent, with the one that always counts.

    Raises ValueError for one that is not absolute, is that of another service or would reach tests.
    """
    paths = ["/logs/artifacts"]
    for entry in entries:
        source = entry if isinstance(entry, str) else str(entry["source"])
        service = None if isinstance(entry, str) else entry.get("service")
        parts = [part for part in source.split("/") if part not in ("", ".")]
        if service not in (None, "main") or source[:1] != "/" or not parts or ".." in parts:
            raise ValueError(f"artifact {source!r} is not an absolute path of the agent's root")
        is_log = parts == ["logs"] or parts[:2] in (["logs", "verifier"], ["logs", "home"])
        if parts[0] in ("tests", "solution", "proc", "sys", "dev") or is_log:
            raise ValueError(f"artifact {source!r} would reach the verifier's own files")
        paths.append("/" + "/".join(parts))
    return tuple(dict.fromkeys(paths))


def resolve(
    variables: Mapping[str, str], host_env: Mapping[str, str]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Replace ``${NAME}`` and ``${NAME:-DEFAULT}``; return the values and the unknown names.

    >>> resolve({"A": "${KEY}", "B": "${X:-1}"}, {"KEY": "k"})
    ({'A': 'k', 'B': '1'}, ())
    """
    unknown: list[str] = []

    def value_of(match: re.Match[str]) -> str:
        name, default = match.groups()
        if name not in host_env and default is None:
            unknown.append(name)
        return host_env.get(name, default or "")

    values = {name: _VARIABLE.sub(value_of, str(text)) for name, text in variables.items()}
    return values, tuple(dict.fromkeys(unknown))


def _seconds(value: object, default: float) -> float:
    """Return a time limit in seconds. Raises ValueError for one that is not above 0."""
    if value is None:
        return default
    seconds = float(str(value))
    if not 0 < seconds < math.inf:
        raise ValueError(f"a time limit of {value!r} s is not above 0")
    return seconds


def _mib(value: object) -> int | None:
    """Return a size in MiB: a number, or a text such as 2G (an older form).

    >>> _mib("2G"), _mib(512)
    (2048, 512)
    """
    if value is None:
        return None
    text = str(value).strip().upper()
    factor = SIZES.get(text[-1:])
    return math.ceil(float(text[:-1]) * factor) if factor else math.ceil(float(text))


class RewardUnreadable(ValueError):
    """A verifier's file has no reward."""


def reward_of(text: str, *, is_json: bool, key: str = "reward") -> float:
    """Return the reward in a file of a verifier.

    A JSON object has it under ``key``, or as its only value; Harbor keeps several by name.

    >>> reward_of(" 0.5 ", is_json=False), reward_of('{"tests": 1}', is_json=True)
    (0.5, 1.0)

    Raises RewardUnreadable.
    """
    try:
        value = json.loads(text) if is_json else float(text)
    except (ValueError, RecursionError) as error:
        raise RewardUnreadable(f"the reward {text[:80]!r} is not a number: {error}") from None
    if isinstance(value, dict):
        if key not in value and len(value) != 1:
            raise RewardUnreadable(
                f"reward.json has {', '.join(sorted(value)) or 'nothing'}, and no {key}; name one "
                "of them in the argument reward_key"
            )
        value = value[key] if key in value else next(iter(value.values()))
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:  # an integer of more than 308 digits
        number = math.nan
    if not math.isfinite(number):
        raise RewardUnreadable(f"the reward {text[:80]!r} is not a finite number")
    return number
