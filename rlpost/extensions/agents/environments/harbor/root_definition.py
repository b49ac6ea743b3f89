"""What a task's folder says of the roots of its agent and its verifiers. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlpost.extensions.agents.environments.harbor.compose import ComposeUnsupported, read_compose
from rlpost.extensions.agents.environments.harbor.fields import image_of

ENVIRONMENT = "environment/Dockerfile"
COMPOSE_NAMES = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")


@dataclass(frozen=True)
class TaskFiles:
    """The texts of a task's folder, and the names of those files that decide what it needs."""

    settings: Mapping[str, Any]
    instructions: Mapping[str, str] = field(default_factory=dict)
    """By folder: ``.``, or steps/NAME of a task with steps."""
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
        folder: from which a Dockerfile copies, relative to the task's: ``environment`` or ``.`` for
            the agent's, one with tests for a verifier's.
        image: that ``docker_image`` names, or the name of one that is built from the Dockerfile,
            which ends with a digest of ``folder``.
        dockerfile: of the image, relative to the task; None with a ``docker_image``.
        short: the image's name without the digest; None with a ``docker_image``.
        environment: variables of every command.
        brings_tests: a verifier's own image, which has its tests.
    """

    folder: str
    image: str
    dockerfile: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    short: str | None = None
    brings_tests: bool = False


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


def agent_root(
    name: str, folder: str, variables: Mapping[str, str], files: TaskFiles
) -> RootDefinition:
    """Return the root of a task's agent.

    ``folder``: from which its Dockerfile copies. ``variables``: of ``[environment.env]``, resolved.
    """
    environment = files.settings.get("environment", {})
    image, workdir = image_of(environment), environment.get("workdir")
    if image:
        return RootDefinition(folder, image, None, variables, workdir)
    built = f"{name}-{files.digest_of(folder)}"
    return RootDefinition(folder, built, ENVIRONMENT, variables, workdir, name)


def verifier_root(
    name: str,
    root: RootDefinition,
    environment: Mapping[str, Any],
    candidates: Sequence[tuple[Mapping[str, Any], str]],
    files: TaskFiles,
) -> RootDefinition:
    """Return the root of a separate verifier: its image, that of its Dockerfile, or the agent's.

    Args:
        environment: the table that holds for it, for variables and ``workdir``.
        candidates: a table that may name an image, and the folder of tests that may have a
            Dockerfile; the first that does counts.
    """
    variables = {str(name): str(value) for name, value in environment.get("env", {}).items()}
    workdir = environment.get("workdir")
    for table, folder in candidates:
        dockerfile, image = f"{folder}/Dockerfile", image_of(table)
        if image:
            return RootDefinition(folder, image, None, variables, workdir, brings_tests=True)
        if dockerfile in files.names:
            short = f"{name}-{folder.removeprefix('steps/').replace('/', '-')}"
            built = f"{short}-{files.digest_of(folder)}"
            return RootDefinition(folder, built, dockerfile, variables, workdir, short, True)
    return root
