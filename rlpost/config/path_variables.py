"""Environment variables in the paths of a recipe, such as ``$RLPOST_ASSETS/Qwen3-4B``.

They make a recipe work at every site.

Input: settings and the environment.
Output: the paths with their variables expanded; one line for each variable that is not set.
``cluster.assets_dir`` overrides RLPOST_ASSETS of the environment.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from rlpost.config.extensions import command
from rlpost.config.flags import flag
from rlpost.config.groups.base import Group, path_keys
from rlpost.config.groups.cluster import ClusterConfig
from rlpost.config.tree import Config
from rlpost.config.wording import listed
from rlpost.errors import ConfigError

ASSETS = "RLPOST_ASSETS"
CONTAINER = "RLPOST_CONTAINER"
VARIABLE = re.compile(r"\$([A-Z][A-Z0-9_]*)(?=[/:]|$)")


def variables_of(cluster: ClusterConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that paths may begin with; ``assets_dir`` may also begin with one."""
    if not cluster.assets_dir:
        return dict(environ)
    return {**environ, ASSETS: expanded(cluster.assets_dir, environ)}


def container_word(cluster: ClusterConfig, environ: Mapping[str, str]) -> str:
    """Return the container setting; RLPOST_CONTAINER replaces ``auto``.

    ``slurm/container_choice.py`` does the same on the batch host.

    Raises:
        ConfigError: the variable has an invalid value.
    """
    if cluster.container != "auto" or not environ.get(CONTAINER):
        return cluster.container
    if environ[CONTAINER] not in ("pyxis", "enroot", "none"):
        raise ConfigError(
            f"{CONTAINER}={environ[CONTAINER]} is not a choice; use pyxis, enroot or none, or unset it to detect the "
            "container"
        )
    return environ[CONTAINER]


def expanded(path: str, variables: Mapping[str, str]) -> str:
    """Return the path with its leading variable expanded; unchanged if the variable is not set."""
    found = VARIABLE.match(path)
    if found is None:
        return path
    value = variables.get(found[1])
    return value + path[found.end() :] if value else path


def variable_problems(config: Config) -> list[str]:
    """Return one line for each variable that is not set, with the settings that use it."""
    missing: dict[str, list[str]] = {}
    for key, path in _paths(config):
        if found := VARIABLE.match(path):
            missing.setdefault(found[1], []).append(key)
    return [_unset(name, list(dict.fromkeys(flags))) for name, flags in missing.items()]


def _unset(name: str, flags: Sequence[str]) -> str:
    """Describe a variable that is not set: the settings that use it, and the remedies."""
    begin = "begins" if len(flags) == 1 else "begin"
    line = f"${name} is not set, and {listed(flags, 'and')} {begin} with it; export {name}="
    if name == ASSETS:
        return (
            f"{line}FOLDER, or give --assets-dir FOLDER (also in the profile of your cluster): the folder on the "
            f"shared file system that holds models and data, or that {command('fetch')} is to fill"
        )
    if flags == ["--container-image"]:
        return f"{line}/PATH/IMAGE.sqsh, or give --container-image with that path or the image's name in a registry"
    return f"{line}FOLDER, or give {'another path' if len(flags) == 1 else 'other paths'}"


def _paths(config: Config) -> Iterator[tuple[str, str]]:
    for group in type(config).model_fields:
        node: Group = getattr(config, group)
        paths = {key: getattr(node, key) for key in path_keys(type(node))}
        for key, value in {**paths, **(node.model_extra or {})}.items():
            yield from ((flag(key), one) for one in _texts(value))
    for table in config.tables:
        yield from table.paths
    yield from (("--eval-prompt-data", one) for one in config.eval.eval_prompt_data)
    cluster = config.cluster
    if cluster.container not in ("none", "auto"):  # with "auto" the job reports a missing image
        yield from (("--container-image", one) for one in _texts(cluster.container_image))
    if cluster.container != "none":
        yield from (("--container-mounts", one) for one in cluster.container_mounts)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple):
        yield from (one for one in value if isinstance(one, str))
