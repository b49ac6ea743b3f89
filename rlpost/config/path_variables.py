"""Variables in the paths of a recipe: ``$RLPOST_ASSETS/Qwen3-4B`` is for every site where it keeps its models.

In: settings and the environment. Out: the paths with the values of their variables; one line for each variable that
has none. ``cluster.assets_dir`` gives RLPOST_ASSETS its value before the environment does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from rlpost.config.groups.base import Group, path_keys
from rlpost.config.groups.cluster import ClusterConfig
from rlpost.config.tree import Config
from rlpost.errors import ConfigError

ASSETS = "RLPOST_ASSETS"
CONTAINER = "RLPOST_CONTAINER"
VARIABLE = re.compile(r"\$([A-Z][A-Z0-9_]*)(?=[/:]|$)")


def variables_of(cluster: ClusterConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that paths may begin with; ``assets_dir`` may begin with one itself."""
    return {**environ, **({ASSETS: expanded(cluster.assets_dir, environ)} if cluster.assets_dir else {})}


def container_word(cluster: ClusterConfig, environ: Mapping[str, str]) -> str:
    """The container of the settings: RLPOST_CONTAINER in the place of ``auto``, as ``slurm/container.sh`` reads it.

    Raises:
        ConfigError: the variable holds no choice.
    """
    if cluster.container != "auto" or not environ.get(CONTAINER):
        return cluster.container
    if environ[CONTAINER] not in ("pyxis", "enroot", "none"):
        raise ConfigError(
            f"{CONTAINER}={environ[CONTAINER]} is not a choice; use pyxis, enroot or none, or unset it to have it "
            "detected"
        )
    return environ[CONTAINER]


def expanded(path: str, variables: Mapping[str, str]) -> str:
    """The path with the value of the variable that it begins with; as it is where that is not set."""
    found = VARIABLE.match(path)
    value = variables.get(found[1]) if found else None
    return path if not found or not value else value + path[found.end() :]


def variable_problems(config: Config) -> list[str]:
    """One line for each variable that is not set, with the settings that need it."""
    missing: dict[str, list[str]] = {}
    for key, path in _paths(config):
        if found := VARIABLE.match(path):
            missing.setdefault(found[1], []).append(key)
    return [
        f"${name} is not set and {', '.join(dict.fromkeys(keys))} begin with it: export {name}"
        + (", or set cluster.assets_dir (--assets-dir, or in the profile of your cluster)" if name == ASSETS else "")
        for name, keys in missing.items()
    ]


def _paths(config: Config) -> Iterator[tuple[str, str]]:
    for group in type(config).model_fields:
        node: Group = getattr(config, group)
        paths = {key: getattr(node, key) for key in path_keys(type(node))}
        for key, value in {**paths, **(node.model_extra or {})}.items():
            yield from ((f"{group}.{key}", one) for one in _texts(value))
    yield from (("eval.eval_prompt_data", one) for one in config.eval.eval_prompt_data)
    cluster = config.cluster
    if cluster.container not in ("none", "auto"):  # a job that chooses its container says what it lacks
        yield from (("cluster.container_image", one) for one in _texts(cluster.container_image))
    if cluster.container != "none":
        yield from (("cluster.container_mounts", one) for one in cluster.container_mounts)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple):
        yield from (one for one in value if isinstance(one, str))
