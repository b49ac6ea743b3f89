"""Check that the paths of a run are visible in its container. Pure.

Input: a ``Config`` and the folders that are always mounted.
Output: one line for each path outside all mounts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import PurePosixPath

from rlpost.config.flags import flag
from rlpost.config.tree import Config
from rlpost.config.wording import listed
from rlpost.errors import ConfigError


def container_problems(config: Config, always: Sequence[str] = ()) -> list[str]:
    """Paths of the settings that are not visible in the container.

    Args:
        always: folders mounted at their own path: the run folder, and the code if known.

    Returns:
        One line for all paths outside the mounts, and one for each path mounted elsewhere. Empty
        without a container, or while it is undecided.
    """
    if config.cluster.container in ("none", "auto"):
        return []
    if config.cluster.container == "command" and "{source}" not in config.cluster.container_command:
        return []  # the runtime's own configuration decides what is visible
    user_mounts = config.cluster.container_mounts
    mounts = [_ends(mount) for mount in (*user_mounts, *always)]
    shown = (
        f"--container-mounts {' '.join(user_mounts)}"
        if user_mounts
        else "--container-mounts is not given"
    )
    lost, moved = [], []
    for name, path in _paths(config):
        if any(_is_below(path, target) for _, target in mounts):
            continue
        inside = next((target for source, target in mounts if _is_below(path, source)), None)
        if inside is None:
            lost.append((name, path))
        else:
            moved.append(
                f"{name} {path}: with {shown} the folder is {inside} in the container; use that path"
            )
    if not lost:
        return moved
    names = listed([f"{name} {path}" for name, path in lost], "and")
    folders = dict.fromkeys(str(PurePosixPath(path).parent) for _, path in lost)
    return [
        *moved,
        f"{names}: not visible in the container ({shown}); use --container-mounts {' '.join([*user_mounts, *folders])}",
    ]


def interpreter_note(config: Config) -> str | None:
    """Return a note if --python is a bare name; None otherwise.

    enroot and pyxis run a login shell, whose PATH Debian's /etc/profile resets (ENROOT_LOGIN_SHELL,
    enroot, doc/cmd/start.md).
    """
    cluster = config.cluster
    if cluster.container == "none" or not cluster.python or cluster.python.startswith("/"):
        return None
    if "PATH" in cluster.environment:
        return None
    if cluster.container == "command":
        return (
            f"--python {cluster.python} is looked up on the PATH inside the container, which runtimes take from the "
            "image (Apptainer) or from the job (Charliecloud); give an absolute path (/opt/venv/bin/python)"
        )
    return (
        f"--python {cluster.python} is looked up on the PATH of a login shell in the container, which Debian's "
        "/etc/profile resets; give an absolute path (/opt/venv/bin/python)"
    )


def _paths(config: Config) -> Iterator[tuple[str, str]]:
    """(flag, path) of every path read or written inside; loaded paths are absolute."""
    for group in type(config).model_fields:
        node = getattr(config, group)
        for key, value in {**dict(node), **(node.model_extra or {})}.items():
            for path in value if key == "prompt_data" and isinstance(value, tuple) else (value,):
                if group != "cluster" and isinstance(path, str) and path.startswith("/"):
                    yield flag(key), path
    for table in config.tables:
        yield from table.paths
    with suppress(ConfigError):  # ``eval_problems`` reports an invalid file
        named = "--eval-config" if config.eval.eval_config else "--eval-prompt-data"
        yield from ((f"{named} {name}", path) for name, path in config.eval_sets)


def _ends(mount: str) -> tuple[str, str]:
    """Source and target of SOURCE, SOURCE:MODE, SOURCE:TARGET or SOURCE:TARGET:MODE."""
    source, *rest = mount.split(":")
    return source, rest[0] if rest and rest[0].startswith("/") else source


def _is_below(path: str, folder: str) -> bool:
    return PurePosixPath(path).is_relative_to(folder)
