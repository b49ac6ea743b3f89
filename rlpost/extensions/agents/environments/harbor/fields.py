"""Read values of task.toml, which its tables and those of its steps share. Pure.

Source: Harbor 0.26, harbor/models/task/config.py (schema 1.4).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Table = Mapping[str, Any]
"""A table of a task.toml; its values are checked where they are read."""
DEFAULT_SECONDS = 600.0  # Harbor's default for the verifier
SIZES = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_PHASE = {"timeout_sec", "user", "network_mode", "allowed_hosts"}
_VERIFIER = {*_PHASE, "env", "environment_mode", "environment", "collect"}
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
    "verifier": _VERIFIER,
    "environment": _ENVIRONMENT,
    "verifier.environment": _ENVIRONMENT,
    "solution": {"env"},
    "steps": {"name", "agent", "verifier", "min_reward", "healthcheck", "artifacts"},
    "steps.agent": _PHASE,
    "steps.verifier": _VERIFIER,
    "steps.verifier.environment": _ENVIRONMENT,
    "steps.healthcheck": {
        *("command", "interval_sec", "timeout_sec", "start_period_sec", "start_interval_sec"),
        "retries",
    },
}
"""Fields of task.toml by table; a task with others is skipped."""


def unknown_fields(settings: Table) -> list[str]:
    """Return the fields of task.toml that no part of this reader knows, as dotted names.

    >>> unknown_fields({"agent": {"timeout_sec": 1.0, "budget": 2}, "metadata": {"any": 1}})
    ['agent.budget']
    """
    return list(
        dict.fromkeys(
            f"{table}.{name}".lstrip(".")
            for table, known in FIELDS.items()
            for values in _tables(settings, table.split(".") if table else [])
            for name in values
            if name not in known
        )
    )


def _tables(values: Any, path: Sequence[str]) -> Iterator[Table]:
    """Yield the tables at a path, through all entries of arrays."""
    if isinstance(values, list):
        for each in values:
            yield from _tables(each, path)
    elif not path:
        yield values
    elif inner := values.get(path[0]):
        yield from _tables(inner, path[1:])


def has_network(phase: Table, environment: Table) -> bool:
    """Return whether a phase may use a network: its own mode, else that of its environment."""
    mode = phase.get("network_mode") or environment.get("network_mode")
    if mode is None:
        return environment.get("allow_internet") is not False
    return bool(mode != "no-network")


def cores_of(environment: Table) -> int | None:
    """Return the CPUs of an environment, rounded up; None if it names none."""
    cores = environment.get("cpus")
    return None if cores is None else max(1, math.ceil(cores))


def memory_of(environment: Table) -> int | None:
    """Return the memory of an environment in MiB; None if it names none."""
    return mib_of(environment.get("memory_mb", environment.get("memory")))


def is_separate(verifier: Table) -> bool:
    """Return whether a verifier has its own root."""
    mode = verifier.get("environment_mode")
    return mode == "separate" or (mode is None and "environment" in verifier)


def image_of(environment: Table) -> str | None:
    """Return ``docker_image``. Raises ValueError unless it is a text."""
    image = environment.get("docker_image")
    if image is not None and not isinstance(image, str):
        raise ValueError(f"docker_image = {image!r} is not a text")
    return image


def has_excludes(artifacts: Sequence[str | Table]) -> bool:
    """Return whether an artifact leaves some of its files out."""
    return any(not isinstance(each, str) and bool(each.get("exclude")) for each in artifacts)


def artifact_paths(entries: Sequence[str | Table]) -> tuple[str, ...]:
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


def seconds_of(value: object, default: float) -> float:
    """Return a time limit in seconds. Raises ValueError for one that is not above 0."""
    if value is None:
        return default
    seconds = float(str(value))
    if not 0 < seconds < math.inf:
        raise ValueError(f"a time limit of {value!r} s is not above 0")
    return seconds


def mib_of(value: object) -> int | None:
    """Return a size in MiB: a number, or a text such as 2G (an older form).

    >>> mib_of("2G"), mib_of(512)
    (2048, 512)
    """
    if value is None:
        return None
    text = str(value).strip().upper()
    factor = SIZES.get(text[-1:])
    return math.ceil(float(text[:-1]) * factor) if factor else math.ceil(float(text))
