"""Paths that a run needs inside its container and that are not there. Pure.

In: a ``Config``, the folders that are always mounted. Out: one line for each path that lies below no mount.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import PurePosixPath

from rlpost.config.tree import Config
from rlpost.errors import ConfigError


def container_problems(config: Config, always: Sequence[str] = ()) -> list[str]:
    """Paths of the settings that are not visible in the container.

    Args:
        always: folders that are mounted at their own path: the run's, and the code where it is known.

    Returns:
        One line for each path; none without a container, or while it is not chosen.
    """
    if config.cluster.container in ("none", "auto"):
        return []
    mounts = [_ends(mount) for mount in (*config.cluster.container_mounts, *always)]
    listed = ", ".join(config.cluster.container_mounts) or "none given"
    problems = []
    for name, path in _paths(config):
        if any(_is_below(path, target) for _, target in mounts):
            continue
        moved = next((target for source, target in mounts if _is_below(path, source)), None)
        way = f"in the container that folder is {moved}" if moved else f"mount its folder, SOURCE or SOURCE:{path}"
        problems.append(f"{name} = {path}: below no target of cluster.container_mounts ({listed}); {way}")
    return problems


def interpreter_note(config: Config) -> str | None:
    """On an interpreter by name: enroot and pyxis run a login shell, and Debian's /etc/profile gives it a PATH of its
    own (ENROOT_LOGIN_SHELL, enroot, doc/cmd/start.md)."""
    cluster = config.cluster
    if cluster.container == "none" or not cluster.python or cluster.python.startswith("/"):
        return None
    if "PATH" in cluster.environment:
        return None
    return (
        f"cluster.python (--python) = {cluster.python} is found on the PATH of a login shell in the container, which "
        "Debian's /etc/profile resets whatever the image's own PATH is; give an absolute path (/opt/venv/bin/python)"
    )


def _paths(config: Config) -> Iterator[tuple[str, str]]:
    """(key, path) of all that is read or written inside; after loading, paths are absolute."""
    for group in type(config).model_fields:
        node = getattr(config, group)
        for key, value in {**dict(node), **(node.model_extra or {})}.items():
            for path in value if key == "prompt_data" and isinstance(value, tuple) else (value,):
                if group != "cluster" and isinstance(path, str) and path.startswith("/"):
                    yield f"{group}.{key}", path
    with suppress(ConfigError):  # a file of sets that cannot be used is told with the settings of the evaluation
        yield from ((f"eval.eval_prompt_data ({name})", path) for name, path in config.eval_sets)


def _ends(mount: str) -> tuple[str, str]:
    """Source and target of SOURCE, SOURCE:MODE, SOURCE:TARGET or SOURCE:TARGET:MODE."""
    source, *rest = mount.split(":")
    return source, rest[0] if rest and rest[0].startswith("/") else source


def _is_below(path: str, folder: str) -> bool:
    return PurePosixPath(path).is_relative_to(folder)
